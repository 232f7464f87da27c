"""s2-megatron choose-dense: which KV heads of a dense checkpoint stay dense when it goes on with S2-Attention.

    s2-megatron choose-dense --load runs/dense/checkpoints --s2-config my.yaml --data-path data/text --write chosen.yaml

What a dense model loses under S2-Attention depends on which of its heads stay dense. Which heads matter differs from
model to model: we think that a few of them look things up far back (docs/choose-dense.md). This measures the loss of
the checkpoint as it is, under the plan of the YAML, and under the plan with one more KV head dense, each head in its
turn; then under the plan with the best 1, 2, 4, ... of them dense. The plan without its sink (or with one) tells what
of the loss is the sink's. The smallest set that is near enough to the dense loss is written as a YAML that trains. One
process, one GPU or CPU; nothing is trained. How near the loss before any step is to the one after training on:
docs/choose-dense.md.

Under a plan that loses next to nothing (wide windows on short sequences) the heads cannot be ranked. --beside names
another plan to measure under; the chosen heads are then dense in the plan of --s2-config.

All losses are kept in --json, also of a run that is interrupted: --from-json takes them from there, for another
--within, --heads, --by or plan, and measures what is missing. That file is only read, unless --json names it, too.

Status 0: written; 1: no set is near enough, or no head has to be dense: no YAML is written; 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from argparse import Namespace
from contextlib import redirect_stdout
from os.path import realpath  # which takes links that loop
from pathlib import Path
from typing import TextIO

from s2_megatron.config.errors import printable
from s2_megatron.config.load import SparsityConfig, load_config
from s2_megatron.config.sinks import without_sink
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.host.paths import check_writable
from s2_megatron.tools.choose_dense.kept import Kept, weights_sha256
from s2_megatron.tools.choose_dense.plan import (
    HEAD,
    LAYER,
    all_dense,
    candidates,
    count_dense,
    dense_in_one,
    sink_tokens,
    sparse_in,
    with_dense,
    with_sink,
    yaml_content,
    yaml_text,
)
from s2_megatron.tools.choose_dense.report import Sink, facts, ranking, sets_table, sink_sentence
from s2_megatron.tools.choose_dense.search import Sets, rank
from s2_megatron.tools.outputs import console, write_file
from s2_megatron.tools.progress import duration, progress, working

IMPORTED = 8192  # tokens of a sequence: what an imported model has positions for takes hours, at 131,072 of them
# A share of the dense loss. Under a plan that lost 0.0015 % two of the four best heads were others than under one that
# lost 3.4 % (`python studies/check.py extend-recall32k`).
LEAST_GAP = 0.001
LARGEST_SHARE = 0.5  # of the plan's gap, that one sequence may have
FROM_JSON = "losses of an earlier run; only read, unless --json names the file, too: then new losses are added to it"
SINK = 64  # tokens of the sink that is tried where the plan has none and hides the first token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", type=Path, required=True, help="Megatron's folder of dense checkpoints (torch_dist)")
    parser.add_argument(
        "--s2-config", type=Path, required=True, help="the YAML of the plan that the model goes on with"
    )
    parser.add_argument(
        "--beside", type=Path, metavar="YAML", help="the plan to measure under (default: that of --s2-config)"
    )
    parser.add_argument("--data-path", required=True, metavar="PREFIX", help="an indexed dataset: PREFIX.idx, .bin")
    parser.add_argument("--split", help="as Megatron's (default: the training's); its second part is measured on")
    parser.add_argument("--sequences", type=int, default=8, help="to measure on (default: 8)")
    parser.add_argument(
        "--seq-length",
        type=int,
        help=f"tokens of each (default: the training's; of an imported model at most {IMPORTED}, longer where given)",
    )
    parser.add_argument(
        "--eod-mask-loss", action="store_true", help="as in training: the token behind a document does not count"
    )
    parser.add_argument(
        "--dataloader-inter-document-masking",
        action="store_true",
        help="as in training: documents do not attend others",
    )
    parser.add_argument(
        "--loss-from-position",
        type=int,
        default=0,
        metavar="N",
        help="only predictions from position N on count, of data whose sequences end with what is asked for (default: "
        "0, all)",
    )
    parser.add_argument("--by", choices=(HEAD, LAYER), default=HEAD, help="what becomes dense (default: head)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--within",
        type=float,
        default=0.1,
        metavar="PERCENT",
        help="largest loss above dense, under --beside where given (default: 0.1)",
    )
    size.add_argument("--heads", type=int, metavar="N", help="exactly so many more dense KV heads, over all layers")
    size.add_argument("--layers", type=int, metavar="N", help=f"with --by {LAYER}: exactly so many more dense layers")
    parser.add_argument("--write", type=Path, required=True, metavar="YAML", help="a new file")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="all that was measured (default: the name of --write, with .json)"
    )
    parser.add_argument("--from-json", type=Path, metavar="FILE", help=FROM_JSON)


def run(args: Namespace) -> int:
    """Returns the status. Raises ValueError for bad input, before the model is built."""
    _check_options(args)
    # The plan to train, and the one to measure under. _resolved refuses Python patterns before any is called.
    given = [("--s2-config", args.s2_config)] + ([("--beside", args.beside)] if args.beside else [])
    plans = [(f"{option} {file}", load_config(file, allow_python_patterns=True)) for option, file in given]
    output = sys.stdout
    with redirect_stdout(sys.stderr):  # what Megatron and the kernels say
        return _choose(args, plans, output)


def _check_options(args: Namespace) -> None:
    counts = {"--sequences": args.sequences, "--seq-length": args.seq_length}
    for name, value in (counts | {"--heads": args.heads, "--layers": args.layers}).items():
        if value is not None and value < 1:
            raise ValueError(f"{name} {value}: expected a number of 1 or more")
    if not 0 <= args.within < math.inf:
        raise ValueError(f"--within {args.within:g}: expected percent of the dense loss, 0 or more; use --within 0.1")
    if args.heads is not None and args.by == LAYER:
        raise ValueError(
            f"--heads {args.heads} with --by {LAYER}: expected heads that are chosen one by one; leave --by out, or "
            "give --layers or --within"
        )
    if args.layers is not None and args.by != LAYER:
        raise ValueError(f"--layers {args.layers}: expected --by {LAYER} beside it; add it, or give --heads")
    if args.loss_from_position < 0:
        raise ValueError(f"--loss-from-position {args.loss_from_position}: expected 0 or more, a place in the sequence")
    named = args.json is not None
    args.json = args.json or args.write.with_suffix(".json")
    for name, file in (("--write", args.write), ("--json", args.json)):
        is_input = name == "--json" and args.from_json is not None and realpath(file) == realpath(args.from_json)
        if is_input and not named:
            raise ValueError(
                f"{name} {file}, by the name of --write: is the file of --from-json, which is only read; expected a "
                f"new file; give --json another name, or --json {file} to add the new losses to it"
            )
        if file.exists() and not is_input:
            add = f", or add to its losses with --from-json {file} --json {file}" if name == "--json" else ""
            raise ValueError(
                f"{name} {file}: is there already; expected a new file; give another name, or remove it{add}"
            )
        check_writable(f"{name} {file}", file, is_file=True)
    if realpath(args.json) == realpath(args.write):
        raise ValueError(
            f"--json {args.json}: is the file of another option; expected one of its own; give another name"
        )


def _resolved(args: Namespace, source: str, config: SparsityConfig, trained: Namespace) -> ResolvedSparsity:
    """The plan for the checkpoint's model. source: its option and file. Raises ValueError for one from which nothing
    can be chosen."""
    from s2_megatron.tools.hf.architecture import shape_of_arguments, sparsity_of_arguments

    shape = shape_of_arguments(trained, f"--load {args.load}", None)
    if getattr(trained, "s2_sparsity", None) is not None:
        before = sparsity_of_arguments(trained, shape, None)
        if any(layer.pattern is not None for layer in before.layers):
            raise ValueError(
                f"--load {args.load}: trained with S2-Attention already; expected a dense checkpoint, beside which "
                "heads can be measured; give the one that it began with"
            )
    length = args.seq_length or _usual_length(trained)
    if length > trained.seq_length:
        raise ValueError(
            f"--seq-length {length}: the checkpoint was trained with {trained.seq_length}; expected at most that, for "
            f"beyond it the loss says nothing about heads; use --seq-length {trained.seq_length}"
        )
    for name in dict.fromkeys(config.settings.layers):
        spec = config.settings.specs.get(name)
        if spec is not None and spec.block_ranges(config.settings.block_size) is None:
            raise ValueError(
                f"{source}: specs.{name} is a {'mask' if spec.mask else 'function'}; expected "
                "windows and strides, beside which a YAML can name dense heads; give another YAML"
            )
    if config.settings.mtp_layers is not None:
        raise ValueError(
            f"{source}: mtp_layers: expected a plan without them, for heads are chosen in the "
            "decoder; leave the key out here, and add it to the YAML that is written"
        )
    usual = shape.head_dim**-0.5
    scale, own = (value or usual for value in (config.settings.softmax_scale, getattr(trained, "softmax_scale", None)))
    if not math.isclose(scale, own):
        raise ValueError(
            f"{source}: softmax_scale {scale:g}; expected that of the checkpoint, {own:g}; correct the YAML"
        )
    return config.resolve(
        num_layers=shape.num_layers, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, seq_length=length
    )


def _usual_length(trained: Namespace) -> int:
    """Tokens of a sequence where no --seq-length is given."""
    imported = getattr(trained, "train_iters", 1) is None and getattr(trained, "train_samples", 1) is None
    return min(trained.seq_length, IMPORTED) if imported else trained.seq_length


def _choose(args: Namespace, plans: list[tuple[str, SparsityConfig]], output: TextIO) -> int:
    """The status. plans: the one to train first, the one to measure under last, each behind its option and file.
    output: gets the tables."""
    from s2_megatron.tools.choose_dense import measure
    from s2_megatron.tools.hf.checkpoint_model import checkpoint_arguments, quiet
    from s2_megatron.tools.hf.torch_dist import iteration_folder

    folder = iteration_folder(args.load)
    trained = checkpoint_arguments(folder)
    resolved = [_resolved(args, source, config, trained) for source, config in plans]
    sparsity, beside, source = resolved[0], resolved[-1], plans[-1][0]
    units = sparse_in(sparsity, candidates(beside, args.by))
    if not units:
        too = f" that is sparse in {plans[0][0]}, too" if args.beside else ""
        if count_dense(sparsity) == len(sparsity.layers) * sparsity.num_kv_heads:
            source, too = plans[0][0], ""
        raise ValueError(
            f"{source}: nothing is sparse at {beside.seq_length} tokens{too}; expected a plan with sparse heads, of "
            "which some can become dense; give another YAML, or a longer --seq-length"
        )
    unmeasured = dense_in_one(beside, sparsity)
    if unmeasured:
        layer, head = unmeasured[0]
        raise ValueError(
            f"{source}: KV head {head} of layer {layer} (from 0) attends everything at {beside.seq_length} tokens, and "
            f"is sparse in {plans[0][0]}; expected a sparse one, because dense heads are not "
            "measured; make it sparse, or dense in both"
        )
    asked, name, what = _exactly(args)
    if asked is not None and asked >= len(units):
        raise ValueError(
            f"{name} {asked}: {len(units)} {what} are sparse in {' and in '.join(name for name, _ in plans)}; "
            f"expected fewer, so that one stays sparse; "
            + (f"use at most {name} {len(units) - 1}" if len(units) > 1 else "give a YAML with more")
        )
    if args.loss_from_position >= sparsity.seq_length:
        raise ValueError(
            f"--loss-from-position {args.loss_from_position}: the sequences have {sparsity.seq_length} tokens; "
            f"expected less, so that something counts; use at most {sparsity.seq_length - 1}"
        )
    apart = args.dataloader_inter_document_masking or getattr(trained, "dataloader_inter_document_masking", False)
    masked = args.eod_mask_loss or getattr(trained, "eod_mask_loss", False)
    with quiet():
        sequences = measure.validation_sequences(
            args.data_path, args.split, trained, sparsity.seq_length, args.sequences, eod_mask_loss=masked, apart=apart
        ).counted_from(args.loss_from_position)
    model = []  # built with the first loss that is not known

    def measured_shares(plan: ResolvedSparsity) -> list[float]:
        if not model:
            with working("loading the checkpoint"):
                model.append(measure.Measured(folder, sequences))
        return model[0].shares(plan)

    with working("reading the checkpoint"):
        of = {"checkpoint": weights_sha256(folder), "choice of sequences": sequences.sha256()}
        kept = Kept(measured_shares, of | {"precision": measure.precision()})
    if args.from_json is not None:
        kept.take(args.from_json)
    name = (args.beside or args.s2_config).name
    about = (
        f"{args.sequences} {'sequence' if args.sequences == 1 else 'sequences'} of {sparsity.seq_length} tokens of "
        f"{printable(Path(args.data_path).name)}, {measure.precision()}"
    ) + (", documents apart" if apart else "")
    if args.loss_from_position:
        about += f", loss from position {args.loss_from_position}"
    try:
        return _measure(args, folder, trained, plans, resolved, units, kept, about, name, output)
    except BaseException:
        if kept.measured:
            write_file(args.json, (json.dumps(kept.facts(), indent=1) + "\n").encode())
            go_on = f"--from-json {args.json} --json {args.json}"
            print(f"{kept.measured} losses are kept; go on with {go_on}", file=sys.stderr)
        raise


def _exactly(args: Namespace) -> tuple[int | None, str, str]:
    """(how many units are asked for, None for as many as it takes; the option; what they are)."""
    return (args.layers, "--layers", "layers") if args.by == LAYER else (args.heads, "--heads", "KV heads")


def _measure(args, folder: Path, trained, plans, resolved, units, kept: Kept, about: str, name: str, output) -> int:
    """The measurements, the choice and what is written of them; the status."""
    sparsity, beside, source = resolved[0], resolved[-1], plans[-1][0]

    def loss_of(dense) -> float:
        return kept.loss(with_dense(beside, dense))

    hidden, own_sink = without_sink(beside), sink_tokens(beside)
    other = with_sink(beside, 0 if own_sink else SINK) if own_sink or hidden is not None else None
    # One for each candidate, the two or three first ones, and about as many sets as there are powers of two.
    count = len(units) + 2 + (other is not None) + len(units).bit_length()
    positions = f" (the model has positions for {trained.seq_length})" if beside.seq_length < trained.seq_length else ""
    print(f"choose-dense: {about}{positions}: {len(units)} candidates, about {count} measurements", file=sys.stderr)
    with working("measuring the dense model, and the plan"):
        dense_loss = kept.loss(all_dense(beside))
        began = time.monotonic()
        plan_loss = loss_of([])
        taken = time.monotonic() - began
    if kept.measured:
        print(f"a measurement takes {taken:.1f} s, all of them about {duration(taken * count)}", file=sys.stderr)
    gap = plan_loss / dense_loss - 1
    asked, _, _ = _exactly(args)
    enough = asked is None and gap <= args.within / 100  # without a dense head
    sink = None
    if own_sink or (other is not None and not enough):
        with working("measuring the plan " + ("without its sink" if own_sink else f"with a sink of {SINK} tokens")):
            sink = Sink(other, own_sink or SINK, kept.loss(other), plan_loss, bool(own_sink))
    if not enough and hidden is not None:
        print(f"warning: {source}: {hidden}", file=sys.stderr)
    ranked = []
    if not enough:
        with progress("choose-dense", len(units)) as tell:
            ranked = rank(units, loss_of, lambda done: tell(done, f"{done} of {len(units)} candidates"))
    sets = Sets([each.unit for each in ranked], loss_of, dense_loss)
    with working("measuring the best heads together"):
        chosen = sets.exactly(asked) if asked else sets.smallest(args.within / 100) if ranked else sets.of(0)
    with redirect_stdout(output):
        if ranked:
            console().print(ranking(ranked, plan_loss, dense_loss))
        console().print(sets_table(beside, sets, chosen, sink, about, name))
        if sink is not None:
            print(sink_sentence(sink, dense_loss, chosen, name))
    shares = zip(kept.shares(beside), kept.shares(all_dense(beside)), strict=True)
    gaps = [(own - its) / dense_loss for own, its in shares]
    lost, most = math.fsum(gap for gap in gaps if gap > 0), max(gaps)
    if ranked and most > LARGEST_SHARE * lost > 0:
        print(
            f"warning: {most / lost:.0%} of what {source} loses is in sequence {1 + gaps.index(most)} of {len(gaps)}, "
            "so the heads are chosen for that text; give more --sequences, of other documents",
            file=sys.stderr,
        )
    if not enough and gap < LEAST_GAP:
        longer = ", or a longer --seq-length" if beside.seq_length < trained.seq_length else ""
        print(
            f"warning: {source} loses only {gap:+.4%} of the dense loss at {beside.seq_length} tokens, so chance has a "
            f"say in the order of the heads; give --beside a YAML with narrower windows{longer}",
            file=sys.stderr,
        )
    result = None
    if chosen is not None:
        plan = with_dense(sparsity, sets.units[: chosen.size])
        before, after = kept.loss(sparsity), kept.loss(plan)
        gap = after / dense_loss - 1
        result = {"dense_kv_heads": count_dense(plan), "density": plan.density()}
        result |= {"loss_before": before, "loss": after, "gap": gap}
    # Before the YAML: who finds that has the measurements, too.
    content = facts(args, folder.absolute(), beside, sets, ranked, chosen, sink)
    content |= {"gap_by_sequence": gaps, "result": result} | kept.facts()
    write_file(args.json, (json.dumps(content, indent=1) + "\n").encode())
    if enough:
        print(
            f"nothing to choose: {source} loses {gap:+.4%} of the dense loss at {beside.seq_length} tokens, within "
            f"{args.within:g} %; no YAML is written; train with {args.s2_config} as it is, or ask for --heads N",
            file=sys.stderr,
        )
        return 1
    if chosen is None:
        best = min(sets.measured.values(), key=lambda each: each.gap)
        instead = f", or --heads {best.size}" if args.by == HEAD and 0 < best.size < len(units) else ""
        print(
            f"no set is within {args.within:g} % of the dense loss under {source}; the best one, of {best.size}, is "
            f"{best.gap:+.2%} above; no YAML is written; give a larger --within{instead}",
            file=sys.stderr,
        )
        return 1
    of = f"{count_dense(plan)} of {len(plan.layers) * plan.num_kv_heads} KV heads are dense"
    checkpoint = folder.absolute()
    comment = [
        "Made by s2-megatron choose-dense from " + printable(f"{checkpoint.parent.name}/{checkpoint.name}", 100),
        f"and {printable(args.s2_config.name)}: {of}.",
        *([f"They were measured beside the sparse heads of {printable(args.beside.name)}."] if args.beside else []),
        f"Loss before any step: {dense_loss:.4f} dense, {before:.4f} with {printable(args.s2_config.name)}, "
        f"{after:.4f} with this one ({gap:+.2%}), on",
        f"{about}.",
    ]
    text = yaml_text(yaml_content(plans[0][1].settings, sparsity, sets.units[: chosen.size]), comment)
    write_file(args.write, text.encode())
    with redirect_stdout(output):
        print(f"wrote {args.write}: {of}, {plan.density():.1%} of the pairs, {gap:+.2%} of the dense loss")
    return 0
