"""Small random models whose layers, or KV heads, are dense or have a window: what Megatron's model says of a text, and
the folder that `export-hf` makes of the checkpoint.

T tokens of the text, V words.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from s2_megatron.config.load import SparsityConfig
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.config.stored import stored_sparsity
from tests.huggingface.forked import Tools
from tests.huggingface.stock_checkpoints import LAYERS, plan_of, shape_of, write

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

# name -> (layers, their windows by KV head, None is dense; what the shape has; softmax scale). Of the first, each head
# has a cache of its own in vLLM, of the second two have one, and not always neighbours.
HEADS, KV_HEADS = 8, 4
HEAD_MODELS = {
    "heads mixed": ("ABDC", dict(A=(WINDOW, WINDOW, None, WINDOW), B=(None, None, WINDOW, WINDOW), C=(50, None, 50, 2)),
                    dict(qk_norm=True, tied=True), None),
    "heads in pairs": ("ADBA", dict(A=(None, WINDOW, WINDOW, None), B=(WINDOW, 50, WINDOW, 50)),
                       dict(qkv_bias=True, softmax_type="learnable"), 0.25),
    "heads alike": ("WD", dict(W=(WINDOW,) * KV_HEADS), dict(softmax_type="off-by-one"), None),
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    layers: str
    # "stock", or "own" type; "no windows", "shifted" and "moved" heads, which must not pass; "sinks" and "experts",
    # which vLLM refuses; "own class" of an engine
    folders: dict[str, Path]
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


def head_models(tools: Tools, root: Path) -> dict[str, Made]:
    """Of HEAD_MODELS, as our own model type. Texts of 1,000 tokens."""
    return {name: _head_model(tools, root / name.replace(" ", "-"), *HEAD_MODELS[name]) for name in HEAD_MODELS}


def head_plan(layers: str, windows: dict, scale: float | None = None, shift: int = 0, move: int = 0):
    """The sparsity of windows by KV head. shift: tokens more; move: places by which the heads are too far on."""

    def spec(of_heads):
        moved = (of_heads[-move:] + of_heads[:-move]) if move else of_heads
        dense = [head for head, window in enumerate(moved) if window is None]
        keys = [1 if window is None else window + shift for window in moved]
        return dict(window=keys) | (dict(dense_heads=dense) if dense else {})

    specs = {name: spec(of_heads) for name, of_heads in windows.items()}
    data = dict(block_size=16, layers=layers) | (dict(specs=specs) if specs else {})
    config = SparsityConfig.from_data(data | ({} if scale is None else dict(softmax_scale=scale)))
    return config.resolve(num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, seq_length=1024)


def _head_model(tools: Tools, root: Path, layers: str, windows: dict, sizes: dict, scale: float | None) -> Made:
    root.mkdir()
    shape = shape_of(**WIDE | dict(num_heads=HEADS, num_kv_heads=KV_HEADS) | sizes)
    load, text, expected = _checkpoint(tools, root, shape, head_plan(layers, windows, scale))
    tools("export-hf", "--load", load, "--output", root / "own")
    wrong = {"no windows": head_plan("D", {}, scale), "shifted": head_plan(layers, windows, scale, shift=1)}
    if any(len(set(of_heads)) > 1 for of_heads in windows.values()):
        wrong["moved"] = head_plan(layers, windows, scale, move=1)
    wrong["sinks"] = plan_of("WD", window=WINDOW, sink_tokens=4, heads=(HEADS, KV_HEADS))
    folders = {
        kind: changed_copy(root / "own", root / kind.replace(" ", "-"), s2_sparsity=stored_sparsity(plan))
        for kind, plan in wrong.items()
    }
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    folders["experts"] = changed_copy(root / "own", root / "experts", **experts)
    return Made(layers, {"own": root / "own"} | folders, text, expected)


def _checkpoint(tools: Tools, root: Path, shape, plan: ResolvedSparsity) -> tuple[Path, np.ndarray, np.ndarray]:
    """A checkpoint of the plan, a text, and its log-probabilities by Megatron's model."""
    load = write(root / "mcore", shape, s2_sparsity=plan.canonical_json())
    answer = tools.ask(
        logits=dict(load=str(load), output=str(root / "logits.npz"), words=shape.vocab_size, dense_core="s2",
                    s2_config=None)
    )  # fmt: skip
    assert answer["status"] == 0, answer["out"] + answer["err"]
    stored = np.load(root / "logits.npz")
    return load, stored["tokens"][0], _log_softmax(stored["logits_1000"][:, : shape.vocab_size])


def _checkpoint_with_experts(tools: Tools, root: Path, layers: str, sizes: dict) -> tuple[Path, np.ndarray, np.ndarray]:
    """The same of a checkpoint that Megatron writes, and a text of LENGTH."""
    specs = dict(specs=dict(W=dict(window=WINDOW))) if "W" in layers else {}
    answer = tools.ask(
        save=dict(load=str(root / "mcore"), plan=dict(block_size=16, layers=layers) | specs, tokens=LENGTH,
                  output=str(root / "logits.npz"), sizes=sizes)
    )  # fmt: skip
    assert answer["status"] == 0, answer["out"] + answer["err"]
    stored = np.load(root / "logits.npz")
    return root / "mcore", stored["tokens"][0], _log_softmax(stored["logits"])


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    return expected - logits.max(1, keepdims=True)


def _made(tools: Tools, root: Path, layers: str, sizes: dict) -> Made:
    root.mkdir()
    windows = "W" in layers
    if "experts" in sizes:
        load, text, expected = _checkpoint_with_experts(tools, root, layers, WIDE | sizes)
    else:
        plan = plan_of(layers, **dict(window=WINDOW) if windows else {})
        load, text, expected = _checkpoint(tools, root, shape_of(**WIDE | sizes), plan)
    folders = {"stock": stock_folder(tools, load, root / "stock")}
    if windows:
        kinds = json.loads((folders["stock"] / "config.json").read_text()).get("layer_types")
        all_keys = dict(layer_types=["full_attention"] * len(kinds)) if kinds else dict(sliding_window=None)
        folders["no windows"] = changed_copy(folders["stock"], root / "no-windows", **all_keys)
        folders["shifted"] = changed_copy(folders["stock"], root / "shifted", sliding_window=WINDOW + 1)
    if windows and "D" in layers and sizes.keys() & {"qkv_bias", "qk_norm"} and "experts" not in sizes:
        own = dict(architectures=["Qwen2ForCausalLM" if "qkv_bias" in sizes else "Qwen3ForCausalLM"])
        folders["own class"] = changed_copy(folders["stock"], root / "own-class", **own)
    return Made(layers, folders, text[:LENGTH], expected[:LENGTH])
