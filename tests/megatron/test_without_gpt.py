"""HybridModel trains where Megatron has no GPTModel, and a GPT is refused there in one line."""

import pytest

from tests.megatron.test_hybrid import HYBRID
from tests.megatron.without_gpt import require_gpt_model, write_megatron

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    require_gpt_model()
    return write_megatron(tmp_path_factory.mktemp("megatron"))


def test_a_hybrid_model_trains_as_before(lab, megatron):
    flags = "--train-iters 2 --hybrid-layer-pattern *-*-*-*-"
    expected = lab.run("with_gpt", flags, model=HYBRID)
    run = lab.run("without_gpt", flags, model=HYBRID, python_path=megatron, torchrun=True)
    assert (run.losses, run.grad_norms) == (expected.losses, expected.grad_norms) and len(run.losses) == 2
    assert "GPTModel is DEPRECATED" not in run.output


def test_a_gpt_is_refused(lab, megatron):
    run = lab.run("gpt", "--train-iters 2", python_path=megatron, torchrun=True, fails=True)
    (line,) = (line for line in run.output.splitlines() if line.startswith("error: "))
    assert line.startswith("error: --hybrid-layer-pattern is not given, and Megatron ")
    assert line.endswith("; add --hybrid-layer-pattern '*-*-*-*-'")
