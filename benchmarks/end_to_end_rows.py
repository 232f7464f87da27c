"""The rows of benchmarks/end_to_end.py: a name such as `1p3b-128k-cp4-full-keep-s2` and the command line that it stands
for.

The shapes are those of examples/pretrain_1p3b.sh and examples/pretrain_7b.sh; rows differ in parallel and memory flags
and in the attention.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from s2_megatron.megatron.refusals.attention import FUSED_ROPE_ELEMENTS


@dataclass(frozen=True)
class Shape:
    """A model. configs: {attention of a row: sparsity YAML in configs/}."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    rotary_base: int
    vocabulary: int
    configs: dict[str, str]
    kv_heads: int | None = None


def _configs(size: str) -> dict[str, str]:
    return {"s2": f"s2_{size}_s2.yaml", "mixed": f"s2_{size}_mixed.yaml", "densekernels": f"s2_{size}_dense.yaml"}


SHAPES = {
    "1p3b": Shape(24, 2048, 5632, 16, 10000, 32000, _configs("1p3b")),
    "7b": Shape(32, 4096, 11008, 32, 500000, 32000, _configs("7b")),
    # For a machine without a GPU.
    "tiny": Shape(
        4, 128, 384, 4, 10000, 500, {"mixed": "quickstart.yaml", "densekernels": "quickstart_dense.yaml"}, kv_heads=2
    ),
}
RECOMPUTE = {
    "none": (),
    "full": ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
}
# Parts of a name that add a module to those of selective recompute; `selective` alone is the core attention.
RECOMPUTED_MODULES = {"selective": "core_attn", "mlp": "mlp", "layernorm": "layernorm"}
EXCHANGES = {"p2p": "p2p", "a2a": "a2a", "allgather": "all_gather", "sparse": "sparse"}
# Where activations of a dense transformer layer can leave for the host: the inputs of these modules.
OFFLOADED_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")


def _prefixed(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}-{name}" for name in names)


# One GPU, the same memory flags for each of the three, the fewest that fit into 140 GB.
_ONE_GPU = {
    "8k": _prefixed("1p3b-8k-none", "s2", "mixed", "dense"),
    "32k": _prefixed("1p3b-32k-none", "s2", "mixed", "dense"),
    "128k": _prefixed("1p3b-128k-full", "keep-s2", "keep-mixed", "dense"),
}
GROUPS = {
    "1p3b-one-gpu": tuple(name for names in _ONE_GPU.values() for name in names),
    **{f"1p3b-one-gpu-{length}": names for length, names in _ONE_GPU.items()},
    # The same flags with the fused loss, for which there is room, then the best that is known for each side.
    "1p3b-128k-best": _prefixed(
        "1p3b-128k",
        *("full-keep-fusedloss-s2", "full-fusedloss-dense"),
        *("block18-keep-fusedloss-s2", "mlp-offload-dense"),
    ),
    "1p3b-128k-offloaded-optimizer": _prefixed("1p3b-128k-full", "keep-hostoptimizer-s2", "hostoptimizer-dense"),
    "1p3b-128k-cp2": _prefixed("1p3b-128k-cp2-full", "keep-s2", "s2", "p2p-dense", "a2a-dense"),
    "1p3b-128k-cp4": _prefixed("1p3b-128k-cp4-full", "keep-s2", "s2", "p2p-dense", "a2a-dense", "allgather-dense"),
    "1p3b-128k-cp8": _prefixed("1p3b-128k-cp8-full", "keep-s2", "s2", "p2p-dense", "a2a-dense"),
    "1p3b-32k": _prefixed("1p3b-32k", "none-s2", "none-dense", "selective-s2", "selective-dense"),
    "memory": _prefixed(
        "1p3b-32k",
        *("none-s2", "selective-s2", "selective-keep-s2", "full-s2", "full-keep-s2"),
        *("none-offload-s2", "none-offload12-s2"),
    ),
    "7b-1m-4gpus": ("7b-4layers-1m-tp2-cp2-full-keep-s2", "7b-8layers-1m-tp2-cp2-full-keep-s2"),
    "7b-1m-8gpus": ("7b-1m-tp8-full-keep-s2", "7b-1m-tp2-cp4-full-keep-s2"),
    "tiny": ("tiny-512-none-mixed", "tiny-512-full-keep-mixed", "tiny-512-none-dense"),
}

EXPECTED = (
    "SHAPE[-Nlayers]-LENGTH[-tpN][-cpN][-ppN][-none|full|blockN|{selective,mlp,layernorm}][-keep][-received]"
    "[-offload[N]][-hostoptimizer][-fusedloss][-EXCHANGE]-ATTENTION"
)


