"""S2-Attention of a sequence that lies on several ranks (context parallelism), with autograd.

    from s2_megatron.context_parallel import ContextParallel

    cp = ContextParallel(pattern, group, "sparse")
    out = cp.attention(query, key, value)     # [S/c, B, heads, D] of this rank, in Megatron's zigzag order

sparse      every rank receives the key blocks that its pattern attends, and no others (plan.py), while it computes what
            needs none of them (sparse.py); of packed documents the halos of windows and the sinks (documents.py)
all_gather  every rank receives all keys and values: the plain reference (dense.py)
a2a         every rank receives the whole sequence of some heads (Ulysses, arXiv 2309.14509; dense.py)

S sequence, c ranks, B batch, H query heads, G KV heads (of one tensor-parallel rank), D head dim, t = S * B packed
tokens.
"""

from __future__ import annotations

import torch

from s2_megatron.context_parallel.dense import (
    GatheredAttention,
    GatheredState,
    GatherRows,
    HeadsToRows,
    RowsToHeads,
    cut_order,
    documents_of_rank,
    sequence_order,
)
from s2_megatron.context_parallel.document_plan import why_not
from s2_megatron.context_parallel.documents import DocumentAttention, DocumentPlans
from s2_megatron.context_parallel.plan import check_block_count, check_comm_type, make_plan, zigzag_blocks
from s2_megatron.context_parallel.sparse import SparseAttention, SparseState
from s2_megatron.ops.api import make_call, resolve_backend
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.head_dims import differ, padded
from s2_megatron.ops.lasting import lasting
from s2_megatron.ops.layout import PackedSequence, Placement, build_layout
from s2_megatron.ops.offset import check_offset
from s2_megatron.ops.parts import prepare_placement
from s2_megatron.ops.recompute import LayerOutput, recompute_attention
from s2_megatron.patterns.checks import shown
from s2_megatron.patterns.ranges import Pattern

CUTS = ("sequence", "document")


