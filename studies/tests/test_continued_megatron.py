"""Studies that go on from a dense model, every run a process of Megatron's: over text, and over tasks."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from examples.quickstart.dataset import train_byte_pairs
from studies.continuations import CONTINUATIONS
from studies.continued import run_continued
from studies.public import PUBLIC
from studies.recall import BEYOND
from studies.run import COMPLETE, parse_arguments
from studies.tasks import TASKS
from studies.tests.test_continued import kept
from studies.workers import Budget


@pytest.mark.long
@pytest.mark.parametrize("name", ["from-dense-tiny"])
def test_a_study_through_megatron(name, tmp_path):
    """About two minutes: every run is a process of Megatron's."""
    said = []
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    given = parse_arguments([name, "--arms", "dense", "s2", "--rate", "4e-3", *folders])
    assert run_continued(CONTINUATIONS[name], given, Budget(None), said.append) == COMPLETE, "\n".join(said)
    found = kept(tmp_path, name)
    first = {label: found[label].train["loss"][0] for label in ("start-dense", "dense", "s2")}
    assert first["dense"] < first["start-dense"] - 0.5, "the weights did not come along"
    assert abs(first["s2"] - first["dense"]) < 0.1
    assert found["switched-s2"].validation["step"].tolist() == [0] and not found["switched-s2"].train


@pytest.mark.long
def test_tasks_after_text_through_megatron(tmp_path):
    """Two minutes. The dense model reads text, its heads are chosen on text, and what goes on reads tasks four times as
    long."""
    said = []
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    given = parse_arguments(["extend-recall-tiny", "--arms", "dense", "chosen-few", "--rate", "4e-3", *folders])
    study = CONTINUATIONS["extend-recall-tiny"]
    assert run_continued(study, given, Budget(None), said.append) == COMPLETE, "\n".join(said)
    found = kept(tmp_path, study.name)
    first = {arm: found[arm].train["loss"][0] for arm in ("dense", "chosen-few")}
    assert abs(first["chosen-few"] - first["dense"]) < 0.1
    few = found["chosen-few"]
    assert few.about["choice"]["ranking"]["chosen"] == study.arm("chosen-few").chosen
    assert "sequences of 256 tokens of more," in few.about["choice"]["yaml"]  # the text's second part
    read = [found[label].about["settings"]["data_path"] for label in ("start-dense", "dense")]
    assert read[0] != read[1]
    tested = few.about["tests"]["recall"]
    assert tested.keys() == {*TASKS, BEYOND} and tested[BEYOND]["questions"] == study.tasks.tests // 4
    assert tested["recall"]["questions"] == study.tasks.tests * study.tasks.pairs
    # What counts for the loss are the answers, which stand at the end.
    assert few.about["position_starts"] == [0, 256, 512, 768]
    assert np.isfinite(few.validation["loss_by_position"][-1]).tolist() == [False, False, False, True]


def import_tiny_llama(runs: Path) -> None:
    """What the tiny study of a public model begins with: random weights, as a Hugging Face folder and imported."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    study = PUBLIC["smollm2-tiny"]
    folder, model = runs / "imported" / study.start.study.imported, study.model
    folder.mkdir(parents=True)
    texts = (file.read_text(errors="ignore") for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    train_byte_pairs(texts, 512).save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=model.hidden_size, intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads, max_position_embeddings=model.seq_length, rms_norm_eps=1e-5,
        rope_theta=100000.0, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "hf")
    words = ["import-hf", "--input", folder / "hf", "--output", folder / "megatron"]
    subprocess.run([sys.executable, "-m", "s2_megatron", *words], check=True)


@pytest.mark.long
def test_a_public_model_through_megatron(tmp_path):
    """Three minutes. The gates of a model that nobody trained are shut; its arms go on from the healed weights."""
    import_tiny_llama(tmp_path / "runs")
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    words = [sys.executable, "-m", "studies.gates", "smollm2-tiny", *folders[:2]]
    gates = subprocess.run(words, capture_output=True, text=True)
    assert gates.returncode == 1 and "expected 80%" in gates.stdout and "shut: the loss" not in gates.stdout
    said, study = [], PUBLIC["smollm2-tiny"]
    arms = ["dense", "3h-copies", "3h-w-offset", "layers-w-sink"]
    given = parse_arguments(["smollm2-tiny", "--arms", *arms, "--rate", "1e-3", *folders])
    assert run_continued(study, given, Budget(None), said.append) == COMPLETE, "\n".join(said)
    found = kept(tmp_path, study.name)
    assert sorted(found) == sorted([*arms, "start-dense"])
    healed = found["start-dense"].train["loss"]
    for arm in arms:
        tests = found[arm].about["tests"]["passages"]
        assert tests["loss"] == pytest.approx(found[arm].last_loss, rel=0.02)
        assert abs(found[arm].train["loss"][0] - healed[-1]) < 0.15, "the healed weights came along"
    assert found["start-dense"].about["settings"].get("pretrained_checkpoint") is None
    assert found["layers-w-sink"].about["choice"]["ranking"]["by"] == "layer"
    assert found["3h-copies"].about["choice"]["ranking"]["loss_from_position"] == 224
    assert len(list((tmp_path / "runs").rglob("known-code.json"))) == 1
    assert not list((tmp_path / "runs").rglob("with_offsets"))