@dataclass(frozen=True)
class Row:
    """One run. recompute: none, full, selective, or a number of layers (block). modules: of selective recompute.
    offload: None, "modules" or a number of layers. exchange: a value of EXCHANGES, or None for the default."""

    name: str
    shape: Shape
    layers: int
    tokens: int
    attention: str
    tp: int = 1
    cp: int = 1
    pp: int = 1
    recompute: str | int = "none"
    modules: tuple[str, ...] = ()
    keep: bool = False
    received: bool = False
    offload: str | int | None = None
    hostoptimizer: bool = False
    fusedloss: bool = False
    exchange: str | None = None

    @property
    def stock(self) -> bool:
        """Whether the model is Megatron's own."""
        return self.attention == "dense"

    def task(self) -> tuple:
        """What rows have in common that may be compared, each with the memory flags that are best for it."""
        return self.shape, self.layers, self.tokens, self.tp, self.cp, self.pp

    def setting(self) -> tuple:
        """What rows with the same flags have in common, those of S2 left out."""
        memory = self.recompute, self.modules, self.offload, self.hostoptimizer, self.fusedloss
        return *self.task(), *memory

    def settings(self) -> dict:
        """Plain values, for the JSON; the shape is in the name."""
        return {name: value for name, value in vars(self).items() if name not in ("name", "shape")}


@dataclass(frozen=True)
class Machine:
    """processes: ranks of every run. gpu: NCCL and bf16, else gloo and fp32. transformer_engine, fused_gradients:
    whether it can be imported, and Apex's extension of that name, without which Megatron's output layer refuses the
    fusion."""

    processes: int
    gpu: bool
    transformer_engine: bool
    fused_gradients: bool = False


def _setting(part: str) -> tuple[str, object]:
    """(field of Row, value) of one part of a name."""
    if part in RECOMPUTE:
        return "recompute", part
    if part in EXCHANGES:
        return "exchange", EXCHANGES[part]
    if part in ("keep", "received", "hostoptimizer", "fusedloss"):
        return part, True
    if match := re.fullmatch(r"block(\d+)", part):
        return "recompute", int(match[1])
    if match := re.fullmatch(r"(\d+)layers", part):
        return "layers", int(match[1])
    if match := re.fullmatch(r"(tp|cp|pp|offload)(\d+)", part):
        return match[1], int(match[2])
    if match := re.fullmatch(r"(\d+)([km]?)", part):
        return "tokens", int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]]
    if part == "offload":
        return "offload", "modules"
    raise ValueError(f"{part!r} is not known")


def parse_row(name: str) -> Row:
    """Raises ValueError, naming the part that is wrong and what was expected."""
    parts = name.split("-")
    try:
        if parts[0] not in SHAPES:
            raise ValueError(f"no shape in front ({', '.join(SHAPES)})")
        shape, attention = SHAPES[parts[0]], parts[-1]
        if attention != "dense" and attention not in shape.configs:
            raise ValueError(f"{attention!r} at the end; expected an attention: dense, {', '.join(shape.configs)}")
        modules = tuple(RECOMPUTED_MODULES[part] for part in parts if part in RECOMPUTED_MODULES)
        others = [_setting(part) for part in parts[1:-1] if part not in RECOMPUTED_MODULES]
        twice = [name for name, count in Counter(name for name, _ in others).items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]} is given twice")
        settings = dict(layers=shape.layers) | dict(others)
        if modules:
            if "recompute" in settings:
                raise ValueError(
                    "selective, mlp and layernorm are selective recompute; the name asks for another one too"
                )
            settings |= dict(recompute="selective", modules=modules)
        if isinstance(settings.get("recompute"), int) and not 0 < settings["recompute"] <= settings["layers"]:
            raise ValueError(f"block{settings['recompute']} of a model of {settings['layers']} layers")
        if "tokens" not in settings:
            raise ValueError("no sequence length, such as 8192, 128k or 1m")
        if attention == "dense" and {"keep", "received"} & settings.keys():
            raise ValueError("keep and received are flags of S2 attention")
    except ValueError as problem:
        raise ValueError(f"row {name!r}: {problem}; expected {EXPECTED}, or a group: {', '.join(GROUPS)}") from None
    return Row(name, shape, attention=attention, **settings)


def chosen_rows(text: str) -> list[Row]:
    """Rows of a comma-separated list of names and groups, each once, in order. Raises ValueError for a name that is
    neither."""
    names = [row for name in text.split(",") for row in GROUPS.get(name, (name,))]
    return [parse_row(name) for name in dict.fromkeys(names)]


def model_flags(row: Row) -> list[str]:
    """The model, as the launchers in examples/ write it."""
    shape = row.shape
    groups = ["--group-query-attention", "--num-query-groups", shape.kv_heads] if shape.kv_heads else []
    flags = [
        "--num-layers", row.layers, "--hidden-size", shape.hidden, "--num-attention-heads", shape.heads, *groups,
        "--ffn-hidden-size", shape.ffn, "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear",
        "--position-embedding-type", "rope", "--rotary-base", shape.rotary_base,
        "--untie-embeddings-and-output-weights", "--seq-length", row.tokens, "--max-position-embeddings", row.tokens,
        "--attention-dropout", 0, "--hidden-dropout", 0, "--init-method-std", 0.02,
    ]  # fmt: skip
    return list(map(str, flags))


