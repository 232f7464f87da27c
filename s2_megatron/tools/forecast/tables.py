"""The measured tables of one kind of GPU, and what they say of shapes between their rows.

A file `<gpu>.json` beside this module holds them, with the hardware, the versions and the commands of their sources;
`benchmarks/forecast_tables.py` writes it.

Attention. A kernel's time is (query, key) pairs times the time of a pair, and the time of a pair depends on

- the keys that a query attends on average: each tile of queries has costs of its own, which few keys do not pay for.
  Density and length act through this number. Interpolated linearly over its logarithm, at head dim 128.
- the head dim: a factor from the rows of the next larger one that was measured (the kernels pad to 64, 128 or 256).
- the KV heads of a GPU, below 8: a factor from the rows of one KV head, interpolated over the logarithm.

and no call is shorter than its launches (the rows of a few thousand tokens).

Exchange. What context parallelism adds to a layer beyond its share of one GPU's time, per byte that a rank sends:
transfers that nothing hides, copies, and kernels that walk lists.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
FORMAT = 1
BASE_HEAD_DIM = 128
LAUNCH_TOKENS = 8192  # rows of fewer tokens say how long launches take, the others how long a pair does
# Of GPUs without a table, as torch reports it (A100s differ by 0.2): by the short name, and by torch's. Of an "A100" it
# is not known: some have 40 GB, some 80.
MEMORY_GIB = {
    **dict.fromkeys(("h100", "h100 80gb hbm3"), 79.1),
    **dict.fromkeys(("a100 80gb", "a100 80gb pcie", "a100 sxm4 80gb"), 79.1),
    **dict.fromkeys(("a100 40gb", "a100 pcie 40gb", "a100 sxm4 40gb"), 39.4),
}
NAMED = ("H200", "H100", "A100 80GB", "A100 40GB")  # in messages
ALL_KV_HEADS = 8  # from so many KV heads on their number does not matter


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of one call on one GPU."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Tables:
    """content: a table file. Seconds and bytes unless a name says otherwise."""

    content: dict

    @property
    def gpu(self) -> str:
        return self.content["gpu"]

    @property
    def memory_gib(self) -> float:
        return self.content["memory_gib"]

    @property
    def flop_rate(self) -> float:
        """FLOP a second of the linear layers, fitted."""
        return self.content["fit"]["tflops"] * 1e12

    @property
    def byte_rate(self) -> float:
        """Bytes a second of all that is limited by memory, fitted."""
        return self.content["fit"]["gb_per_s"] * 1e9

    @property
    def interconnect_rate(self) -> float:
        """Bytes a second that a GPU sends to the others of its host."""
        return self.content["interconnect_gb_per_s"] * 1e9

    @cached_property
    def _attention(self) -> dict[str, _Kernels]:
        names = dict.fromkeys(row["kernels"] for row in self.content["attention"])
        return {name: _Kernels([row for row in self.content["attention"] if row["kernels"] == name]) for name in names}

    def attention(
        self, kernels: str, pairs: int, *, tokens: int, heads: int, kv_heads: int, head_dim: int, notes: set[str]
    ) -> AttentionTime:
        """One call of `kernels` ("S2", or "dense": Transformer Engine's). pairs: summed over the heads. tokens: queries
        of a head, all sequences of the batch together. kv_heads: times the batch. notes: gets what lies outside of the
        table."""
        return self._attention[kernels].time(
            pairs, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, notes=notes, name=kernels
        )

    def exchange(self, comm_type: str, ranks: int, tokens: int, notes: set[str]) -> tuple[float, float]:
        """Seconds per byte sent that context parallelism adds, in the forward and in the backward. notes: gets what
        lies outside of the table."""
        rows = [row for row in self.content["exchange"] if row["exchange"] == comm_type]
        if not rows:
            rows = [row for row in self.content["exchange"] if row["exchange"] == "te:p2p"]
            notes.add(f"exchange {comm_type[3:]}: not measured; taken as p2p")
        measured = sorted({row["ranks"] for row in rows})
        nearest = min(measured, key=lambda count: abs(math.log(count / ranks)))
        if ranks not in measured:
            known = " and ".join(map(str, measured))
            notes.add(f"exchange {comm_type} over {ranks} ranks: measured on {known}, taken as on {nearest}")
        rows = sorted((row for row in rows if row["ranks"] == nearest), key=lambda row: row["tokens"])
        least, most = rows[0]["tokens"], rows[-1]["tokens"]
        if not least <= tokens <= most:
            notes.add(
                f"exchange {comm_type} over {tokens:,} tokens: measured from {least:,} to {most:,}, the rate of "
                f"{least if tokens < least else most:,} is taken"
            )
        at = math.log(tokens)
        lengths = [math.log(row["tokens"]) for row in rows]
        return tuple(
            float(np.interp(at, lengths, [row[f"{kind}_ns_per_byte"] for row in rows])) * 1e-9
            for kind in ("forward", "backward")
        )


class _Kernels:
    """The rows of one attention implementation."""

    def __init__(self, rows: list[dict]):
        launches = [row for row in rows if row["tokens"] < LAUNCH_TOKENS]
        self.floors = [min((row[f"{kind}_ms"] / 1e3 for row in launches), default=0.0) for kind in KINDS]
        rows = [row for row in rows if row["tokens"] >= LAUNCH_TOKENS]
        base = [row for row in rows if row["head_dim"] == BASE_HEAD_DIM and row["kv_heads"] >= ALL_KV_HEADS]
        keys = sorted({round(row["keys"], 1) for row in base})
        self.keys = np.log(keys)
        self.range = keys[0], keys[-1]
        self.series = [
            np.log([_mean(_pair_time(row, kind) for row in base if round(row["keys"], 1) == key) for key in keys])
            for kind in KINDS
        ]
        self.head_dims = {BASE_HEAD_DIM: [1.0, 1.0]}
        for dim in sorted({row["head_dim"] for row in rows} - {BASE_HEAD_DIM}):
            self.head_dims[dim] = self._factors(row for row in rows if row["head_dim"] == dim)
        few = [row for row in rows if row["head_dim"] == BASE_HEAD_DIM and row["kv_heads"] == 1]
        self.one_kv_head = self._factors(few) if few else None

    def _base(self, kind: int, keys: float) -> float:
        return float(np.exp(np.interp(math.log(keys), self.keys, self.series[kind])))

    def _factors(self, rows: Iterable[dict]) -> list[float]:
        rows = list(rows)
        return [
            _mean(_pair_time(row, kind) / self._base(at, row["keys"]) for row in rows) for at, kind in enumerate(KINDS)
        ]

    def time(self, pairs, *, tokens, heads, kv_heads, head_dim, notes, name) -> AttentionTime:
        keys = pairs / heads / tokens
        least, most = self.range
        if not 0.9 * least <= keys <= 1.1 * most:
            nearest = least if keys < least else most
            notes.add(
                f"{name} attention at {keys:,.0f} keys a query: measured from {least:,.0f} to {most:,.0f}, the rate of "
                f"{nearest:,.0f} is taken"
            )
        dims = sorted(self.head_dims)
        dim = next((known for known in dims if known >= head_dim), dims[-1])
        if dim != head_dim:
            notes.add(f"{name} attention at head dim {head_dim}: measured at {_listed(dims)}, taken as at {dim}")
        scale = max(1.0, head_dim / dim)
        few = max(0.0, 1 - math.log2(max(1, kv_heads)) / math.log2(ALL_KV_HEADS))
        if few and self.one_kv_head is None:
            notes.add(
                f"{name} attention with {kv_heads} KV heads a GPU: measured with {ALL_KV_HEADS} or more, whose time is "
                "taken"
            )
        one_kv_head = self.one_kv_head or [1.0, 1.0]
        return AttentionTime(
            *(
                max(
                    self.floors[kind],
                    pairs * self._base(kind, keys) * self.head_dims[dim][kind] * scale * one_kv_head[kind] ** few,
                )
                for kind in range(2)
            )
        )


KINDS = ("forward", "backward")


def _pair_time(row: dict, kind: str) -> float:
    """Seconds of one (query, key) pair of one head."""
    return row[f"{kind}_ms"] / 1e3 / (row["keys"] * row["heads"] * row["tokens"])


def _mean(values: Iterable[float]) -> float:
    return math.exp(float(np.mean(np.log(list(values)))))


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def known_gpus() -> dict[str, Path]:
    """{name of a GPU: its table file}"""
    return {json.loads(file.read_text(encoding="utf-8"))["gpu"]: file for file in sorted(FOLDER.glob("*.json"))}


def _short(gpu: str) -> str:
    return gpu.lower().replace("-", " ").removeprefix("nvidia").strip()


def memory_gib(gpu: str) -> float | None:
    """The memory of a GPU by its name, measured or not; None: not known."""
    tables = load_tables(gpu)
    return MEMORY_GIB.get(_short(gpu)) if tables is None else tables.memory_gib


def load_tables(gpu: str) -> Tables | None:
    """The tables of a GPU by its name, with or without `NVIDIA`, or None: it was not measured. Raises ValueError for a
    file of another format."""
    for name, file in known_gpus().items():
        if _short(gpu) == _short(name):
            content = json.loads(file.read_text(encoding="utf-8"))
            if content.get("format") != FORMAT:
                raise ValueError(
                    f"{file.name}: format {content.get('format')}; expected {FORMAT}; write it again with "
                    "benchmarks/forecast_tables.py"
                )
            return Tables(content)
    return None
