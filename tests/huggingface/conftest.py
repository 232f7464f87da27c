import pytest

pytest.importorskip("transformers", reason="transformers is an optional extra: pip install 's2-megatron[hf]'")
