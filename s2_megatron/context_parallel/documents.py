"""Comm type `sparse` for packed documents, with autograd: every rank receives the halos of its windows and the sinks,
planned for each batch from its documents (document_plan.py), and computes documents of its own.

The halo's queries are computed and thrown away: zeros, whose gradients are zero. They cost half a window's pairs for
each piece of a document.

t packed tokens of c ranks, H query heads, G KV heads, D head dim; places: see document_plan.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from s2_megatron.context_parallel.document_plan import DocumentPlan, plan_documents, reaches
from s2_megatron.context_parallel.exchange import Exchange, Pending
from s2_megatron.ops.autograd import first_derivative
from s2_megatron.ops.lasting import lasting
from s2_megatron.ops.layout import PackedSequence
from s2_megatron.ops.offset import add_offset_, offset_gradient
from s2_megatron.ops.parts import attention_backward_dkdv, attention_backward_dq, attention_delta, attention_forward
from s2_megatron.patterns.ranges import Pattern

MOST_BATCHES = 32  # whose plans a layer keeps: of the microbatches that are on their way
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # borders: their values


def keep_borders(borders: torch.Tensor) -> None:
    """Reads the numbers of cu_seqlens, for which it waits for the GPU; read_borders then has them as long as the tensor
    lives. For tensors that nothing writes to again: not every write to one can be seen."""
    with lasting():
        _kept[borders] = borders.detach().cpu().numpy().astype(np.int64)


def read_borders(borders: torch.Tensor) -> np.ndarray:
    """The numbers of cu_seqlens, int64. Waits for the GPU, but for those that keep_borders has read."""
    known = _kept.get(borders)
    if known is not None:
        return known
    with lasting():
        return borders.detach().cpu().numpy().astype(np.int64)


class DocumentPlans:
    """The plans of a layer's latest batches. pattern: windows and sinks. cut: see ContextParallel."""

    def __init__(self, pattern: Pattern, group, cut: str):
        self._reaches, self._group, self._cut = reaches(pattern), group, cut
        self._known: dict[tuple, DocumentState] = {}

    def of(self, packed: PackedSequence, tokens: int, device: torch.device) -> DocumentState:
        """tokens: of all ranks. Raises ValueError as plan_documents."""
        borders = read_borders(packed.starts)
        lengths = np.diff(borders if packed.cu_seqlens_padded is None else read_borders(packed.cu_seqlens))
        key = tokens, device, borders.tobytes(), lengths.tobytes()
        if key not in self._known:
            cut_at = borders if self._cut == "document" else np.array([0, tokens])
            where = tokens, self._group.rank(), self._group.size()
            plan = plan_documents(self._reaches, borders[:-1], lengths, cut_at, *where)
            while len(self._known) >= MOST_BATCHES:
                del self._known[next(iter(self._known))]
            with lasting():
                self._known[key] = DocumentState(plan, self._group, device)
        return self._known[key]


