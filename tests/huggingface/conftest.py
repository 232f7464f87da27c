import pytest

pytest.importorskip("transformers", reason="transformers is an optional extra: pip install 's2-megatron[hf]'")


@pytest.fixture(scope="package")
def tools():
    from tests.huggingface.forked import Tools

    tools = Tools()
    yield tools
    tools.process.stdin.close()
    tools.process.wait(600)
