"""Small random models whose layers are dense or have a window: what Megatron's model says of a text, and the folder
that `export-hf --stock` makes of the checkpoint.

T tokens of the text, V words.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.huggingface.forked import Tools
from tests.huggingface.stock_checkpoints import plan_of, shape_of, write

WINDOW, LENGTH = 37, 160  # four windows and more

EXPERTS = dict(layers=[1, 1, 1, 1], count=4, hidden=64, top=2, normalized=True)
# name -> (layers, D dense or W with the window; what the shape has). Heads of 32: vLLM's CPU kernels know no narrower.
MODELS = {
    "llama dense": ("D", {}),
    "llama windows": ("W", {}),
    "llama mixed": ("DWWD", dict(tied=True)),
    "bias dense": ("D", dict(qkv_bias=True)),
    "bias windows": ("W", dict(qkv_bias=True)),
    "bias mixed": ("WWDW", dict(qkv_bias=True)),
    "norm dense": ("D", dict(qk_norm=True)),
    "norm windows": ("W", dict(qk_norm=True)),
    "norm mixed": ("WWWD", dict(qk_norm=True)),
    "experts dense": ("D", dict(qk_norm=True, experts=EXPERTS)),  # Qwen3-MoE
    "experts mixed": ("DWWD", dict(qk_norm=True, experts=EXPERTS)),  # Mellum
    "experts windows": ("W", dict(qk_norm=True, experts=EXPERTS)),  # Mellum
    "some experts mixed": ("DWWD", dict(qk_norm=True, experts=EXPERTS | dict(layers=[0, 1, 1, 0], normalized=False))),
    "shares dense": ("D", dict(qk_norm=True, experts=EXPERTS | dict(normalized=False))),  # of all experts
    "mixtral dense": ("D", dict(experts=EXPERTS)),
    "mixtral windows": ("W", dict(experts=EXPERTS)),
}
WIDE = dict(hidden_size=128, head_dim=32)


@dataclass(frozen=True)
class Made:
    layers: str
    folders: dict[str, Path]  # "stock"; "no windows" and "shifted", which must not pass; "own class" of an engine
    text: np.ndarray  # int [T]
    expected: np.ndarray  # [T, V], log-probabilities, fp32, of Megatron's model


def stock_folder(tools: Tools, load: Path, out: Path) -> Path:
    """What `s2-megatron export-hf --stock` writes for a checkpoint."""
    tools("export-hf", "--load", load, "--output", out, "--stock")
    return out


def changed_copy(folder: Path, out: Path, **keys) -> Path:
    """The folder with other keys in its config; the weights are the same."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | keys))
    return out


def made_models(tools: Tools, root: Path) -> dict[str, Made]:
    return {name: _made(tools, root / name.replace(" ", "-"), *MODELS[name]) for name in MODELS}


def _made(tools: Tools, root: Path, layers: str, sizes: dict) -> Made:
    root.mkdir()
    windows = "W" in layers
    if "experts" in sizes:
        text, logits = _trained_with_experts(tools, root, layers, WIDE | sizes)
    else:
        text, logits = _trained(tools, root, layers, WIDE | sizes)
    logits = logits.astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    expected -= logits.max(1, keepdims=True)

    folders = {"stock": stock_folder(tools, root / "mcore", root / "stock")}
    if windows:
        kinds = json.loads((folders["stock"] / "config.json").read_text()).get("layer_types")
        all_keys = dict(layer_types=["full_attention"] * len(kinds)) if kinds else dict(sliding_window=None)
        folders["no windows"] = changed_copy(folders["stock"], root / "no-windows", **all_keys)
        folders["shifted"] = changed_copy(folders["stock"], root / "shifted", sliding_window=WINDOW + 1)
    if windows and "D" in layers and sizes.keys() & {"qkv_bias", "qk_norm"} and "experts" not in sizes:
        own = dict(architectures=["Qwen2ForCausalLM" if "qkv_bias" in sizes else "Qwen3ForCausalLM"])
        folders["own class"] = changed_copy(folders["stock"], root / "own-class", **own)
    return Made(layers, folders, text, expected)


def _trained(tools: Tools, root: Path, layers: str, sizes: dict) -> tuple[np.ndarray, np.ndarray]:
    """A checkpoint in root / "mcore"; the text [T], and Megatron's logits [T, V]."""
    shape = shape_of(**sizes)
    plan = plan_of(layers, **dict(window=WINDOW) if "W" in layers else {})
    load = write(root / "mcore", shape, s2_sparsity=plan.canonical_json())
    answer = tools.ask(
        logits=dict(load=str(load), output=str(root / "logits.npz"), words=shape.vocab_size, dense_core="s2",
                    s2_config=None)
    )  # fmt: skip
    assert answer["status"] == 0, answer["out"] + answer["err"]
    stored = np.load(root / "logits.npz")
    return stored["tokens"][0, :LENGTH], stored["logits_1000"][:LENGTH, : shape.vocab_size]


def _trained_with_experts(tools: Tools, root: Path, layers: str, sizes: dict) -> tuple[np.ndarray, np.ndarray]:
    """The same of a checkpoint that Megatron writes."""
    specs = dict(specs=dict(W=dict(window=WINDOW))) if "W" in layers else {}
    answer = tools.ask(
        save=dict(load=str(root / "mcore"), plan=dict(block_size=16, layers=layers) | specs, tokens=LENGTH,
                  output=str(root / "logits.npz"), sizes=sizes)
    )  # fmt: skip
    assert answer["status"] == 0, answer["out"] + answer["err"]
    stored = np.load(root / "logits.npz")
    return stored["tokens"][0], stored["logits"]
