"""All that `inspect` says, as plain values: what --json prints and the tables show."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace

from s2_megatron.config.sparsity import ResolvedSparsity, dense_pairs, tensor_parallel_balance
from s2_megatron.context_parallel.plan import COMM_TYPES, LayerCosts, layer_costs
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.tools.forecast.flags import OTHER_SHAPES, REFUSED, UNEVEN, UNKNOWN, destination, reasons
from s2_megatron.tools.forecast.flops import token_flops
from s2_megatron.tools.forecast.hybrid import NAMES, NOT_MEASURED, refused_layers
from s2_megatron.tools.forecast.memory import memory
from s2_megatron.tools.forecast.run import TrainingRun, missing_sizes, training_run
from s2_megatron.tools.forecast.step_time import exchange_costs, step_time
from s2_megatron.tools.forecast.tables import NAMED, Tables, known_gpus, load_tables, memory_gib
from s2_megatron.tools.inspect.layer_kinds import layer_kinds
from s2_megatron.tools.rules import warnings

FORMAT = 1
GIB = 2**30
ITEMSIZE = 2  # of keys and values, bf16


def recompute_choices(run: TrainingRun) -> dict[str, TrainingRun]:
    """The same run with each choice of recomputation."""
    plain = dict(recompute_method="uniform", recompute_layers=1, recompute_modules=("core_attn",))
    choices = {
        "none": replace(run, recompute="none", keep_attention_output=False, **plain),
        "full": replace(run, recompute="full", keep_attention_output=False, **plain),
    }
    if any(run.by_s2(layer) for layer in range(len(run.sparsity.layers))):
        choices["full, --s2-keep-attention-output"] = replace(
            run, recompute="full", keep_attention_output=True, **plain
        )
    return choices


def _memory(run: TrainingRun) -> dict:
    found = memory(run)
    return dict(
        total_gib=found.total / GIB,
        parts_gib={name: size / GIB for name, size in found.parts.items()},
        largest_at=found.at,
        pipeline_stage=found.stage,
    )


def _time(run: TrainingRun, tables: Tables) -> dict:
    found = step_time(run, tables)
    flops = token_flops(run)
    per_gpu = found.tokens_per_second / run.gpus / 1e12
    return dict(
        step_ms=found.total * 1e3,
        parts_ms={name: seconds * 1e3 for name, seconds in found.seconds.items()},
        tokens_per_second=found.tokens_per_second,
        attended_tflops_per_gpu=flops.model * per_gpu,
        dense_equivalent_tflops_per_gpu=flops.dense_model * per_gpu,
        notes=list(found.notes),
    )


def model_facts(sparsity: ResolvedSparsity, run: TrainingRun | None) -> dict:
    """Pairs, layers and FLOPs. run: None where the sizes of the model are not known."""
    length, heads = sparsity.seq_length, sparsity.num_heads
    dense = dense_pairs(heads, length) * len(sparsity.all_layers)
    attended = sparsity.attended_pairs()
    layers = []
    for kind in layer_kinds(sparsity):
        entry = asdict(kind) | dict(cache_share=kind.cache_tokens / length)
        if run is not None:
            entry["cache_bytes"] = round(2 * kind.cache_tokens * sparsity.num_kv_heads * run.head_dim * ITEMSIZE)
        layers.append(entry)
    facts = dict(
        format=FORMAT,
        model=dict(
            layers=len(sparsity.layers),
            mtp_layers=len(sparsity.mtp_layers),
            heads=heads,
            kv_heads=sparsity.num_kv_heads,
            seq_length=length,
            block_size=sparsity.block_size,
        ),
        pairs=dict(
            attended=attended,
            dense=dense,
            density=attended / dense,
            attended_per_token=attended / length,
            dense_per_token=dense / length,
        ),
        coverage={
            spec: dict(layers=count, coverage=share) for spec, (count, share) in sparsity.spec_coverage().items()
        },
        layers=layers,
        warnings=warnings(sparsity),
    )
    if run is not None:
        flops = token_flops(run)
        facts["model"] |= dict(
            hidden=run.hidden, ffn=run.ffn, head_dim=run.head_dim, vocabulary=run.vocabulary, gpus=run.gpus,
            tp=run.tp, cp=run.cp, pp=run.pp, dp=run.dp, microbatches=run.microbatches, micro_batch=run.micro_batch,
        )  # fmt: skip
        if run.symbols:
            facts["kinds"] = _kinds(run)
        facts["flops_per_token"] = dict(
            linear=flops.linear,
            attention=flops.attention,
            dense_attention=flops.dense_attention,
            model=flops.model,
            dense_model=flops.dense_model,
        )
    return facts


def _kinds(run: TrainingRun) -> list[dict]:
    """The layers of a HybridModel by kind: how many, parameters of all of them (None: not counted) and of those that a
    token sees, FLOPs a token of all of them, forward and backward, the attention's pairs left out."""
    whole = replace(run, tp=1)
    entries = []
    for symbol in dict.fromkeys(run.symbols):
        count, norm = run.symbols.count(symbol), run.hidden
        if symbol in NOT_MEASURED:
            flops = 3 * run.hybrid.flops(symbol)
            seen = [run.hybrid.expert_weights(active) + norm for active in (False, True)] if symbol == "E" else None
        else:
            weights = whole.attention_weights if symbol == "*" else whole.mlp_weights
            flops, seen = 6 * weights, [weights + norm] * 2
        numbers = (None, None) if seen is None else (count * seen[0], count * seen[1])
        entries.append(
            dict(
                symbol=symbol,
                name=NAMES[symbol],
                layers=count,
                parameters=numbers[0],
                active_parameters=numbers[1],
                linear_flops=count * flops,
            )
        )
    return entries


