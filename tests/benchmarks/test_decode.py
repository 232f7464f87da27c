"""The benchmark of decoding steps on a CPU: a tiny run, its checks, and what it refuses."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is an optional extra: pip install 's2-megatron[hf]'")

from benchmarks import decode
from benchmarks.inference import TINY, build_models

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="through Triton's interpreter, on a CPU")


def test_a_layer_is_checked_before_it_is_timed(monkeypatch):
    rows = decode.time_layer((2, 2, 2, 64), [decode.PLANS[5]], torch.float32, 16, CPU)
    assert [row["way"] for row in rows] == ["SDPA", "kernel", "kernel (32, 4, 4, 6)"]
    assert all(row["us"] > 0 and row["kept"] == 64 for row in rows)
    real = decode.decode
    monkeypatch.setattr(decode, "decode", lambda *arguments: [part * 1.01 for part in real(*arguments)])
    with pytest.raises(AssertionError, match=r"kernel: .* of SDPA's largest output"):
        decode.time_layer((2, 2, 2, 64), [], torch.float32, 16, CPU)


@pytest.mark.slow
def test_a_tiny_run_writes_every_row(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert decode.main(["--tiny", "--output", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["side"] for row in rows if row["part"] == "model"] == list(decode.SIDES)
    assert {row["way"] for row in rows if row["part"] == "layer"} == {"SDPA", "kernel"}
    assert "256 tokens, batch 1: S2 by the kernel is" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_kernel_stops_the_models(monkeypatch):
    models = build_models(TINY, 2, CPU, torch.float32)
    monkeypatch.setitem(decode.SIDES, "S2, kernel", ("dense", "reference"))
    with pytest.raises(AssertionError, match="the kernel's logits differ from SDPA's by"):
        decode.time_model(models, TINY, 256, 1, CPU)


def test_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        decode.main([])
    assert end.value.code == 2 and "error: no GPU; expected one with 80 GB or more" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(SystemExit) as end:
        decode.main(["--tiny"])
    assert end.value.code == 2 and "set TRITON_INTERPRET=1" in capsys.readouterr().err