class ContextParallel:
    """The context parallelism of one layer: the op over the ranks of a group.

    pattern: of this tensor-parallel rank's heads, with global offsets. group: the context-parallel process group.
    keep_received: save the received keys and values for the backward instead of receiving them again. cut: how packed
    batches were cut over the ranks, as one 'sequence' or each 'document' by itself; unpacked ones are always one
    sequence in zigzag.
    Raises ValueError for arguments of another type, and for a comm type that is unknown or does not suit the heads.
    """

    def __init__(
        self,
        pattern: Pattern,
        group,
        comm_type: str = "sparse",
        *,
        keep_received: bool = False,
        cut: str = "sequence",
    ):
        if not isinstance(pattern, Pattern):
            raise ValueError(
                f"pattern={shown(pattern)}; expected the pattern of this rank's heads; use make_range_pattern(...)"
            )
        if not (hasattr(group, "size") and hasattr(group, "rank")):
            raise ValueError(
                f"group={shown(group)}; expected a process group; use torch.distributed.new_group(...), or "
                "torch.distributed.group.WORLD after init_process_group"
            )
        if cut not in CUTS:
            raise ValueError(f"cut={shown(cut)}; expected one of {', '.join(CUTS)}; use {CUTS[0]}")
        if not isinstance(keep_received, bool):
            raise ValueError(f"keep_received={shown(keep_received)}; expected True or False; use one of them")
        self.pattern, self.group, self.keep_received, self.cut = pattern, group, keep_received, cut
        self.size, self.rank = group.size(), group.rank()
        check_comm_type(comm_type, pattern.num_kv_heads, self.size)
        self.comm_type = comm_type
        heads = pattern.tensor_parallel_slice(self.rank, self.size) if self.comm_type == "a2a" else pattern
        self._layout = build_layout(heads)
        self._prepared: dict = {}
        packable = comm_type == "sparse" and why_not(pattern) is None
        self._documents = DocumentPlans(pattern, group, cut) if packable else None

    def prepare(
        self, seq_length: int, device: torch.device, head_dim: int, dtype: torch.dtype, backend: str = "auto"
    ) -> None:
        """Makes what the calls of a length share, on their device and before the first of them: the plan, and what
        kernels read of it.

        head_dim, dtype, backend: of the calls; the larger head dim where value has another one. Raises ValueError for a
        length that cannot be cut, and as resolve_backend does.
        """
        if self.comm_type == "a2a":
            return
        state = self.state(seq_length, device)
        if self.comm_type == "sparse":
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
        softmax_offset: torch.Tensor | None = None,
        backend: str = "auto",
        deterministic: bool = False,
        output: LayerOutput | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's queries to the keys of all ranks; differentiable once.

        query [S/c, B, H, D], key and value [S/c, B, G, D], any strides; packed: [t/c, H, D] and [t/c, G, D], and the
        documents of all ranks' tokens together, which `sparse` reads on the host in every call (once for all with
        documents.keep_borders); another head dim of value travels with zeros up to the larger one.
        softmax_offset: [H]; its gradient is this rank's part, the sum over the ranks is the whole. output: of a layer
        that is recomputed, to launch no second forward. The other arguments as in s2_attention. Returns out, of query's
        shape (with value's head dim) and dtype. Raises ValueError as s2_attention, for lengths that cannot be cut, and
        for packed ones with comm type sparse and a pattern of more than windows and sinks.
        """
        call = make_call(
            query,
            key,
            value,
            self._layout,
            softmax_scale=softmax_scale,
            tensor_format="sbhd" if packed is None else "thd",
            packed=packed,
            backend=backend,
            deterministic=deterministic,
        )
        if key.shape[0] != query.shape[0]:
            raise ValueError(
                f"query has {query.shape[0]} rows and key {key.shape[0]}; context parallelism trains, it does not "
                "continue a prefix; use --context-parallel-size 1 for inference"
            )
        check_offset(softmax_offset, query, call.tensor_format)
        # What travels is memory, which a lazily negated tensor is the negative of.
        query, key, value = (tensor.resolve_neg() for tensor in (query, key, value))
        if differ(query, value):
            query, key, padded_value = padded(query, key, value)
            return self._attend(query, key, padded_value, softmax_offset, call, output)[..., : value.shape[-1]]
        return self._attend(query, key, value, softmax_offset, call, output)

    def _attend(self, query, key, value, softmax_offset, call: AttentionCall, output):
        packed = call.packed
        if self.comm_type == "sparse" or (packed is None and self.comm_type != "a2a"):
            return self._own_queries(query, key, value, softmax_offset, call, output)
        tokens = query.shape[0] * self.size
        if packed is not None and self.cut == "document":
            order = cut_order(packed.starts, tokens, self.size)
        else:
            order = sequence_order(tokens, self.size, query.device)
        if self.comm_type == "a2a":
            whole = RowsToHeads.apply(query, key, value, order, self.group)
            if softmax_offset is not None:  # of this rank's heads; the others' part of its gradient is zero
                softmax_offset = softmax_offset.chunk(self.size)[self.rank]
            return HeadsToRows.apply(recompute_attention(*whole, call, output, softmax_offset), order, self.group)
        if self.cut == "sequence":
            call = call._replace(packed=documents_of_rank(packed, self.rank, self.size, tokens))
        whole = GatherRows.apply(key, value, order, self.group)
        rows = order.argsort()[self.rank * len(query) : (self.rank + 1) * len(query)]
        # The packed op takes as many queries as keys: those of other ranks are zero, and their rows of the result are
        # not read.
        all_queries = query.new_zeros((tokens, *query.shape[1:])).index_copy(0, rows, query)
        return recompute_attention(all_queries, *whole, call, output, softmax_offset)[rows]

    def _own_queries(self, query, key, value, offset, call: AttentionCall, output):
        """This rank's queries and the keys that they need: sparse, or all_gather of one unpacked sequence."""
        function, state = self._way(query.shape[0] * self.size, query.device, call.packed)
        call = call._replace(layout=self._layout.to(query.device))
        known = None if output is None else output.take(query)
        out, lse = function.apply(query, key, value, offset, call, state, self.keep_received, known)
        if output is not None:
            output.store(out, lse)
        return out

    def _way(self, tokens: int, device: torch.device, packed: PackedSequence | None) -> tuple:
        """(the autograd function, what the calls of one length, or of one packed batch, share)"""
        if packed is None:
            function = SparseAttention if self.comm_type == "sparse" else GatheredAttention
            return function, self.state(tokens, device)
        if self._documents is None:
            raise ValueError(why_not(self.pattern))
        return DocumentAttention, self._documents.of(packed, tokens, device)

    def state(self, tokens: int, device: torch.device) -> SparseState | GatheredState:
        """What the calls of one length share; not for a2a. Raises ValueError for a length that cannot be cut."""
        if (tokens, device) not in self._prepared:
            with lasting():
                self._prepared[tokens, device] = self._make_state(tokens, device)
        return self._prepared[tokens, device]

    def _make_state(self, tokens: int, device: torch.device) -> SparseState | GatheredState:
        n_blocks = check_block_count(tokens, self.size, self.pattern.block_size)
        layout = self._layout.to(device)
        if self.comm_type == "all_gather":
            own = zigzag_blocks(self.rank, self.size, n_blocks)
            placement = Placement.make(own, n_blocks, device=device, pattern=self.pattern)
            return GatheredState(layout, self.group, placement, sequence_order(tokens, self.size, device))
        plan = make_plan(self.pattern, self.rank, self.size, n_blocks)
        return SparseState.make(layout, plan, self.group, device)
