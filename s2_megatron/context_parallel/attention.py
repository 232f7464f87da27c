"""S2-Attention of a sequence that lies on several ranks (context parallelism), with autograd.

    cp = ContextParallel(pattern, group, "sparse")
    out = cp.attention(query, key, value)     # [S/c, B, heads, D] of this rank, in Megatron's zigzag order

sparse      every rank receives the key blocks that its pattern attends, and no others (plan.py), beside work without them (cp_sparse.py)
all_gather  every rank receives all keys and values: the plain reference
a2a         every rank receives the whole sequence of some heads (Ulysses, arXiv 2309.14509): KV heads must be a multiple of the ranks

S sequence, c ranks, B batch, H query heads, G KV heads (of one tensor-parallel rank), D head dim, t = S * B packed
tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from s2_megatron.context_parallel.copies import TRANSPORTS
from s2_megatron.context_parallel.exchange import cut_order, documents_of_rank, returned_sum, sequence_order
from s2_megatron.context_parallel.plan import check_block_count, make_plan, zigzag_blocks
from s2_megatron.context_parallel.sparse import SparseAttention, SparseState
from s2_megatron.context_parallel.transport import all_gather, all_to_all
from s2_megatron.ops.api import (
    AttentionCall,
    attention_backward_dkdv,
    attention_backward_dq,
    attention_delta,
    attention_forward,
    prepare_placement,
    resolve_backend,
)
from s2_megatron.ops.layout import PackedSequence, Placement, build_layout
from s2_megatron.ops.recompute import KeptOutputs, kept_attention
from s2_megatron.patterns.ranges import Pattern

COMM_TYPES = ("sparse", "all_gather", "a2a")
CUTS = ("sequence", "document")


def packed_cut(args) -> str:
    """How Megatron cuts packed rows over context-parallel ranks: the row as one 'sequence', or each 'document' by
    itself. args: Megatron's."""
    return "sequence" if args.dataloader_inter_document_masking and not args.sft else "document"


class ContextSettings(NamedTuple):
    """The flags of long context. comm_types: one for all layers, or one per layer. keep_received, packed_cut: as in
    ContextParallel. keep_output: whether recomputed layers keep the result of their attention. transport: of sparse, as
    in ContextParallel."""

    comm_types: tuple[str, ...] = ("sparse",)
    keep_received: bool = False
    packed_cut: str = "document"
    keep_output: bool = False
    transport: str = "auto"

    def comm_type(self, layer: int) -> str:
        """Of a layer, counted from 0; layers beyond the list (multi-token prediction) are like the last one."""
        return self.comm_types[min(layer, len(self.comm_types) - 1)]


def check_comm_type(comm_type: str, num_kv_heads: int, size: int) -> str:
    """The comm type's own name ('allgather', Megatron's spelling, is taken too). num_kv_heads: of one tensor-parallel
    rank. size: ranks.

    Raises ValueError for an unknown type, and for a2a with KV heads that cannot be dealt out evenly.
    """
    name = "all_gather" if comm_type == "allgather" else comm_type
    if name not in COMM_TYPES:
        raise ValueError(
            f"s2_cp_comm_type={comm_type!r}; expected one of {', '.join(COMM_TYPES)}; set --s2-cp-comm-type"
        )
    if name == "a2a" and num_kv_heads % size:
        raise ValueError(
            f"s2_cp_comm_type='a2a' with {num_kv_heads} KV heads on a tensor-parallel rank and context_parallel_size={size}; expected a "
            f"multiple of {size}; use --s2-cp-comm-type sparse"
        )
    return name


