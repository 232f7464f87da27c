"""Placed blocks: what a rank of context parallelism computes with keys of its own and of other ranks, checked against
one call over the whole sequence."""

import torch

from s2_megatron.context_parallel.exchange import BlockExchange
from s2_megatron.context_parallel.plan import make_plan
from s2_megatron.context_parallel.sparse import SparseState, compute, gradients, place
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import build_layout
from s2_megatron.ops.parts import attention_backward_dkdv, attention_delta
from s2_megatron.testing.oracle import eager, make_inputs, random_mask, run_op, token_mask
from tests.ops.test_attention import pattern_of

PAPER = ((4, 1), (None, 4))
RANGES = {
    "paper": PAPER,
    "paper-odd": ((3, 1), (None, 5)),
    "window": ((5, 1),),
    "block-local": ((1, 1), (None, 3)),
    "several": ((2, 1), (6, 2), (None, 4)),
    "several-close": ((2, 1), (3, 2), (None, 4)),
    "window-of-strides": ((2, 1), (9, 3)),
    "gap": ((2, 1), (None, 8)),
    "same-strides": ((2, 1), (5, 1), (None, 2)),
    "dense": ((None, 1),),
}

# (ranges, window, sink tokens)
TOKENS = {
    "tokens": (((None, 4),), 150, 70),
    "tokens of 128": (((None, 2),), 290, 150),
    "short window": ((), 33, 3),
    "long window": ((), [130, 400, 700, 65], 0),
}


class Handed:
    """A BlockExchange, and what is pending. blocks: of other ranks, NaN until they are there. returned_gradients: what
    goes back."""

    def __init__(self, plan, blocks):
        self.plan, self.blocks, self.received, self.returned_gradients = plan, blocks, None, []

    def start(self, key, value, backend):
        self.received = torch.full_like(self.blocks, float("nan"))
        return self

    def result(self):
        return self.received.copy_(self.blocks)

    def returned(self, *_):
        """Nothing comes back."""

    def start_return(self, gradients):
        self.returned_gradients.append(gradients)
        return self


class Chosen(SparseState):
    """KV heads in two passes: one, all, none and two, by rank."""

    def two_pass_heads(self, *shape):
        return (1, self.layout.num_kv_heads, 0, 2)[self.exchange.plan.rank % 4]  # there are 2 KV heads or more


def placed_results(inputs, pattern, size, n_blocks, rank):
    """One rank of context parallelism: its own keys, and the others' in slots of one KV head each. Returns what it
    adds: (rows, out, LSE, dQ), and dK, dV of all blocks."""
    query, key, value, grad = inputs
    device = query.device
    plan, layout, scale = make_plan(pattern, rank, size, n_blocks), build_layout(pattern, device), 0.2
    own = torch.tensor(plan.query_blocks, device=device)
    rows = (own[:, None] * plan.block_size + torch.arange(plan.block_size, device=device)).reshape(-1)
    where = [
        (group, block, slot)
        for group, row in enumerate(plan.remote_slot)
        for block, slot in enumerate(row)
        if slot >= 0
    ]
    buffer = torch.full(
        (len(where), plan.block_size, 2, *key.shape[1:2], key.shape[3]), float("nan"), device=device, dtype=key.dtype
    )
    for group, block, slot in where:
        for part, tensor in enumerate((key, value)):
            buffer[slot, :, part] = tensor.unflatten(0, (-1, plan.block_size))[block, :, :, group]
    q, do, *kv = (tensor[rows] for tensor in (query, grad, key, value))
    call = AttentionCall(layout, scale, "sbhd", None, None, "gluon", True)
    state = Chosen(layout, Handed(plan, buffer), 1.0, *place(plan, pattern, device), {})
    out, lse = compute(q, *kv, call, state)
    stored = [buffer] if rank == 3 else []  # as with --s2-cp-keep-received: dQ of all heads in one pass
    dq, *rounded, _ = gradients(do, q, *kv, out, lse, *stored, call=call, state=state)
    (returned,) = state.exchange.returned_gradients
    own = call._replace(placement=state.own)
    sums = attention_delta(do, out, lse, own)
    grads = [torch.zeros(tensor.shape, device=device) for tensor in (key, value)]
    wide = [torch.full(tensor.shape, float("nan"), device=device) for tensor in kv]
    attention_backward_dkdv(do, q, *kv, lse, sums, *wide, own)
    check_returned(plan, wide, (do, q, *kv, lse, sums), own)
    for number, grad_part in enumerate(wide):
        assert torch.equal(grad_part.to(key.dtype), rounded[number])
        grads[number][rows] += grad_part
        for group, block, slot in where:
            grads[number].unflatten(0, (-1, plan.block_size))[block, :, :, group] += returned[slot, :, number]
    return rows, out, lse, dq, grads


