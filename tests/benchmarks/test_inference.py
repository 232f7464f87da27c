"""The benchmarks of inference and decoding steps on a CPU: tiny runs, arithmetic, and that wrong results stop them."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is an optional extra: pip install 's2-megatron[hf]'")

from benchmarks import decode, inference, inference_checks
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


CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="through Triton's interpreter, on a CPU")


@interpreted
def test_a_layer_is_checked_before_it_is_timed(monkeypatch):
    rows = decode.time_layer((2, 2, 2, 64), [decode.PLANS[5]], torch.float32, 16, CPU)
    assert [row["way"] for row in rows] == ["SDPA", "kernel", "kernel (32, 4, 4, 6)"]
    assert all(row["us"] > 0 and row["kept"] == 64 for row in rows)
    real = decode.decode
    monkeypatch.setattr(decode, "decode", lambda *arguments: [part * 1.01 for part in real(*arguments)])
    with pytest.raises(AssertionError, match=r"kernel: .* of SDPA's largest output"):
        decode.time_layer((2, 2, 2, 64), [], torch.float32, 16, CPU)


@interpreted
@pytest.mark.slow
def test_a_tiny_run_of_decoding_writes_every_row(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert decode.main(["--tiny", "--output", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["side"] for row in rows if row["part"] == "model"] == list(decode.SIDES)
    assert {row["way"] for row in rows if row["part"] == "layer"} == {"SDPA", "kernel"}
    assert "256 tokens, batch 1: S2 by the kernel is" in capsys.readouterr().out


@interpreted
@pytest.mark.slow
def test_a_wrong_kernel_stops_the_models(monkeypatch):
    models = build_models(TINY, 2, CPU, torch.float32)
    monkeypatch.setitem(decode.SIDES, "S2, kernel", ("dense", "reference"))
    with pytest.raises(AssertionError, match="the kernel's logits differ from SDPA's by"):
        decode.time_model(models, TINY, 256, 1, CPU)


@interpreted
def test_decoding_is_refused_without_a_gpu(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        decode.main([])
    assert end.value.code == 2 and "error: no GPU; expected one with 80 GB or more" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(SystemExit) as end:
        decode.main(["--tiny"])
    assert end.value.code == 2 and "set TRITON_INTERPRET=1" in capsys.readouterr().err
