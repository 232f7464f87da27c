"""Plans by KV head in vLLM, through the package's plugin: the log-probabilities of Megatron's model, and a cache that
holds what the heads will still read."""

import json
import os

import numpy as np
import pytest

from tests.engines.conftest import jobs_file, python_of, run_script
from tests.engines.models import HEAD_MODELS, KV_HEADS, WINDOW
from tests.huggingface.stock_checkpoints import LAYERS

NEAR, FAR = 1e-3, 0.05  # of log-probabilities, in fp32
TEXT, MORE, PIECE, BLOCK = 900, 50, 64, 32  # tokens; the last three as vllm_kept_keys.py has them


def difference(rows, made) -> float:
    """The largest one after a token beyond the first window; the last row is not in vLLM's answer."""
    assert isinstance(rows, np.ndarray), f"refused: {rows}"
    return float(np.abs(rows - made.expected[: len(rows)])[WINDOW:-1].max())


@pytest.mark.parametrize("name", HEAD_MODELS)
def test_vllm_computes_what_megatron_computes(models_of_heads, answers, name):
    made, found = models_of_heads[name], answers("vllm", "auto", with_plugin=True)
    near = difference(found[f"{name} own"], made)
    wrong = [kind for kind in ("no windows", "shifted", "moved") if kind in made.folders]
    far = {kind: difference(found[f"{name} {kind}"], made) for kind in wrong}
    print(f"vllm, {name}: {near:.1e}", *(f"{kind} {value:.2g}" for kind, value in far.items()), sep=", ")
    assert near <= NEAR
    assert len(far) >= 2 and all(value >= FAR for value in far.values()), far


def test_vllm_refuses_what_it_cannot_compute(answers):
    found = answers("vllm", "auto", with_plugin=True)
    for kind, message in (
        ("sinks", "layer 0, head 0 has sink_tokens 4; expected heads that are dense or"),
        ("experts", "a model of type s2_gpt with num_experts=4; expected one without experts"),
    ):
        refusal = found[f"heads mixed {kind}"]
        assert isinstance(refusal, str) and refusal.startswith(f"ValueError: vLLM: {message}")


def test_two_ranks_with_other_windows_each(models_of_heads, plugin, tmp_path):
    """Tensor parallelism: the ranks' heads differ, and so do their caches."""
    jobs = {name: str(models_of_heads[name].folders["own"]) for name in ("heads mixed", "heads in pairs")}
    jobs = jobs_file(tmp_path, jobs, models_of_heads["heads mixed"].text[:160])
    cores = sorted(os.sched_getaffinity(0))  # one for each rank, which vLLM wants a NUMA node for otherwise
    two = dict(VLLM_CPU_OMP_THREADS_BIND=f"{cores[0]}|{cores[-1]}", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    arguments = ["vllm_logprobs.py", "auto", jobs, tmp_path / "out.npz", "2"]
    run_script(python_of("vllm"), tmp_path, *arguments, PYTHONPATH=str(plugin), **two)
    found = np.load(tmp_path / "out.npz")
    near = {name: difference(found[name], models_of_heads[name]) for name in found.files}
    print("vllm, two ranks:", near)
    assert len(near) == 2 and max(near.values()) <= NEAR


@pytest.fixture(scope="module")
def kept(models_of_heads, plugin, tmp_path_factory):
    root = tmp_path_factory.mktemp("kept")
    folders = {name: str(made.folders["own"]) for name, made in models_of_heads.items()}
    folders["dense"] = str(models_of_heads["heads mixed"].folders["no windows"])
    jobs = jobs_file(root, folders, models_of_heads["heads mixed"].text[:TEXT])
    run_script(python_of("vllm"), root, "vllm_kept_keys.py", jobs, root / "out.json", PYTHONPATH=str(plugin))
    found = json.loads((root / "out.json").read_text())
    return {name: one | dict(rows=np.load(root / one["rows"])) for name, one in found.items()}


@pytest.mark.parametrize("name", HEAD_MODELS)
def test_what_windows_have_left_is_freed(models_of_heads, kept, name):
    """The text is read in pieces, continued token by token, and again with vLLM's prefix cache: right, and no window
    head ever holds more pages than its window and a piece touch."""
    made, one, dense = models_of_heads[name], kept[name], kept["dense"]
    layers, windows = HEAD_MODELS[name][:2]
    heads = [window for at in range(LAYERS) for window in windows.get(layers[at % len(layers)], (None,) * KV_HEADS)]
    full = -(-(TEXT + MORE) // BLOCK)
    most = sum(full if window is None else -(-(window - 1 + PIECE) // BLOCK) + 1 for window in heads)
    assert one["pieces"] >= TEXT // PIECE
    assert np.abs(one["rows"] - made.expected[: TEXT - 1]).max() <= NEAR
    assert one["cached"] >= TEXT // 2 and max(one["differences"]) <= NEAR
    pages = one["pages"] * one["page_bytes"]
    head_page = dense["page_bytes"] // KV_HEADS  # the bytes of one KV head
    print(f"vllm, {name}: {pages} of {dense['pages'] * dense['page_bytes']} bytes, generated {one['differences']}")
    assert dense["pages"] * dense["page_bytes"] == LAYERS * KV_HEADS * full * head_page
    assert pages <= most * head_page < LAYERS * KV_HEADS * full * head_page