class ContextParallel:
    """The context parallelism of one layer.

    pattern: of this tensor-parallel rank's heads, with global offsets. group: the context-parallel process group.
    keep_received: save the received keys and values for the backward instead of receiving them again. cut: how packed
    batches were cut over the ranks, as one 'sequence' or each 'document' by itself; unpacked ones are always one
    sequence in zigzag. transport: how the blocks of sparse travel, see cp_copies.peer_copies.
    Raises ValueError for a comm type that is unknown or does not suit the heads.
    """

    def __init__(
        self,
        pattern: Pattern,
        group,
        comm_type: str = "sparse",
        *,
        keep_received: bool = False,
        cut: str = "sequence",
        transport: str = "auto",
    ):
        assert cut in CUTS and transport in TRANSPORTS
        self.pattern, self.group, self.keep_received, self.cut, self.transport = (
            pattern,
            group,
            keep_received,
            cut,
            transport,
        )
        self.size, self.rank = group.size(), group.rank()
        self.comm_type = check_comm_type(comm_type, pattern.num_kv_heads, self.size)
        heads = pattern.tensor_parallel_slice(self.rank, self.size) if self.comm_type == "a2a" else pattern
        self._layout = build_layout(heads)
        self._prepared: dict = {}

    def prepare(
        self, seq_length: int, device: torch.device, head_dim: int, dtype: torch.dtype, backend: str = "auto"
    ) -> None:
        """Makes what the calls of a length share, on their device and before the first of them: the plan, and what
        kernels read of it.

        head_dim, dtype, backend: of the calls. Raises ValueError for a length that cannot be cut, for a transport that
        is not possible, and as resolve_backend does.
        """
        if self.comm_type == "a2a":
            return
        with torch.device(device):  # whatever device the model around it is built on
            state = self.state(seq_length, device)
        if self.comm_type == "sparse":
            state.exchange.reserve(head_dim, dtype.itemsize)
            placements = state.read_by_kernels(head_dim, dtype.itemsize, self.keep_received)
        else:
            placements = [state.placement]
        for placement in placements:
            prepare_placement(
                state.layout, placement, seq_length // self.size, head_dim, dtype, resolve_backend(backend, device.type)
            )

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        packed: PackedSequence | None = None,
        backend: str = "auto",
        deterministic: bool = False,
        kept: KeptOutputs | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's queries to the keys of all ranks; differentiable once.

        query [S/c, B, H, D], key and value [S/c, B, G, D], any strides; packed: [t/c, H, D] and [t/c, G, D], and the
        documents of all ranks' tokens together. kept: of a layer that is recomputed, to launch no second forward. The
        other arguments as in s2_attention. Returns out, of query's shape and dtype. Raises ValueError for lengths that
        cannot be cut, and for packed ones with comm type sparse.
        """
        if key.shape[0] != query.shape[0]:
            raise ValueError(
                f"query has {query.shape[0]} rows and key {key.shape[0]}; context parallelism trains, it does not continue a prefix; "
                "use --context-parallel-size 1 for inference"
            )
        backend = resolve_backend(backend, query.device.type)
        scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if packed is None:
            return self._unpacked(query, key, value, scale, backend, deterministic, kept)
        if self.comm_type == "sparse":
            raise ValueError(
                "packed sequences with s2_cp_comm_type='sparse', whose plan is for one sequence; expected all_gather or a2a; "
                "use --s2-cp-comm-type all_gather"
            )
        layout = self._layout.to(query.device)
        order = self._packed_order(packed, query.shape[0] * self.size, query.device)
        if self.comm_type == "all_gather" and self.cut == "sequence":
            packed = documents_of_rank(packed, self.rank, self.size, len(order))
        options = dict(
            softmax_scale=scale,
            tensor_format="thd",
            packed=packed,
            backend=backend,
            deterministic=deterministic,
            kept=kept,
        )
        if self.comm_type == "a2a":
            return self._by_heads(query, key, value, order, layout, options)
        whole = _GatherRows.apply(key, value, order, self.group)
        rows = order.argsort()[self.rank * len(query) : (self.rank + 1) * len(query)]
        # The packed op takes as many queries as keys: those of other ranks are zero, and their rows of the result are
        # not read.
        all_queries = query.new_zeros((len(order), *query.shape[1:])).index_copy(0, rows, query)
        return kept_attention(all_queries, *whole, layout, **options)[rows]

    def _packed_order(self, packed, tokens, device):
        return (
            sequence_order(tokens, self.size, device)
            if self.cut == "sequence"
            else cut_order(packed.starts, tokens, self.size)
        )

    def _unpacked(self, query, key, value, scale, backend, deterministic, kept):
        tokens = query.shape[0] * self.size
        if self.comm_type == "a2a":
            order = sequence_order(tokens, self.size, query.device)
            options = dict(
                softmax_scale=scale,
                tensor_format="sbhd",
                packed=None,
                backend=backend,
                deterministic=deterministic,
                kept=kept,
            )
            return self._by_heads(query, key, value, order, self._layout.to(query.device), options)
        state = self.state(tokens, query.device)
        call = AttentionCall(state.layout, float(scale), "sbhd", None, None, backend, deterministic)
        function = SparseAttention if self.comm_type == "sparse" else _GatheredAttention
        known = None if kept is None else kept.take()
        out, lse = function.apply(query, key, value, call, state, self.keep_received, known)
        if kept is not None:
            kept.keep(out, lse)
        return out

    def state(self, tokens: int, device: torch.device) -> SparseState | _Gathered:
        """What the calls of one length share; not for a2a. Raises ValueError for a length that cannot be cut."""
        if (tokens, device) not in self._prepared:
            n_blocks = check_block_count(tokens, self.size, self.pattern.block_size)
            layout = self._layout.to(device)
            if self.comm_type == "all_gather":
                own = zigzag_blocks(self.rank, self.size, n_blocks)
                placement = Placement.make(own, n_blocks, device=device, pattern=self.pattern)
                state = _Gathered(layout, self.group, placement, sequence_order(tokens, self.size, device))
            else:
                plan = make_plan(self.pattern, self.rank, self.size, n_blocks)
                state = SparseState.make(layout, plan, self.group, device, self.transport)
            self._prepared[tokens, device] = state
        return self._prepared[tokens, device]

    def _by_heads(self, query, key, value, order, layout, options):
        whole = _RowsToHeads.apply(query, key, value, order, self.group)
        out = kept_attention(*whole, layout, **options)
        return _HeadsToRows.apply(out, order, self.group)


class _Gathered(NamedTuple):
    """What the calls of one length and device share."""

    layout: object
    group: object
    placement: Placement  # this rank's queries
    order: torch.Tensor  # int64 [S], see cut_order


def _gather(tensors, order, group):
    """All ranks' rows of tensors of one shape [S/c, ...] in natural order: [len(tensors), S, ...]."""
    by_rank = all_gather(torch.stack(tuple(tensors)), group)  # [c, tensors, S/c, ...]
    return torch.stack([by_rank[:, index].flatten(0, 1).index_select(0, order) for index in range(len(tensors))])


