"""What `export-hf --stock` writes, in engines that are not ours: each gives the log-probabilities of Megatron's model,
far beyond the windows, and others without the windows or with windows of one token more."""

import numpy as np
import pytest

from tests.engines.models import MODELS, WINDOW

NEAR, FAR = 1e-3, 0.05  # of log-probabilities, in fp32
ENGINES = [("transformers", "eager"), ("transformers", "sdpa"), ("vllm", "auto")]


def difference(rows, made) -> float:
    """The largest one after a token beyond the first window; the last row is not in vLLM's answer."""
    assert isinstance(rows, np.ndarray), f"refused: {rows}"
    return float(np.abs(rows - made.expected)[WINDOW:-1].max())


@pytest.mark.parametrize("engine, way", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_computes_what_megatron_computes(models, answers, engine, way, name):
    made, found = models[name], answers(engine, way)
    wrong = [kind for kind in ("no windows", "shifted") if kind in made.folders]
    far = {kind: difference(found[f"{name} {kind}"], made) for kind in wrong}
    near = difference(found[f"{name} stock"], made)
    print(f"{engine} {way}, {name}: {near:.1e}", *(f"{kind} {value:.2g}" for kind, value in far.items()), sep=", ")
    assert near <= NEAR
    assert len(far) == 2 * ("W" in made.layers) and all(value >= FAR for value in far.values()), far


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same_or_refuses(models, answers, name):
    """It has windows per layer in Mellum alone, whose experts are in every layer, and no shares of all experts."""
    made, found = models[name], answers("llamacpp", "f32")
    rows = {kind: found[f"{name} {kind}"] for kind in made.folders if kind != "own class"}
    if ("W" in made.layers and name not in ("experts mixed", "experts windows")) or name == "shares dense":
        reasons = ("is not supported", "Can not map tensor")
        assert all(isinstance(one, str) and any(reason in one for reason in reasons) for one in rows.values()), rows
        return
    near = difference(rows.pop("stock"), made)
    dense = rows.pop("no windows", None)
    assert dense is None or "is_swa_any" in dense  # a Mellum without windows
    far = {kind: difference(one, made) for kind, one in rows.items()}
    print(f"llama.cpp, {name}: {near:.1e}", *(f"{kind} {value:.2g}" for kind, value in far.items()), sep=", ")
    assert near <= NEAR and len(far) == ("W" in made.layers) and all(value >= FAR for value in far.values()), far


@pytest.mark.parametrize("name", ["bias mixed", "norm mixed"])
def test_vllm_refuses_mixed_layers_under_the_name_of_its_own_class(answers, name):
    """Which reads no layer_types: the reason for the name that is exported. Refused, not dense."""
    refusal = answers("vllm", "auto")[f"{name} own class"]
    assert isinstance(refusal, str) and "Sliding window for some but all layers is not supported" in refusal
