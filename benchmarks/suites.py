"""Named sets of cases, and what their results must reach.

A group's cases and entries are timed interleaved, so that times of one group may be compared whatever the card's
temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from benchmarks.cases import Case, as_table, lognormal_documents
from s2_megatron.patterns.ranges import make_range_pattern

K = 1024
DENSE = ("FA-2 dense", "cuDNN dense", "FA-4 dense")
EQUAL = ("FlexAttention equal pairs", "FA-4 equal pairs")
SPARSE = ("S2 paper's", "FlexAttention", "FA-4 block-sparse", *EQUAL)
OURS = ("S2", "S2 triton", "S2 gluon", "S2 deterministic")
FORMAT = "sbhd"  # Megatron's


@dataclass(frozen=True)
class Group:
    name: str
    cases: tuple[tuple[Case, tuple[str, ...]], ...]  # with the entries that take part, where they are available
    rounds: int = 3  # at least


def s2_pattern(heads=32, kv_heads=32, ranges=((16, 1), (None, 16)), **options):
    """The paper's pattern at blocks of 64: window 1024, stride 16, one residue per KV head."""
    return make_range_pattern(block_size=64, num_heads=heads, num_kv_heads=kv_heads, ranges=ranges, **options)


def named(length: int) -> str:
    return f"{length // K}K" if length % K == 0 else str(length)


def _main(length: int) -> Case:
    return Case(f"{named(length)} 32/32 D128", s2_pattern(), length)


def hopper(quick: bool = False) -> list[Group]:
    """The table that the kernels are judged by, on one GPU of 80 GB or more (the 1M-token case needs 120 GB)."""
    main = _main(128 * K)
    peers = ("FA-2 dense", "cuDNN dense") if quick else DENSE + SPARSE
    # The paper's kernels tune themselves for a minute per shape: at one length only.
    at_length = {
        length: tuple(name for name in peers if length == 128 * K or name != "S2 paper's")
        for length in (8 * K, 32 * K, 128 * K)
    }
    groups = [Group(named(length), ((_main(length), OURS + names),)) for length, names in at_length.items()]
    phi3 = s2_pattern(32, 8, ((16, 1), (None, 8)), slide="query", head_step="paper", base_offset=1)
    others = {
        "32/8 D128": s2_pattern(32, 8),
        "Phi-3 stride 8, 32/8": phi3,
        "2 dense + 30 sparse heads": s2_pattern(dense_heads={"spread": 2}),
        "sliding window": s2_pattern(ranges=((16, 1),)),
        "strides 4 and 16": s2_pattern(ranges=((16, 1), (128, 4), (None, 16))),
        "block mask of the pattern": as_table(s2_pattern(), 128 * K),
    }
    cases = [(main, ("S2",))]
    for name, pattern in others.items():
        entries = ("S2", "FA-4 window") if name == "sliding window" and not quick else ("S2",)
        cases.append((Case(f"128K {name}", pattern, 128 * K), entries))
    groups.append(Group("patterns", tuple(cases)))
    few = [
        Case(f"{named(length)} {heads}/1 D128", s2_pattern(heads, 1), length)
        for length, heads in ((32 * K, 4), (32 * K, 8), (128 * K, 8))
    ]
    groups.append(
        Group("few KV heads", tuple((case, ("S2", "FA-2 dense")) for case in (_main(32 * K), *few)))
    )  # as with tensor parallelism
    narrow = Case("128K 16/16 D64", s2_pattern(16, 16), 128 * K, head_dim=64)
    narrow_peers = ("FA-2 dense", *(() if quick else SPARSE))
    groups.append(
        Group("D64", ((narrow, ("S2", "S2 deterministic", *narrow_peers)),))
    )  # here the deterministic mode has another backward
    for length in (8 * K, 32 * K):
        entries = ("S2", "FA-2 dense", *(() if quick else ("cuDNN dense",)))
        dims = tuple(
            (Case(f"{named(length)} 32/32 D{dim}", s2_pattern(), length, head_dim=dim), entries)
            for dim in (96, 192, 256)
        )
        groups.append(Group(f"head dims {named(length)}", dims))
    equal = Case("64 documents of 2K", s2_pattern(), 2 * K, tensor_format="thd", documents=(2 * K,) * 64)
    varied = Case(
        "64 log-normal documents", s2_pattern(), 2 * K, tensor_format="thd", documents=lognormal_documents(64, 2 * K)
    )
    batch = Case("batch 64 of 2K", s2_pattern(), 2 * K, batch=64, tensor_format="bshd")
    dense = ("FA-2 dense",) if quick else ("FA-2 dense", "FA-4 dense")
    groups.append(Group("packed", ((batch, ("S2",)), (equal, ("S2", *dense)), (varied, ("S2", *dense))), rounds=10))
    if not quick:
        million = Case("1M 32/32 D128", s2_pattern(), 1024 * K)
        groups.append(Group("1M tokens", ((million, ("S2",)),), rounds=1))
    return groups