def check_returned(plan, own, tensors, call):
    """dK and dV of a rank's own keys with what other ranks send back: the fp32 sums `own` plus that in the order of
    ranks, rounded once."""
    key, exchange = tensors[2], BlockExchange(plan, None, own[0].device)
    slots = torch.randn(len(plan.send_heads), plan.block_size, 2, *key.shape[1:2], key.shape[3], device=key.device).to(
        key.dtype
    )
    grads = [torch.full_like(key, float("nan")) for _ in own]
    attention_backward_dkdv(*tensors, *grads, call, exchange.returned(slots))
    for part, (grad, total) in enumerate(zip(grads, own)):
        total = total.clone()
        for slot, (head, block) in enumerate(zip(plan.send_heads, plan.send_blocks)):
            total.unflatten(0, (-1, plan.block_size))[block, :, :, head] += slots[slot, :, part].float()
        assert torch.equal(grad, total.to(grad.dtype)), part


def check_placed_blocks(dim, kind, size, n_blocks, device, dtype):
    """Halves of a tile that lie apart (odd chunks), absent keys, slots, a softmax that goes on: no worse than twice the
    error of one call."""
    block = 128 if kind.endswith("of 128") else 64
    if kind.startswith("mask"):
        pattern = random_mask(block, 4, 2, 2, n_blocks)
    elif kind in TOKENS:
        ranges, window, sink = TOKENS[kind]
        pattern = pattern_of(ranges, block, 8, 4, window=window, sink_tokens=sink)
    elif kind == "dense heads":
        pattern = pattern_of(PAPER, 64, 8, 4, dense_heads=[1])
    else:
        pattern = pattern_of(
            {"several": RANGES["several"], "uneven": ((2, 1), (5, 3), (None, 4))}.get(kind, PAPER),
            block,
            8,
            4,
            "query" if kind == "query" else "kv",
        )
    inputs, _ = make_inputs(pattern, n_blocks * block, dim, dtype, device, 2, form="sbhd")
    length, nothing = n_blocks * block, torch.zeros(2, pattern.num_heads, n_blocks * block, device=device)
    views = [tensor.permute(1, 2, 0, 3) for tensor in inputs]
    truth = eager(
        *(tensor.double() for tensor in views[:3]),
        token_mask(pattern, length, device),
        0.2,
        views[3].double(),
        nothing.double(),
    )
    one_call = run_op(inputs, nothing, pattern, "sbhd", 0.2, backend="gluon", deterministic=True)
    mine = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in one_call]
    for rank in range(size):
        rows, out, lse, dq, (dk, dv) = placed_results(inputs, pattern, size, n_blocks, rank)
        for index, tensor in ((0, out.permute(1, 2, 0, 3)), (1, lse), (2, dq.permute(1, 2, 0, 3))):
            mine[index][:, :, rows] += tensor.double()
        for index, tensor in ((3, dk), (4, dv)):
            mine[index] += tensor.permute(1, 2, 0, 3).double()
    for name, got, whole, expected in zip(one_call._fields, mine, one_call, truth):
        error, allowed = (got - expected).norm(), 2 * (whole.double() - expected).norm()
        assert error <= allowed, f"{name}: {error / expected.norm():.2e} > {allowed / expected.norm():.2e}"
