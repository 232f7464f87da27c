"""What start-up says about context parallelism: who talks how in which layer, how much is sent, and how evenly the work
falls."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.transformer.transformer_config import TransformerConfig
from rich.table import Table

from s2_megatron.config.sparsity import ResolvedSparsity, joined_layers
from s2_megatron.context_parallel.attention import ContextSettings, check_comm_type
from s2_megatron.context_parallel.plan import LayerCosts, layer_costs
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.printing import print_once, print_table

# Largest over mean work of the ranks from which on start-up warns.
BALANCE_LIMIT = 1.1


def core_names(
    ours: Sequence[bool], stock_core: str, transformer: TransformerConfig, context: ContextSettings
) -> list[str]:
    """What computes each layer, for the start-up table: with context parallelism also how its ranks talk. ours: whether
    S2's op does."""
    if transformer.context_parallel_size == 1:
        return ["S2" if own else stock_core for own in ours]
    names = []
    for layer, own in enumerate(ours):
        stock_type = transformer.cp_comm_type
        if isinstance(stock_type, (list, tuple)):
            stock_type = stock_type[min(layer, len(stock_type) - 1)]
        comm_type = context.comm_type(layer) if own else stock_type
        names.append(f"{'S2' if own else stock_core}, {comm_type}")
    return names


def _costs(
    sparsity: ResolvedSparsity, transformer: TransformerConfig, context: ContextSettings, layer: int
) -> list[LayerCosts]:
    """Of every tensor-parallel rank."""
    pattern = sparsity.all_layers[layer].pattern
    if pattern is None:
        pattern = RangePattern.dense(sparsity.block_size, sparsity.num_heads, sparsity.num_kv_heads)
    tp_size, size = transformer.tensor_model_parallel_size, transformer.context_parallel_size
    slices = dict.fromkeys(pattern.tensor_parallel_slice(rank, tp_size) for rank in range(tp_size))
    itemsize = 2 if transformer.bf16 or transformer.fp16 else 4
    settings = dict(head_dim=transformer.kv_channels, itemsize=itemsize, keep_received=context.keep_received)
    comm_type = check_comm_type(context.comm_type(layer), next(iter(slices)).num_kv_heads, size)
    return [layer_costs(part, size, sparsity.seq_length, comm_type, **settings) for part in slices]


def report_context_parallel(
    sparsity: ResolvedSparsity,
    ours: Sequence[bool],
    transformer: TransformerConfig,
    context: ContextSettings,
    packed: bool,
) -> None:
    """Prints what S2's layers send per layer and sequence (the busiest rank, all tensor-parallel slices looked at) and
    the balance of work.

    Raises ValueError for lengths that cannot be cut and comm types that do not suit the heads. Of packed batches, whose
    work depends on the documents, only the comm types are checked.
    """
    size = transformer.context_parallel_size
    if packed:
        for layer, own in enumerate(ours):
            if own:
                local_groups = max(1, sparsity.num_kv_heads // transformer.tensor_model_parallel_size)
                check_comm_type(context.comm_type(layer), local_groups, size)
        cut = "each document" if context.packed_cut == "document" else "the whole row"
        print_once(
            f"S2: packed rows are cut over {size} context-parallel ranks, {cut} in zigzag; work and bytes depend on the documents"
        )
        return
    rows: dict[tuple, list[str]] = {}
    largest = total = 0.0
    known: dict[tuple, list[LayerCosts]] = {}
    for layer, own in enumerate(ours):
        if not own:
            continue
        key = (sparsity.all_layers[layer].pattern, context.comm_type(layer))
        costs = known.setdefault(key, []) or _costs(sparsity, transformer, context, layer)
        known[key] = costs
        balance = max(cost.balance for cost in costs)
        work = sum(sum(cost.pairs) for cost in costs)
        largest, total = largest + balance * work, total + work
        texts = (
            context.comm_type(layer),
            _mebibytes(max(max(cost.sent_forward) for cost in costs)),
            _mebibytes(max(max(cost.sent_backward) for cost in costs)),
            f"{balance:.3f}",
        )
        name = str(layer) if layer < len(sparsity.layers) else f"mtp {layer - len(sparsity.layers)}"
        rows.setdefault(texts, []).append(name)
    if not rows:
        return
    table = Table(
        title=f"S2 layers on {size} context-parallel ranks: the busiest rank, MiB a sequence", title_justify="left"
    )
    for name in ("layer", "exchange", "sent forward", "sent backward", "work max / mean"):
        table.add_column(name, justify="left" if name in ("layer", "exchange") else "right")
    for texts, names in rows.items():
        table.add_row(joined_layers(names), *texts)
    print_table(table)
    text = f"S2: attention work of {size} context-parallel ranks, max / mean: {largest / total:.3f}"
    if largest / total > BALANCE_LIMIT:
        text += f"; WARNING: above {BALANCE_LIMIT}, the other ranks wait; use --s2-cp-comm-type sparse, or a smaller --context-parallel-size"
    print_once(text)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f}" if count >= 2**20 / 10 else f"{count / 2**20:.4f}"