def crossover(quick: bool = False) -> list[Group]:
    """From which length on the pattern is faster than dense attention."""
    lengths = [1024 * 2**power for power in range(6 if quick else 8)]
    entries = ("S2", *(("FA-2 dense",) if quick else (*DENSE, "FA-4 block-sparse", "FA-4 equal pairs")))
    return [Group(f"crossover {named(length)}", ((_main(length), entries),)) for length in lengths]


def windows(quick: bool = False) -> list[Group]:
    """Windows of blocks beside windows and sinks in tokens: of as many tokens, and of as many pairs."""
    entries = ("S2", "S2 deterministic") if quick else ("S2", "S2 deterministic", "FA-4 window")
    shapes = {
        "32K 32/8 D128": (32 * K, 32, 128),
        "128K 32/8 D128": (128 * K, 32, 128),
        "32K 64/8 D64": (32 * K, 64, 64),
    }
    groups = []
    for name, (length, heads, head_dim) in shapes.items():
        for window in (128, 1024, 4096) if length == 32 * K and heads == 32 else (1024,) if heads == 32 else (128,):
            patterns = {
                f"blocks {window}": s2_pattern(heads, 8, ((window // 64, 1),)),
                f"tokens {window}": s2_pattern(heads, 8, (), window=window),
                f"tokens {window - 32}": s2_pattern(heads, 8, (), window=window - 32),
                f"tokens {window}, sink 4": s2_pattern(heads, 8, (), window=window, sink_tokens=4),
                f"tokens {window}, sink 64": s2_pattern(heads, 8, (), window=window, sink_tokens=64),
            }
            cases = [Case(f"{name} {kind}", pattern, length, head_dim=head_dim) for kind, pattern in patterns.items()]
            groups.append(Group(f"{name} W {window}", tuple((case, entries) for case in cases)))
    stripes = {"blocks": {}, "tokens": dict(window=K), "tokens, sink 4": dict(window=K, sink_tokens=4)}
    cases = [
        Case(
            f"128K stripes {kind}",
            s2_pattern(32, 8, ((None, 16),) if options else ((16, 1), (None, 16)), **options),
            128 * K,
        )
        for kind, options in stripes.items()
    ]
    groups.append(Group("128K stripes", tuple((case, ("S2", "S2 deterministic")) for case in cases)))
    # What choose-dense leaves of a dense model: layers whose other heads have a window and a sink.
    for length in (8 * K, 32 * K, 128 * K):
        cases = [
            Case(
                f"{named(length)} {dense} of 8 KV heads dense",
                s2_pattern(32, 8, (), window=K, sink_tokens=64, dense_heads=dense),
                length,
            )
            for dense in (0, 1, 2)
        ]
        groups.append(Group(f"{named(length)} dense heads", tuple((case, ("S2", "FA-2 dense")) for case in cases)))
    return groups


SUITES: dict[str, Callable[[bool], list[Group]]] = {"hopper": hopper, "crossover": crossover, "windows": windows}


class Verdict(NamedTuple):
    text: str
    value: float
    must: float | None  # reached when value >= must
    goal: float | None

    @property
    def met(self) -> bool:
        return self.must is None or self.value >= self.must


def verdicts(rows: list[dict], first_call: dict | None = None) -> list[Verdict]:
    """What the rows say about the aims; those whose rows are missing are left out. Compares within a group: its rows
    were timed interleaved."""
    by_key = {(row["group"], row["case"], row["entry"]): row for row in rows}
    found = []

    def add(text, compute, must, goal=None):
        with suppress(KeyError):
            found.append(Verdict(text, compute(), must, goal))

    def interleaved(case, entry, other_case, other_entry):
        """The rows of both, of the first group that has both. Raises KeyError where none has."""
        for (group, *key), own in by_key.items():
            if key == [case, entry] and (group, other_case, other_entry) in by_key:
                return own, by_key[group, other_case, other_entry]
        raise KeyError(case)

    def faster(case, than, entry="S2"):
        own, other = interleaved(case, entry, case, than)
        return median(other["total_ms_samples"]) / median(own["total_ms_samples"])

    def faster_than_dense(case):
        """With the pattern of the aims; a run of another one (by flags) has cases of the same names."""
        own, _ = interleaved(case, "S2", case, "FA-2 dense")
        aimed = s2_pattern()
        if (own["pattern"], own["block"]) != (aimed.describe(), aimed.block_size):
            raise KeyError(case)
        return faster(case, "FA-2 dense")

    def pace(case, against="128K 32/32 D128"):
        own, other = interleaved(case, "S2", against, "S2")
        return own["tflops"] / other["tflops"]

    main = {"8K": (5.3, 6.0), "32K": (12.5, 14.0), "128K": (20.0, 24.9)}
    for length, (must, goal) in main.items():
        case = f"{length} 32/32 D128"
        add(f"{case}: times FlashAttention-2", lambda case=case: faster_than_dense(case), must, goal)
    case = "128K 32/32 D128"
    add(f"{case}, deterministic: times FlashAttention-2", lambda: faster(case, "FA-2 dense", "S2 deterministic"), 16.0)
    add(f"{case}: speed of deterministic over default", lambda: faster(case, "S2", "S2 deterministic"), None, 0.8)
    narrow = "128K 16/16 D64"
    add(f"{narrow}: speed of deterministic over default", lambda: faster(narrow, "S2", "S2 deterministic"), None, 0.8)
    add("128K 32/8 D128: speed over 32/32", lambda: pace("128K 32/8 D128"), 1.0, 1.1)
    for entry, must, goal in ((EQUAL[0], 1.0, None), ("S2 paper's", 1.0, None), (EQUAL[1], None, 1.0)):
        add(f"{narrow}: times {entry}", lambda entry=entry: faster(narrow, entry), must, goal)
    for name in ("Phi-3 stride 8, 32/8", "2 dense + 30 sparse heads"):
        add(f"128K {name}: TF/s over 32/32", lambda name=name: pace(f"128K {name}"), 0.9)
    for name in ("sliding window", "strides 4 and 16", "block mask of the pattern"):
        add(f"128K {name}: TF/s over 32/32", lambda name=name: pace(f"128K {name}"), 0.85)
    add(
        "64 packed documents of 2K: speed over batch 64",
        lambda: pace("64 documents of 2K", against="batch 64 of 2K"),
        0.97,
    )
    add(
        "log-normal documents: TF/s over equal ones",
        lambda: pace("64 log-normal documents", against="64 documents of 2K"),
        0.85,
    )
    ours = [entry for entry in rows if entry["entry"].startswith("S2") and entry["entry"] in OURS]
    if ours:
        worst = max(ours, key=lambda entry: entry["extra_bytes"] / entry["memory_limit"])
        found.append(
            Verdict(
                f"memory limit over use, worst ({worst['case']}, {worst['entry']})",
                worst["memory_limit"] / max(1, worst["extra_bytes"]),
                1.0,
                None,
            )
        )
    for kind, limit in (("cold", 60.0), ("warm", 5.0)):
        if first_call:
            found.append(
                Verdict(
                    f"first call, {kind} compile cache: {limit:.0f} s over time",
                    limit / first_call[f"{kind}_s"],
                    1.0,
                    None,
                )
            )
    return found
