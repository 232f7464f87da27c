"""Times S2 attention, forward and backward, beside its peers in one process on one GPU; a wrong result is not timed.

    python benchmarks/attention.py --suite hopper --json benchmarks/results/h200.json   # --quick: few peers
    python benchmarks/attention.py --suite hopper --groups 8K,patterns                  # some groups of the suite
    python benchmarks/attention.py --suite crossover --json benchmarks/results/h200_crossover.json
    python benchmarks/attention.py --seq-lengths 8192,131072 --num-kv-heads 8           # a shape of your own
    python benchmarks/attention.py --config configs/s2_7b_mixed.yaml --layer 1 --seq-lengths 32768
    python benchmarks/attention.py --tensor-format thd --documents 64 --seq-lengths 2048 --length-spread log-normal
    python benchmarks/plots.py benchmarks/results/h200_crossover.json benchmarks/results/h200.json --out docs
    python benchmarks/attention.py --list                                                 # suites, groups and entries

1. Before anything is timed, every case is compared with fp64 on 2065 tokens: the error of out, LSE and gradients may
   be twice that of plain attention in the inputs' dtype. Then each entry, as it will be timed, is compared with the
   fp32 reference: out and dQ of four query blocks of every head, and the sum of dV. If one of our entries fails, the
   run ends with status 1; a peer that fails, or is not installed, prints one line and is left out.
2. All entries of a group are timed interleaved, because a card slows down as it heats up. A sample is several calls in
   a row. Shown are medians, with the 20th and 80th percentile in brackets. --seconds bounds the time of one entry.
3. TF/s count the attended (query, key) pairs: 4 D a pair in the forward, 10 D in the backward. A peer computes the
   window and stride in tokens at its smallest block ("equal pairs": the stride in blocks, see peers.py); the
   percentage before "forward" says how many of the causal pairs those are. Ratios are of wall time.
4. "of matmul": of the rate of an 8192^3 bf16 matmul, timed interleaved with the entries. "+ MiB": peak memory beyond
   inputs, out, LSE and gradients. "first": set-up, compilation and first result in this process.

Sample of the output, shortened (NVIDIA H200):

    -- 128K: matmul 778 TF/s
    128K 32/32 D128  S2    7.7 %  forward    18.34 ms (18.24-18.57)  588 TF/s  backward    60.61 ms ...  19.23 x FA-2
      MISSED 128K 32/32 D128: times FlashAttention-2: 19.23 (must 20, goal 24.9)
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from benchmarks import first_call, peers, refuse, report  # noqa: F401 - peers registers its entries
from benchmarks.cases import Case, Tensors, lognormal_documents, pattern_from_flags
from benchmarks.entries import ENTRIES, LeftOut, is_ours, load_plug, our_options
from benchmarks.gate import WrongResult, check_full, gate
from benchmarks.suites import SUITES, Group, named, verdicts
from benchmarks.timing import first_calls, matmul_ceiling, time_interleaved
from s2_megatron.ops.call import FORMATS
from s2_megatron.tools.commands import CommandParser

SHIPPED = frozenset(ENTRIES)  # a plug's entries take part in every case


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--suite", choices=sorted(SUITES), help="a named set of cases; without it the flags below make one"
    )
    parser.add_argument(
        "--groups", type=lambda text: text.split(","), help="only these groups of the suite, see --list"
    )
    parser.add_argument("--quick", action="store_true", help="fewer peers and cases")
    parser.add_argument("--list", action="store_true", help="print suites, groups and entries, measure nothing")
    parser.add_argument("--entries", type=lambda text: text.split(","), help="only these, e.g. 'S2,FA-2 dense'")
    parser.add_argument(
        "--plug",
        action="append",
        default=[],
        metavar="FILE.py",
        help="a file that registers more entries, see entries.py",
    )
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="time of one entry on one case (default 1.5; three rounds at least)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write rows, command, versions, hardware, commit (S2_COMMIT without .git)"
    )
    parser.add_argument("--no-first-call", action="store_true", help="leave out the first call in fresh processes")
    parser.add_argument(
        "--seq-lengths", default="8192,32768,131072", help="tokens of a sequence; with thd the mean of a document"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tensor-format", default="sbhd", choices=list(FORMATS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--documents", type=int, default=64, help="with thd: how many documents")
    parser.add_argument(
        "--length-spread", default="equal", choices=("equal", "log-normal"), help="with thd: their lengths (seed 0)"
    )
    parser.add_argument("--config", help="the pattern of a sparsity YAML, with --layer")
    parser.add_argument("--layer", type=int, default=0, help="the layer of --config, from 0")
    parser.add_argument(
        "--num-layers", type=int, help="layers of the model (default: the plan as often as --layer needs)"
    )
    parser.add_argument("--allow-python-patterns", action="store_true", help="let --config name Python functions")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--local-tokens", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=16, help="in blocks; 0: the window alone")
    parser.add_argument(
        "--ranges", help="several strides, e.g. 1024:1,8192:4,:16 (token ends with the stride up to them)"
    )
    parser.add_argument("--slide", default="kv", choices=("kv", "query"))
    parser.add_argument("--head-step", default="auto", type=lambda text: int(text) if text.isdigit() else text)
    parser.add_argument("--base-offset", type=int, default=0)
    parser.add_argument("--dense-heads", type=int, default=0, help="KV heads that attend everything, spread evenly")
    parser.add_argument("--as-table", action="store_true", help="the same blocks as an arbitrary block mask")
    return parser.parse_args(arguments)


def groups_from_flags(args) -> list[Group]:
    """One group a length, with all entries."""
    groups = []
    for text in args.seq_lengths.split(","):
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"--seq-lengths {args.seq_lengths}: {text!r} is not a number of tokens")
        length, documents = int(text), None
        if args.tensor_format == "thd":
            if args.batch != 1:
                raise ValueError(f"--batch {args.batch} with --tensor-format thd, which has --documents instead")
            documents = (
                (length,) * args.documents
                if args.length_spread == "equal"
                else lognormal_documents(args.documents, length)
            )
        pattern = pattern_from_flags(args, max(documents or (length,)))
        name = f"{named(length)} {args.num_heads}/{args.num_kv_heads} D{args.head_dim}"
        case = Case(name, pattern, length, args.batch, args.head_dim, args.dtype, args.tensor_format, documents)
        groups.append(Group(named(length), ((case, tuple(ENTRIES)),)))
    return groups


def chosen_groups(args) -> list[Group]:
    for path in args.plug:
        load_plug(path)
    wrong = [name for name in args.entries or () if name not in ENTRIES]
    if wrong:
        raise ValueError(f"--entries: {wrong[0]!r} is not known; there are {', '.join(ENTRIES)}")
    if args.suite is None:
        return groups_from_flags(args)
    groups = SUITES[args.suite](args.quick)
    if args.groups:
        wrong = [name for name in args.groups if name not in [group.name for group in groups]]
        if wrong:
            raise ValueError(
                f"--groups: {wrong[0]!r} is not in suite {args.suite}; "
                f"it has {', '.join(group.name for group in groups)}"
            )
        groups = [group for group in groups if group.name in args.groups]
    return groups


def build(case: Case, names, tensors: Tensors):
    """(runners, measured) of the entries that can take this case; a peer that cannot is a printed line. Raises
    WrongResult for ours."""
    runners, results = {}, {}
    for name in names:
        runner = None
        try:
            start = time.perf_counter()
            runner = ENTRIES[name](case, tensors)
            results[name] = first_calls(runner, case.bytes_of_lse, time.perf_counter() - start)
            check_full(case, name, runner)
            runners[name] = runner
        except LeftOut as reason:
            print(f"{case.name}: {name} left out: {reason}", flush=True)
        except torch.OutOfMemoryError:
            print(f"{case.name}: {name} left out: it does not fit into this card's memory", flush=True)
        except (
            Exception
        ) as problem:  # a peer may fail in any way and must not end the run; a backend by force may refuse a case
            if name == "S2" or (is_ours(name) and not isinstance(problem, ValueError)):
                raise
            reason = (str(problem).strip().splitlines() or [""])[0]
            print(f"{case.name}: {name} left out: {type(problem).__name__}: {reason[:160]}", flush=True)
        if name not in runners:
            results.pop(name, None)
            del runner
            gc.collect()
            torch.cuda.empty_cache()
    return runners, results


def participants(args, names) -> list[str]:
    return [
        name
        for name in ENTRIES
        if (args.entries is None or name in args.entries) and (name in names or name not in SHIPPED)
    ]


def our_part(names) -> dict[str, dict]:
    return {name: options for name, options in our_options().items() if name in names}


def measure_group(group: Group, args, ceiling) -> list[dict]:
    """The rows of one group. Raises WrongResult."""
    runners, results, keep = {}, {}, []
    for index, (case, names) in enumerate(group.cases):
        names = participants(args, names)
        refused = gate(case, our_part(names))
        for name, reason in refused.items():
            print(f"{case.name}: {name} left out: {reason}", flush=True)
        names = [name for name in names if name not in refused]
        tensors = Tensors(case)
        keep.append(tensors)
        found, measured = build(case, names, tensors)
        runners |= {(index, name): runner for name, runner in found.items()}
        results |= {(index, name): result for name, result in measured.items()}
    times = time_interleaved(runners, results, ceiling[0], args.seconds, group.rounds)
    rate = ceiling[1] / sorted(times)[len(times) // 2] / 1e9 if times else None
    rows = []
    for (index, name), runner in runners.items():
        rows.append(report.make_row(group.name, group.cases[index][0], name, runner, results[index, name], rate))
    report.add_ratios(rows)
    print(f"-- {group.name}: matmul {rate or 0:.0f} TF/s")
    for case, _ in group.cases:
        pattern = f"{case.pattern.describe()}, blocks of {case.pattern.block_size}"
        print(f"   {case.name}: {pattern}, {case.tensor_format}, {case.dtype}, {case.tokens} tokens", flush=True)
    for row in rows:
        print(report.text_of(row), flush=True)
    for row in rows:
        if row["entry"] == "S2" and row["speed_over"]:
            print(report.ratios_text(row), flush=True)
    return [{**row, "matmul_tflops": rate} for row in rows]


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    try:
        groups = chosen_groups(args)
    except ValueError as problem:
        refuse(str(problem))
    if args.list:
        print("entries: " + ", ".join(ENTRIES))
        for suite, cases in SUITES.items():
            print(f"suite {suite}: " + ", ".join(group.name for group in cases(args.quick)))
        return
    if not torch.cuda.is_available():
        refuse("no GPU; this measures speed on an NVIDIA GPU")
    origin = report.provenance("benchmarks/attention.py", sys.argv[1:] if arguments is None else arguments)
    content = dict(**origin, settings=report.settings_of(args))
    print(
        f"{content['hardware']['gpu']}, "
        + ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    )
    rows: list[dict] = []

    def write(first_call_seconds=None):
        if args.json:
            found = [verdict._asdict() | {"met": verdict.met} for verdict in verdicts(rows, first_call_seconds)]
            report.write_json(args.json, {**content, "first_call": first_call_seconds, "rows": rows, "verdicts": found})

    try:
        for group in groups:  # all of them before the first clock
            for case, names in group.cases:
                gate(case, our_part(participants(args, names)))
        ceiling = matmul_ceiling()
        for group in groups:
            rows += measure_group(group, args, ceiling)
            gc.collect()
            torch.cuda.empty_cache()
            write()
    except WrongResult as problem:
        raise SystemExit(f"WRONG RESULT, not timed: {problem}") from problem
    calls = None
    if not args.no_first_call and "S2" in participants(args, ("S2",)) and args.suite != "crossover":
        calls = first_call.measure()
        print(
            f"first call in a fresh process: {calls['cold_s']:.1f} s cold, {calls['warm_s']:.1f} s with a warm compile "
            "cache, a new length"
        )
        write(calls)
    for verdict in verdicts(rows, calls):
        print(report.verdict_text(verdict))


if __name__ == "__main__":
    main()