def _qkv_width(shape: Shape) -> int:
    return shape.hidden + 2 * shape.hidden // shape.heads * (shape.kv_heads or shape.heads)


def parallel_flags(row: Row) -> list[str]:
    sizes = [
        "--tensor-model-parallel-size",
        row.tp,
        "--pipeline-model-parallel-size",
        row.pp,
        "--context-parallel-size",
        row.cp,
    ]
    return [*map(str, sizes), *(["--sequence-parallel"] if row.tp > 1 else [])]


def memory_flags(row: Row) -> list[str]:
    if isinstance(row.recompute, int):
        flags = ["--recompute-granularity", "full", "--recompute-method", "block"]
        flags += ["--recompute-num-layers", str(row.recompute)]
    elif row.recompute == "selective":
        flags = ["--recompute-granularity", "selective", "--recompute-modules", *row.modules]
    else:
        flags = list(RECOMPUTE[row.recompute])
    if row.hostoptimizer:
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--overlap-cpu-optimizer-d2h-h2d"]
    if row.fusedloss:
        flags += ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"]
    if row.offload == "modules":
        flags += ["--fine-grained-activation-offloading", "--offload-modules", *OFFLOADED_MODULES]
    elif row.offload is not None:
        flags += ["--cpu-offloading-num-layers", str(row.offload)]
    return flags


def attention_flags(row: Row) -> list[str]:
    """The attention, and what its context-parallel ranks exchange."""
    exchange = row.exchange
    if row.stock:
        return [] if exchange is None else ["--cp-comm-type", exchange]
    flags = ["--s2-config", f"configs/{row.shape.configs[row.attention]}"]
    flags += ["--s2-keep-attention-output"] * row.keep + ["--s2-cp-keep-received"] * row.received
    if row.attention == "densekernels":
        flags += ["--s2-dense-core", "s2"]
    return flags if exchange is None else [*flags, "--s2-cp-comm-type", exchange]


def implementation_flags(row: Row, machine: Machine) -> list[str]:
    """What examples/launch.sh chooses for the machine, with the distributed optimizer everywhere: no run here is
    resumed."""
    flags = [
        "--transformer-impl",
        "transformer_engine" if machine.transformer_engine else "local",
        "--use-distributed-optimizer",
    ]
    if machine.transformer_engine:
        # One rank has nothing to overlap, and waits for the norm of every bucket's gradients all the same.
        if machine.processes > row.tp * row.pp:
            flags += ["--overlap-grad-reduce", "--overlap-param-gather"]
        if row.tokens // row.cp * _qkv_width(row.shape) // row.tp > FUSED_ROPE_ELEMENTS:
            flags += ["--no-rope-fusion"]
    else:
        flags += ["--no-persist-layer-norm", "--no-rope-fusion", "--no-masked-softmax-fusion"]
    if not (machine.transformer_engine and machine.fused_gradients):
        flags += ["--no-gradient-accumulation-fusion"]
    return [*flags, "--bf16"] if machine.gpu else [*flags, "--distributed-backend", "gloo"]


def training_flags(row: Row, machine: Machine, iterations: int, micro_batches: int) -> list[str]:
    flags = [
        "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", row.shape.vocabulary, "--num-workers", 0,
        "--no-create-attention-mask-in-dataloader", "--micro-batch-size", 1,
        "--global-batch-size", sequences(row, machine, micro_batches), "--train-iters", iterations,
        "--lr", 3e-4, "--lr-decay-style", "constant", "--weight-decay", 0.1,
        "--adam-beta1", 0.9, "--adam-beta2", 0.95, "--clip-grad", 1.0, "--seed", 1234,
        "--eval-iters", 0, "--eval-interval", 1000000,
        "--log-interval", 1, "--log-throughput", "--log-memory-interval", 1,
    ]  # fmt: skip
    return list(map(str, flags))


def sequences(row: Row, machine: Machine, micro_batches: int) -> int:
    """Sequences of one step: `micro_batches` on every data-parallel rank."""
    return max(1, machine.processes // (row.tp * row.cp * row.pp)) * micro_batches


def row_flags(row: Row, machine: Machine, iterations: int, micro_batches: int) -> list[str]:
    """All flags of pretrain_gpt_s2.py."""
    return [
        *model_flags(row),
        *parallel_flags(row),
        *memory_flags(row),
        *attention_flags(row),
        *implementation_flags(row, machine),
        *training_flags(row, machine, iterations, micro_batches),
    ]


def row_environment(row: Row) -> dict[str, str]:
    """Variables of a run; they give way to what is set already."""
    defaults = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron overlaps communication by the order in which kernels are queued
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # the last GiB are not lost to fragments
    }
    return defaults | ({"NVTE_CPU_OFFLOAD_V1": "1"} if row.offload == "modules" else {})  # demanded by Megatron
