"""import-hf of models whose layers have windows: which layers, and how long, as the installed transformers computes
them; the plan beside the checkpoint; the logits beyond the window."""

import json
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MinistralConfig, MistralConfig, Qwen2Config, Qwen3Config

from s2_megatron.config.load import load_config
from s2_megatron.tools.hf import logit_check
from s2_megatron.tools.hf.architecture import config_as_read
from s2_megatron.tools.hf.source_windows import plan_data, source_windows
from tests.huggingface.forked import ROOT
from tests.huggingface.test_imported_models import LAYER as OF_A_LAYER
from tests.huggingface.test_imported_models import WORDS as OF_WORDS

S, F = "sliding_attention", "full_attention"
WORDS, WINDOW, LENGTH = 130, 37, 1000
SIZES = dict(
    vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, initializer_range=0.2, max_position_embeddings=16384,
)  # fmt: skip
# (config, its plan)
MODELS = {
    "qwen2": (Qwen2Config(**SIZES, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1), "DWWW"),
    "qwen3": (Qwen3Config(**SIZES, sliding_window=WINDOW, use_sliding_window=True, layer_types=[S, S, F, S]), "WWDW"),
    "mistral": (MistralConfig(**SIZES, sliding_window=WINDOW), "W"),
    "ministral": (MinistralConfig(**SIZES, sliding_window=WINDOW, layer_types=[S, F, S, F]), "WD"),
}