class _GatheredAttention(torch.autograd.Function):
    """All keys and values on every rank, as SparseAttention otherwise. No communication is hidden: it is what that is
    compared with."""

    @staticmethod
    def forward(ctx, query, key, value, call, state, keep_received, known):
        ctx.call, ctx.state, kept = call._replace(placement=state.placement), state, []
        if known is None:
            whole = _gather((key, value), state.order, state.group)
            known = attention_forward(query, *whole, ctx.call)
            kept = [whole] if keep_received else []
        out, lse = known
        ctx.save_for_backward(query, key, value, out, lse, *kept)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, _):
        query, key, value, out, lse, *kept = ctx.saved_tensors
        whole = kept[0] if kept else _gather((key, value), ctx.state.order, ctx.state.group)
        row_sums = attention_delta(grad_out, out, lse, ctx.call)
        wide = torch.promote_types(query.dtype, torch.float32)
        grads = torch.empty(whole.shape, dtype=wide, device=whole.device)
        attention_backward_dkdv(grad_out, query, *whole, lse, row_sums, *grads, ctx.call)
        grad_query = attention_backward_dq(grad_out, query, *whole, lse, row_sums, ctx.call)
        grad_key, grad_value = (returned_sum(grad, ctx.state.order, ctx.state.group).to(key.dtype) for grad in grads)
        return grad_query, grad_key, grad_value, None, None, None, None


class _GatherRows(torch.autograd.Function):
    """key and value [t/c, G, D] -> [t, G, D] of all ranks in natural order; the gradients are summed over ranks in
    fp32."""

    @staticmethod
    def forward(ctx, key, value, order, group):
        ctx.save_for_backward(order)
        ctx.group, ctx.dtype = group, key.dtype
        return tuple(_gather((key, value), order, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_key, grad_value):
        (order,) = ctx.saved_tensors
        wide = torch.promote_types(ctx.dtype, torch.float32)
        return (
            *(returned_sum(grad.to(wide), order, ctx.group).to(ctx.dtype) for grad in (grad_key, grad_value)),
            None,
            None,
        )


def _rows_to_heads(tensors, order, group):
    """Tensors [S/c, ..., heads, D] of all heads -> [S, ..., heads/c, D] in natural order: one collective for all of
    them."""
    size = group.size()
    shares = [tensor.unflatten(-2, (size, -1)).movedim(-3, 0) for tensor in tensors]  # [c, S/c, ..., heads/c, D]
    sent = torch.cat(shares, dim=-2)
    received = torch.empty_like(sent)
    all_to_all(received, sent, [1] * size, [1] * size, group)
    natural = received.flatten(0, 1).index_select(0, order)
    return natural.split([share.shape[-2] for share in shares], dim=-2)


def _heads_to_rows(tensors, order, group):
    """The inverse of _rows_to_heads."""
    size = group.size()
    widths = [tensor.shape[-2] for tensor in tensors]
    natural = torch.cat(tensors, dim=-2)
    sent = torch.empty_like(natural, memory_format=torch.contiguous_format)
    sent[order] = natural
    sent = sent.unflatten(0, (size, -1))
    received = torch.empty_like(sent)
    all_to_all(received, sent, [1] * size, [1] * size, group)
    return [share.movedim(0, -3).flatten(-3, -2) for share in received.split(widths, dim=-2)]


class _RowsToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, order, group):
        ctx.save_for_backward(order)
        ctx.group = group
        return tuple(_rows_to_heads((query, key, value), order, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return *_heads_to_rows(grads, ctx.saved_tensors[0], ctx.group), None, None


class _HeadsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, order, group):
        ctx.save_for_backward(order)
        ctx.group = group
        return _heads_to_rows((out,), order, group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _rows_to_heads((grad,), ctx.saved_tensors[0], ctx.group)[0], None, None
