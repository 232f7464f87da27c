"""The inference benchmark on a CPU: a tiny run from end to end, its arithmetic, and that wrong results stop it."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is an optional extra: pip install 's2-megatron[hf]'")

from benchmarks import inference, inference_checks
from benchmarks.inference import TINY, DecodeStep, Shape, build_models, sparsities
from benchmarks.inference_checks import check_attention, check_replay
from s2_megatron.huggingface.cache import CACHE_ARGUMENT, kept_tokens


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    return build_models(TINY, 2, torch.device("cpu"), torch.float32)


@pytest.mark.slow
def test_a_tiny_run_writes_every_row(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert inference.main(["--tiny", "--output", str(file), "--kv-heads", "2"]) == 0
    content = json.loads(file.read_text())
    found = {(row["what"], row["side"], row.get("batch")) for row in content["rows"]}
    expected = {("decode", side, batch) for side in ("dense", "S2 mixed") for batch in TINY.batches}
    expected |= {("first token", side, None) for side in ("dense", "S2 mixed")}
    expected |= {("prefill attention of a layer", side, None) for side in ("dense", "S2 layer")}
    assert found == expected and all(row["ms"] > 0 for row in content["rows"])
    assert len(content["checks"]) == 4
    assert "S2 mixed beside dense" in capsys.readouterr().out
    caches = {row["side"]: row["cache_gib"] for row in content["rows"] if row["what"] == "first token"}
    assert caches["dense"] / caches["S2 mixed"] == pytest.approx(256 * 3 / (256 + 2 * (32 + 64)))


def test_the_real_shape_keeps_an_eighth():
    both = sparsities(Shape(), 8)
    dense, mixed = (sum(map(sum, kept_tokens(both[side], 131072))) for side in ("dense", "S2 mixed"))
    assert dense == 32 * 8 * 131072 and 7.7 < dense / mixed < 7.9


def test_sides_share_their_weights(models):
    first, second = models.values()
    assert first.lm_head.weight.data_ptr() == second.lm_head.weight.data_ptr()
    text = torch.randint(0, 97, (1, 32))
    logits = [model(text, use_cache=False).logits for model in (first, second)]
    assert torch.allclose(*logits, atol=1e-5)  # in the window both attend everything


@pytest.mark.parametrize("side", ["dense", "S2 mixed"])
def test_a_step_is_the_models_next_token(models, side):
    """A decoding step after a prefill gives the logits of the whole text."""
    model, text = models[side], torch.randint(0, 97, (2, 256))
    cache = inference.new_cache(side, model, TINY, 256, 2, filled=False)
    step = DecodeStep(side, model, TINY, 256, 2)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits[:, -1:]
        if side == "dense":  # its cache is filled from the end
            cache.length = 255
            model(text[:, :255], **{CACHE_ARGUMENT: cache})
            cache.store = [tuple(torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in pair) for pair in cache.store]
            cache.length, cache.position = 256, step.cache.position
        else:
            model(text[:, :255], **{CACHE_ARGUMENT: cache})
    step.cache, step.ids = cache, text[:, 255:]
    assert torch.allclose(step.eager(), expected, atol=1e-5)
    assert torch.equal(step.eager(), step.eager())


def test_wrong_results_stop_it(models, monkeypatch):
    step = DecodeStep("S2 mixed", models["S2 mixed"], TINY, 256, 1)
    check_replay(step)
    monkeypatch.setattr(step, "replay", lambda: step.eager() * 1.1)
    with pytest.raises(AssertionError, match="differs from an eager one"):
        check_replay(step)
    real = inference_checks.attend
    monkeypatch.setattr(inference_checks, "attend", lambda *arguments: real(*arguments) * 1.01)
    with pytest.raises(AssertionError, match="layer 0, prefill: error"):
        check_attention(models["S2 mixed"], 256)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        inference.main([])
    error = capsys.readouterr().err
    assert error.startswith("error: no GPU; ") and "use --tiny" in error