def saved(config, folder: Path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def plan(layers: str, window: int = WINDOW) -> dict:
    return dict(block_size=64, layers=layers, specs=dict(W=dict(window=window)))


def windows_of(**keys) -> tuple[int | None, ...]:
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    return source_windows(config_as_read(sizes | keys, "given"), "given")


@pytest.mark.parametrize(
    "keys, windows",
    [
        (dict(model_type="llama", layer_types=[F] * 4), [None] * 4),
        (dict(model_type="mistral"), [4096] * 4),  # the default of transformers
        (dict(model_type="mistral", sliding_window=None), [None] * 4),
        (dict(model_type="mistral", sliding_window=5, layer_types=[S] * 4), [5] * 4),
        (dict(model_type="ministral", sliding_window=5), [5] * 4),
        (dict(model_type="ministral", sliding_window=5, layer_types=[F, S, F, F]), [None, 5, None, None]),
        (dict(model_type="qwen2", sliding_window=131072, max_window_layers=0), [None] * 4),
        (dict(model_type="qwen2", sliding_window=131072, use_sliding_window=True, max_window_layers=3),
         [None, None, None, 131072]),
        (dict(model_type="qwen3", sliding_window=5, use_sliding_window=True, max_window_layers=4), [None] * 4),
        (dict(model_type="qwen3", sliding_window=5, use_sliding_window=True, max_window_layers=4,
              layer_types=[F, S, S, F]), [None, 5, 5, None]),
        (dict(model_type="qwen3", sliding_window=1, use_sliding_window=True, max_window_layers=0), [1] * 4),
    ],
)  # fmt: skip
def test_the_windows_are_those_of_transformers(keys, windows):
    assert windows_of(**keys) == tuple(windows)


def test_a_gate_that_is_closed_names_the_keys():
    """Layers with a window, and use_sliding_window false: transformers has no window to give them."""
    with pytest.raises(ValueError, match=r"cannot run a qwen3 with sliding_window=None, use_sliding_window=False, max"):
        windows_of(model_type="qwen3", sliding_window=5, layer_types=[F, S, S, F])


@pytest.mark.parametrize(
    "visible, message",
    [
        (lambda query, key: (query - key < 3) & (key <= query), "mask has the window 3, its attention is handed 5"),
        (lambda query, key: (query // 8 == key // 8) & (key <= query), "its masks are no windows"),  # chunks
        (lambda query, key: (key <= query) & ((query - key) % 3 != 1), "its masks are no windows"),
        (lambda query, key: key == key, "its masks are not causal"),
    ],
)
def test_masks_that_are_no_windows(monkeypatch, visible, message):
    from transformers.models.ministral import modeling_ministral as code

    mask = lambda batch, head, query, key: visible(query, key)  # noqa: E731
    monkeypatch.setattr(code, "create_sliding_window_causal_mask", lambda **_: mask)
    with pytest.raises(ValueError, match=message):
        windows_of(model_type="ministral", sliding_window=5)


def test_the_plan_is_its_shortest_part():
    assert plan_data((None, None, 7, None, None, 7)) == plan("DDW", 7)
    assert plan_data((7, None, 7)) == plan("WDW", 7)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_windows(tools, tmp_path, name):
    """Its plan, and what the import says, whose text is 6 windows long; of one the logits of 27 windows."""
    config, layers = MODELS[name]
    stock = saved(config, tmp_path / "in")
    out, _ = tools("import-hf", "--input", tmp_path / "in", "--output", tmp_path / "out")
    count = (layers * (4 // len(layers))).count("W")
    assert f"logits equal transformers' (all layers, {count} with a window of {WINDOW}; largest" in out
    written = load_config(tmp_path / "out" / "windows.yaml").settings
    assert (written.block_size, written.layers, written.specs["W"].window) == (64, layers, WINDOW)
    assert f"--s2-config={tmp_path}/out/windows.yaml" in out
    if name != "qwen3":
        return
    logits = dict(load=str(tmp_path / "out"), output=str(tmp_path / "x.npz"), dense_core="s2", s2_config=None)
    answer = tools.ask(logits=logits | dict(words=WORDS))
    assert answer["status"] == 0, answer
    found = np.load(tmp_path / "x.npz")
    with torch.no_grad():
        expected = stock(torch.from_numpy(found["tokens"]), use_cache=False).logits[0].numpy()
    ours = found[f"logits_{LENGTH}"][:, :WORDS]
    assert ours.shape == expected.shape and np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.fixture(scope="module")
def imported(tools, tmp_path_factory):
    """A model whose window is longer than the text of the check."""
    folder = tmp_path_factory.mktemp("long")
    config = Qwen3Config(**SIZES, sliding_window=4096, use_sliding_window=True, layer_types=[S, S, F, S])
    saved(config, folder / "in")
    return folder, *tools("import-hf", "--input", folder / "in", "--output", folder / "out")


def test_a_window_longer_than_the_text_of_the_check(imported):
    _, out, _ = imported
    assert "logits equal transformers' (all layers, 3 with a window of 64 in place of 4096; largest difference" in out
    assert "for S2-Attention also `--s2-config YAML` in place of windows.yaml, its own windows; it adds" in out


def test_as_many_layers_as_there_is_time_for(tools, imported, tmp_path):
    limit = {f"{logit_check.__name__}:MOST_FLOPS": 4 * 256 * (OF_WORDS + 3.5 * OF_A_LAYER)}
    out, _ = tools("import-hf", "--input", imported[0] / "in", "--output", tmp_path / "out", **limit)
    assert "(the first 3 layers, 2 with a window of 64 in place of 4096, not the rest, for its time; largest" in out


@pytest.mark.parametrize("wrong", [dict(block_size=64, layers="D"), plan("WWDW", 4095), plan("WWDW", 4097)])
def test_the_check_sees_a_window_that_is_lost_or_one_token_off(tools, imported, wrong):
    folder = imported[0]
    answer = tools.ask(compare=dict(source=str(folder / "in"), load=str(folder / "out"), plan=wrong))
    assert answer["status"] == 2 and "the imported model computes other logits than transformers" in answer["err"]
    difference, largest = map(float, answer["err"].split("largest difference ")[1].split(",")[0].split(" of "))
    assert difference > 100 * logit_check.LARGEST * largest  # nowhere near the border


def test_the_script_gives_the_plan(tools, imported, tmp_path):
    """From where the folder lies; another --s2-config comes behind it, and wins."""
    folder, out, _ = imported
    line = shlex.split(out[out.index("CUDA_DEVICE_MAX_CONNECTIONS") :].replace("\\\n", " "))
    assert "nothing wrong found" in tools("check", "--", *line)[0]
    (python := tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    moved = tmp_path / "a folder"
    moved.mkdir()
    (moved / "train.sh").write_bytes((folder / "out" / "train.sh").read_bytes())
    done = subprocess.run(
        ["bash", moved / "train.sh", "--s2-config=mine.yaml"], cwd=ROOT,
        env={"PYTHON": str(python), "PATH": "/usr/bin:/bin", "PREFLIGHT": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    given = [word for word in done.stdout.splitlines() if word.startswith("--s2-config")]
    assert given == [f"--s2-config={moved}/windows.yaml", "--s2-config=mine.yaml"]


def test_a_gate_that_leaves_no_layer_a_window_is_said(tools, tmp_path):
    """use_sliding_window, and max_window_layers beyond the last layer: dense in transformers."""
    config = Qwen3Config(**SIZES, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=4)
    saved(config, tmp_path / "in")
    assert json.loads((tmp_path / "in" / "config.json").read_text())["use_sliding_window"] is True
    out, errors = tools("import-hf", "--input", tmp_path / "in", "--output", tmp_path / "out", "--no-logit-check")
    assert "sliding_window=37, max_window_layers=4: transformers gives no layer a window; the model is dense" in errors
    assert not (tmp_path / "out" / "windows.yaml").exists() and "windows.yaml" not in out