class DocumentState(Exchange):
    """A DocumentPlan on a device: what the layers that share it do for one batch."""

    def __init__(self, plan: DocumentPlan, group, device: torch.device):
        super().__init__(plan, group)
        names = "borders", "place", "copies", "copied", "receive_places", "receive_heads", "send_rows", "send_heads"
        arrays = [getattr(plan, name) for name in names]
        whole = torch.from_numpy(np.concatenate(arrays))
        if device.type == "cuda":
            whole = whole.pin_memory()  # or the copy would wait for the GPU
        whole = whole.to(device, non_blocking=True).split([len(array) for array in arrays])
        borders, self.place, self.copies, self.copied, *slots = whole
        self.received_slots, self.sent_slots = tuple(slots[:2]), tuple(slots[2:])  # (places or rows, KV heads)
        self.packed = PackedSequence(borders.to(torch.int32), plan.n_places)

    def placed(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows [t/c, ...] at their places, zeros elsewhere."""
        return rows.new_zeros((self.plan.n_places, *rows.shape[1:])).index_copy_(0, self.place, rows)

    def placed_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """The same of numbers [1, H, t/c]."""
        return numbers.new_zeros((*numbers.shape[:2], self.plan.n_places)).index_copy_(2, self.place, numbers)

    def start(self, key: torch.Tensor, value: torch.Tensor) -> Pending:
        """Sends what other ranks need of key and value [t/c, G, D]; the result is the received slots [slots, 2, D]."""
        sent = key.new_empty((len(self.plan.send_rows), 2, key.shape[2]))

        def pack():
            for part, tensor in enumerate((key, value)):
                sent[:, part] = tensor[self.sent_slots]

        return self._travel(self.plan.counts, sent, (key, value), pack)

    def with_received(self, key, value, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [places, G, D] of this rank's documents."""
        both = self.placed(key), self.placed(value)
        for part, tensor in enumerate(both):
            tensor[self.received_slots] = buffer[:, part]
            tensor[self.copies] = tensor[self.copied]
        return both

    def received_gradients(self, gradients) -> torch.Tensor:
        """Of the received slots, like their buffer, from dK and dV [places, G, D]; adds those of copies first."""
        for tensor in gradients:
            tensor[self.copied] += tensor[self.copies]
        return torch.stack([tensor[self.received_slots] for tensor in gradients], dim=1)

    def own_gradients(self, gradients, returned: torch.Tensor) -> list[torch.Tensor]:
        """dK and dV [t/c, G, D] with what came back, added in fp32 (or wider) and in the order of ranks."""
        counts, totals = self.plan.counts[self.plan.rank].tolist(), []
        for part, tensor in enumerate(gradients):
            total = tensor[self.place].to(torch.promote_types(tensor.dtype, torch.float32))
            # A token goes to a rank once: within a rank's share no slot stands twice.
            for rows, heads, came in zip(*(of.split(counts) for of in (*self.sent_slots, returned[:, part]))):
                total[rows, heads] += came
            totals.append(total.to(tensor.dtype))
        return totals


class DocumentAttention(torch.autograd.Function):
    """Arguments and results as of SparseAttention, of thd tensors. call: its documents are those of the whole row.
    state: a DocumentState."""

    @staticmethod
    def forward(ctx, query, key, value, offset, call, state, keep_received, known):
        ctx.call, ctx.state, received = call._replace(packed=state.packed), state, []
        if known is None:
            pending = state.start(key, value)
            placed = state.placed(query)
            buffer = pending.result()
            out, lse = attention_forward(placed, *state.with_received(key, value, buffer), ctx.call)
            known = out[state.place], lse[:, :, state.place]
            received = [buffer] if keep_received else []
            if offset is not None:
                add_offset_(*known, offset, call.tensor_format)
        out, lse = known
        ctx.save_for_backward(query, key, value, out, lse, offset, *received)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_derivative
    def backward(ctx, grad_out, _):
        query, key, value, out, lse, offset, *received = ctx.saved_tensors
        call, state = ctx.call, ctx.state
        pending = None if received else state.start(key, value)
        row_sums = attention_delta(grad_out, out, lse, call)
        grad, placed = state.placed(grad_out), state.placed(query)
        numbers = state.placed_numbers(lse), state.placed_numbers(row_sums)
        both = state.with_received(key, value, received[0] if received else pending.result())
        gradients = [torch.empty_like(tensor) for tensor in both]
        attention_backward_dkdv(grad, placed, *both, *numbers, *gradients, call)
        # The gradients travel beside dQ.
        returning = state.start_return(state.received_gradients(gradients))
        grad_query = attention_backward_dq(grad, placed, *both, *numbers, call)[state.place]
        grad_offset = offset_gradient(row_sums, lse, offset) if ctx.needs_input_grad[3] else None
        return grad_query, *state.own_gradients(gradients, returning.result()), grad_offset, None, None, None, None