def parallel_facts(sparsity: ResolvedSparsity, tp: int, cp: int, run: TrainingRun | None) -> dict:
    """Balance of the attention's work over tensor- and context-parallel ranks, and what a layer of each spec sends.

    Raises ValueError for heads and lengths that the ranks cannot share.
    """
    facts: dict = dict(balance=dict(tensor_parallel=tensor_parallel_balance(sparsity, tp)), exchange=[])
    if cp == 1:
        return facts
    for spec in dict.fromkeys(layer.spec for layer in sparsity.layers):
        at, first = next((at, layer) for at, layer in enumerate(sparsity.layers) if layer.spec == spec)
        dense = RangePattern.dense(sparsity.block_size, sparsity.num_heads, sparsity.num_kv_heads)
        pattern = dense if first.pattern is None else first.pattern
        used = "sparse" if run is None else run.comm_type(at)
        entry = dict(spec=spec, used=used, bytes={})
        unit = dict(head_dim=1, itemsize=1) if run is None else dict(head_dim=run.head_dim, itemsize=run.itemsize)
        parts = list(dict.fromkeys(pattern.tensor_parallel_slice(rank, tp) for rank in range(tp)))
        types = [name for name in COMM_TYPES if name != "a2a" or _divides(parts[0], cp)]
        if first.pattern is None and used.startswith("te:"):
            types = []
        for name in types:
            costs = [layer_costs(part, cp, sparsity.seq_length, name, **unit) for part in parts]
            entry["bytes"][name] = _busiest(costs)
        if used.startswith("te:"):
            entry["bytes"][used] = _busiest(exchange_costs(run, at, used)) | dict(balance=1.0)
        facts["exchange"].append(entry)
    sparse = [entry["bytes"]["sparse"] for entry in facts["exchange"] if "sparse" in entry["bytes"]]
    facts["balance"]["context_parallel"] = max((entry["balance"] for entry in sparse), default=1.0)
    return facts


def _divides(pattern, cp: int) -> bool:
    return pattern.num_kv_heads % cp == 0


def _busiest(costs: list[LayerCosts]) -> dict:
    return dict(
        forward=max(max(cost.sent_forward) for cost in costs),
        backward=max(max(cost.sent_backward) for cost in costs),
        balance=max(cost.balance for cost in costs),
    )


def forecast_facts(run: TrainingRun, gpu: str, words: Sequence[str]) -> dict:
    """Memory and step time of a run beside those of its dense twin, and of each choice of recomputation. words: the
    launch line's flags, for the settings that the forecast does not know."""
    facts: dict = dict(memory=dict(run=_memory(run), dense=_memory(run.dense())), no_forecast=[])
    choices = recompute_choices(run)
    facts["memory"]["by_recompute"] = {name: _memory(choice)["total_gib"] for name, choice in choices.items()}
    if (limit := memory_gib(gpu)) is not None:
        facts["memory"]["gpu_gib"] = limit
    else:
        facts["no_forecast"].append(
            f"whether it fits into {gpu!r}: the memory of that GPU is not known; it is of {', '.join(NAMED)}"
        )
    tables = load_tables(gpu)
    if tables is None:
        known = ", ".join(known_gpus())
        facts["no_forecast"].append(f"step time on {gpu!r}: not measured; there are tables of {known}")
        return facts
    mine, dense = _time(run, tables), _time(run.dense(), tables)
    mine["notes"] += reasons(words, UNKNOWN)
    facts["forecast"] = dict(
        gpu=tables.gpu,
        versions=tables.content["sources"][-1]["versions"],
        run=mine,
        dense=dense,
        speed_up=dense["step_ms"] / mine["step_ms"],
        step_ms_by_recompute={name: step_time(choice, tables).total * 1e3 for name, choice in choices.items()},
    )
    return facts


def _missing(flags: list[str], tokenizer: str | None, launch_line: bool) -> str:
    """Why there is no forecast without these flags, and what to give."""
    if flags == ["--vocab-size"] and tokenizer is not None:
        return f"--vocab-size not given, and no tokenizer.json in {tokenizer}; add --vocab-size before the --"
    names = " and ".join(flags)
    remedy = f"add {names} before the --" if launch_line else "give them, or a launch line behind --"
    return f"{names} not given; {remedy}"


def all_facts(args: Namespace, sparsity: ResolvedSparsity, *, gpus: int | None, gpu: str, words: Sequence[str]) -> dict:
    """args: of flags.read_flags. gpus: of the run, None: one model. gpu: its kind. words: the launch line's flags.

    Raises ValueError for sizes that do not divide each other.
    """
    missing, refused = missing_sizes(args), reasons(words, REFUSED)
    for flag in ("--mtp-num-layers", "--num-experts"):  # perhaps given before the launch line
        reason = f"{flag}: {REFUSED[flag]}"
        if getattr(args, destination(flag)) and reason not in refused:
            refused.append(reason)
    pattern, known = args.hybrid_layer_pattern, True
    if pattern is not None:  # which says where experts are
        found, known = refused_layers(pattern)
        refused = [reason for reason in refused if not reason.startswith("--num-experts")] + found
    other_shape = not known or any(reason.startswith(OTHER_SHAPES) for reason in refused)
    even = not any(reason.endswith(UNEVEN) for reason in refused)
    run = None if missing or other_shape else training_run(args, sparsity, gpus, even=even)
    facts = model_facts(sparsity, run)
    facts |= parallel_facts(sparsity, args.tensor_model_parallel_size, args.context_parallel_size, run)
    if refused:
        return facts | dict(no_forecast=[f"not measured with {reason}" for reason in refused])
    if run is None:
        return facts | dict(no_forecast=[_missing(missing, args.tokenizer_model, bool(words))])
    return facts | forecast_facts(run, gpu, words)
