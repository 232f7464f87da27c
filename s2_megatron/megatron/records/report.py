"""What start-up prints: which flags do nothing, what computes which layer, how much context-parallel ranks send, and
how evenly the work falls."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from s2_megatron.config.sparsity import ResolvedSparsity, joined_layers, tensor_parallel_balance
from s2_megatron.context_parallel.document_plan import most_received_slots, slot_bytes, why_not
from s2_megatron.context_parallel.plan import LayerCosts, check_comm_type, layer_costs
from s2_megatron.megatron.settings import S2Run, S2Settings, computed_head_dim
from s2_megatron.patterns.ranges import Pattern, RangePattern
from s2_megatron.printing import print_once, print_table

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

# Largest over mean work of the ranks from which on start-up warns.
BALANCE_LIMIT = 1.1
NO_CONFIG = "no --s2-config: the model is Megatron's own, without S2 attention"


def report_ignored_flags(args: Namespace) -> None:
    """Without --s2-config: says so, and which other flags of S2-Attention were given all the same."""
    given = [
        flag
        for flag, ignored in (
            (f"--s2-backend {args.s2_backend}", args.s2_backend != "auto"),
            (f"--s2-dense-core {args.s2_dense_core}", args.s2_dense_core != "auto"),
            (f"--s2-cp-comm-type {' '.join(args.s2_cp_comm_type)}", args.s2_cp_comm_type != ["sparse"]),
            ("--s2-cp-keep-received", args.s2_cp_keep_received),
            ("--s2-keep-attention-output", args.s2_keep_attention_output),
            ("--s2-allow-python-patterns", args.s2_allow_python_patterns),
        )
        if ignored
    ]
    if given:
        print_once(f"S2: {', '.join(given)} without --s2-config: ignored, the model is Megatron's own")
    else:
        print_once(f"S2: {NO_CONFIG}")


def report_flags_without_effect(args: Namespace) -> None:
    """Prints which flags of context parallelism were given to a run on one context-parallel rank."""
    given = [
        flag
        for flag, is_given in (
            ("--s2-cp-comm-type", args.s2_cp_comm_type != ["sparse"]),
            ("--s2-cp-keep-received", args.s2_cp_keep_received),
        )
        if is_given
    ]
    if given and args.context_parallel_size == 1:
        print_once(f"S2: {', '.join(given)} with --context-parallel-size 1: no effect")


def report_tensor_parallel(sparsity: ResolvedSparsity, size: int) -> None:
    """Prints how evenly the attention work falls on `size` tensor-parallel ranks, and what to change when it does
    not."""
    if size > 1:
        fix = f"use dense_heads: {{spread: n}} with n a multiple of {size}"
        _print_balance("tensor", size, tensor_parallel_balance(sparsity, size), fix)


def _print_balance(kind: str, size: int, balance: float, fix: str) -> None:
    text = f"S2: attention work of {size} {kind}-parallel ranks, max / mean: {balance:.3f}"
    if balance > BALANCE_LIMIT:
        text += f"; WARNING: above {BALANCE_LIMIT}, the other ranks wait; {fix}"
    print_once(text)


def report_layers(run: S2Run, dense_core: str, reason: str, transformer: TransformerConfig) -> None:
    """Prints the table of layers, what context parallelism sends, and what computes the dense layers.

    dense_core, reason: of resolve_dense_core. Raises ValueError as report_context_parallel does.
    """
    stock = "Transformer Engine" if transformer.transformer_impl == "transformer_engine" else "Megatron local"
    ours = [layer.pattern is not None or dense_core == "s2" for layer in run.sparsity.all_layers]
    print_table(run.sparsity.table(core_names(ours, stock, run.settings, transformer)))
    if transformer.context_parallel_size > 1:
        report_context_parallel(run, ours, transformer)
    if any(layer.pattern is None for layer in run.sparsity.all_layers):
        print_once(f"S2 dense layers: computed by {'S2-Attention' if dense_core == 's2' else stock} ({reason})")


def core_names(
    ours: Sequence[bool], stock_core: str, settings: S2Settings, transformer: TransformerConfig
) -> list[str]:
    """What computes each layer, for the start-up table: with context parallelism also how its ranks exchange keys and
    values. ours: whether S2's op computes the layer."""
    if transformer.context_parallel_size == 1:
        return ["S2" if own else stock_core for own in ours]
    names = []
    for layer, own in enumerate(ours):
        stock_type = transformer.cp_comm_type
        if isinstance(stock_type, (list, tuple)):
            stock_type = stock_type[min(layer, len(stock_type) - 1)]
        comm_type = settings.comm_type(layer) if own else stock_type
        names.append(f"{'S2' if own else stock_core}, {comm_type}")
    return names


def _slices(run: S2Run, transformer: TransformerConfig, layer: int) -> list[Pattern]:
    """The patterns of a layer's tensor-parallel ranks, each once."""
    sparsity = run.sparsity
    pattern = sparsity.all_layers[layer].pattern
    if pattern is None:
        pattern = RangePattern.dense(sparsity.block_size, sparsity.num_heads, sparsity.num_kv_heads)
    tp_size = transformer.tensor_model_parallel_size
    return list(dict.fromkeys(pattern.tensor_parallel_slice(rank, tp_size) for rank in range(tp_size)))


def _itemsize(transformer: TransformerConfig) -> int:
    return 2 if transformer.bf16 or transformer.fp16 else 4


def _costs(run: S2Run, transformer: TransformerConfig, layer: int) -> list[LayerCosts]:
    """Of every tensor-parallel rank."""
    settings, size = run.settings, transformer.context_parallel_size
    slices, comm_type = _slices(run, transformer, layer), settings.comm_type(layer)
    check_comm_type(comm_type, slices[0].num_kv_heads, size)
    options = dict(
        head_dim=computed_head_dim(transformer),
        itemsize=_itemsize(transformer),
        keep_received=settings.cp_keep_received,
    )
    return [layer_costs(part, size, run.sparsity.seq_length, comm_type, **options) for part in slices]


def report_context_parallel(run: S2Run, ours: Sequence[bool], transformer: TransformerConfig) -> None:
    """Prints what S2's layers send per layer and sequence (the busiest rank, all tensor-parallel slices looked at) and
    the balance of work. ours: whether S2's op computes the layer.

    Raises ValueError for lengths that cannot be cut and comm types that do not suit the heads. Of packed batches, whose
    work depends on the documents, the comm types are checked and the most that `sparse` receives is printed.
    """
    sparsity, settings, size = run.sparsity, run.settings, transformer.context_parallel_size
    if settings.packed:
        _report_packed(run, ours, transformer)
        return
    rows: dict[tuple, list[str]] = {}
    largest = total = 0.0
    known: dict[tuple, list[LayerCosts]] = {}
    for layer, own in enumerate(ours):
        if not own:
            continue
        key = (sparsity.all_layers[layer].pattern, settings.comm_type(layer))
        costs = known.setdefault(key, []) or _costs(run, transformer, layer)
        known[key] = costs
        balance = max(cost.balance for cost in costs)
        work = sum(sum(cost.pairs) for cost in costs)
        largest, total = largest + balance * work, total + work
        texts = (
            settings.comm_type(layer),
            _mebibytes(max(max(cost.sent_forward) for cost in costs)),
            _mebibytes(max(max(cost.sent_backward) for cost in costs)),
            f"{balance:.3f}",
        )
        name = str(layer) if layer < len(sparsity.layers) else f"mtp {layer - len(sparsity.layers)}"
        rows.setdefault(texts, []).append(name)
    if not rows:
        return
    table = Table(title=f"S2 on {size} context-parallel ranks: the busiest rank, MiB a sequence", title_justify="left")
    for name in ("layer", "exchange", "sent forward", "sent backward", "work max / mean"):
        table.add_column(name, justify="left" if name in ("layer", "exchange") else "right")
    for texts, names in rows.items():
        table.add_row(joined_layers(names), *texts)
    print_table(table)
    fix = "use --s2-cp-comm-type sparse, or a smaller --context-parallel-size"
    _print_balance("context", size, largest / total, fix)


def _report_packed(run: S2Run, ours: Sequence[bool], transformer: TransformerConfig) -> None:
    settings, size, most = run.settings, transformer.context_parallel_size, 0
    for layer, own in enumerate(ours):
        if not own:
            continue
        comm_type, parts = settings.comm_type(layer), _slices(run, transformer, layer)
        check_comm_type(comm_type, parts[0].num_kv_heads, size)
        if comm_type == "sparse":
            refused = next(filter(None, map(why_not, parts)), None)
            if refused is not None:  # of a run that did not come from flags; refusals/sparsity.py has the others
                raise ValueError(f"layer {layer} (from 0): {refused}")
            most = max(most, *map(most_received_slots, parts))
    whole_row = settings.packed_cut == "sequence"
    cut, bound = "the whole row" if whole_row else "each document", ""
    if most:
        n_bytes = most * slot_bytes(computed_head_dim(transformer), _itemsize(transformer))
        of_each = "" if whole_row else " of each document (of documents shorter than a few windows a2a sends less)"
        bound = f"; a rank receives at most {_mebibytes(n_bytes)} MiB{of_each} in the forward of a layer with sparse"
    print_once(
        f"S2: packed rows are cut over {size} context-parallel ranks, {cut} in zigzag; work and bytes depend on the "
        f"documents{bound}"
    )


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f}" if count >= 2**20 / 10 else f"{count / 2**20:.4f}"
