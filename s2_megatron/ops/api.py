"""`s2_attention`: S2 block-sparse causal attention on strided tensors, with autograd, over a Triton and a PyTorch
backend.

S sequence, B batch, H query heads, G KV heads (H a multiple of G), D head dim, T packed tokens. Inside, tensors are
views [B, heads, rows, D].
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch

from s2_megatron.ops import reference
from s2_megatron.ops.autograd import register_attention
from s2_megatron.ops.call import FORMATS, AttentionCall, Backend, canonical_view
from s2_megatron.ops.checks import addressable, check_arguments, check_once, softmax_scale_of
from s2_megatron.ops.layout import Layout, PackedSequence, Placement, layout_for
from s2_megatron.ops.repeated import kind_of_call, remember
from s2_megatron.patterns.checks import shown
from s2_megatron.patterns.ranges import Pattern
from s2_megatron.printing import print_once

BACKENDS = ("auto", "gluon", "triton", "reference")
_resolved_on_cuda: set[str] = set()


def s2_attention(
    query,
    key,
    value,
    layout: Layout | Pattern,
    *,
    softmax_scale: float | None = None,
    tensor_format: str = "sbhd",
    packed: PackedSequence | None = None,
    placement: Placement | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
):
    """S2 block-sparse causal attention, differentiable (once) in query, key, value, and through LSE.

    query [S, B, H, D] (sbhd), [B, S, H, D] (bshd), [B, H, S, D] (bhsd) or [T, H, D] (thd, with `packed`); key and value
    likewise with G heads and any strides; fp16, bf16, fp32 (fp64 on the reference). A key longer than the query means
    that the query is its end (static inference). layout: a Layout, or the pattern itself, whose layout is then built at
    the first call and stays with it. placement: whole query blocks and key slots of a longer sequence (see Placement).
    softmax_scale: 1e-6 to 1e6, default D ** -0.5. deterministic: the backward is bitwise repeatable (the portable
    kernels and the reference always are), also under torch.use_deterministic_algorithms. backend: see resolve_backend.
    torch.compile, torch.export and modes see one operator, torch.ops.s2_megatron.attention; an exported program holds
    the pattern. torch.vmap works; torch.func.grad and forward-mode derivatives raise PyTorch's errors.
    Returns out, of query's shape and dtype; with return_lse (out, LSE), LSE [B, H, S] ([H, T] for thd), fp32, natural
    log. Raises ValueError for arguments of another type or out of range, and for tensors that do not fit each other,
    the layout or the backend. Only the reference checks the numbers in cu_seqlens, because reading them waits for the
    GPU; with the environment variable S2_CHECK_VALUES=1 all backends do.
    """
    if not isinstance(return_lse, bool):
        raise ValueError(f"return_lse={shown(return_lse)}; expected True or False; use one of them")
    call = make_call(
        query,
        key,
        value,
        layout,
        softmax_scale=softmax_scale,
        tensor_format=tensor_format,
        packed=packed,
        placement=placement,
        backend=backend,
        deterministic=deterministic,
    )
    out, lse = attend(query, key, value, call)
    if tensor_format == "thd":
        lse = lse[0]
    return (out, lse) if return_lse else out


def make_call(
    query,
    key,
    value,
    layout: Layout | Pattern,
    *,
    softmax_scale: float | None = None,
    tensor_format: str = "sbhd",
    packed: PackedSequence | None = None,
    placement: Placement | None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> AttentionCall:
    """The checked call that these arguments of s2_attention are, for `attend` and ops/recompute.py. Raises ValueError
    for arguments of another type or out of range."""
    check_arguments(query, key, value, layout, tensor_format, packed, placement, deterministic)
    backend = resolve_backend(backend, query.device.type)
    scale = softmax_scale_of(softmax_scale, query.shape[-1])
    if not isinstance(layout, Layout):
        layout = layout_for(layout)
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        deterministic = True
    return AttentionCall(layout, scale, tensor_format, packed, placement, backend, deterministic)


@torch.compiler.assume_constant_result  # looked up, checked and printed while a graph is traced, not in it
def resolve_backend(name: str, device_type: str) -> str:
    """'auto', 'gluon', 'triton' or 'reference' for a backend setting; printed once. 'auto' is the reference on a CPU;
    on a GPU it stays, and each call takes the Gluon kernels for Hopper where they compute it and the portable Triton
    kernels elsewhere (kernels/dispatch.py).

    Raises ValueError for an unknown name, when Triton is not installed on a GPU machine, and for 'gluon' or 'triton' on
    a CPU (except 'triton' under Triton's interpreter, TRITON_INTERPRET=1).
    """
    if device_type == "cuda" and isinstance(name, str) and name in _resolved_on_cuda:
        return name
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"backend={shown(name)}; expected one of {', '.join(BACKENDS)}; use auto")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    chosen = "reference" if name == "auto" and device_type != "cuda" else name
    if chosen != "reference":
        if importlib.util.find_spec("triton") is None:
            raise ValueError(
                f"backend={name} needs Triton on {device_type}, and it is not installed; pip install triton, or set "
                "backend=reference to accept the slow PyTorch version"
            )
        if device_type != "cuda" and not (interpreted and chosen == "triton"):
            raise ValueError(
                f"backend={name} on device {device_type}: the kernels need a GPU; use backend=reference or auto"
            )
    if device_type == "cuda":
        _resolved_on_cuda.add(name)  # it is `chosen`; to look again takes as long as a launch
    print_once(f"S2 attention backend: {chosen} ({'set' if name != 'auto' else 'chosen'} for {device_type})")
    return chosen


def _implementation(backend: str) -> Backend:
    if backend == "reference":
        return reference
    from s2_megatron.kernels import dispatch

    return dispatch


def prepare_placement(
    layout: Layout, placement: Placement, rows: int, head_dim: int, dtype: torch.dtype, backend: str
) -> None:
    """Makes what the kernels will read of a placement, lest the first call waits for it. rows: of the queries. backend:
    a resolved one."""
    call = AttentionCall(layout, softmax_scale_of(None, head_dim), placement=placement, backend=backend)
    _implementation(backend).prepare(call, rows, head_dim, dtype)


def _leaves_rows(call) -> bool:
    """Whether the implementation leaves rows alone: the reference those outside of documents, and all of them empty
    slots."""
    return (call.packed is not None and call.backend == "reference") or (
        call.placement is not None and call.placement.key_slot is not None
    )


def _empty_like(tensor, call):
    """An output for a tensor's shape, contiguous in its format; zeros where the kernels may leave rows alone."""
    make = torch.zeros_like if _leaves_rows(call) else torch.empty_like
    return make(tensor, memory_format=torch.contiguous_format)


def _empty_for_queries(query, call):
    """The same for query's shape: of placed queries every row is written."""
    leaves_rows = call.packed is not None and call.backend == "reference"
    make = torch.zeros_like if leaves_rows else torch.empty_like
    return make(query, memory_format=torch.contiguous_format)


def _views(tensors, form):
    """[B, heads, rows, D] views of (key, value) or None."""
    return None if tensors is None else [canonical_view(tensor, form) for tensor in tensors]


def joins_keys(query, key, value, more, call: AttentionCall) -> bool:
    """Whether attention_forward and attention_backward_dq take kv_heads and more: the Gluon kernels do."""
    q, k, v, *further = _views((query, key, value, *more), call.tensor_format)
    return _implementation(call.backend).joins_keys(q, k, v, further, call)


def empty_lse(query, tensor_format: str) -> torch.Tensor:
    """An LSE for query: [B, H, rows], fp32 (fp64 for fp64)."""
    shape = canonical_view(query, tensor_format).shape[:3]
    return torch.empty(shape, dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)


def attention_forward(query, key, value, call: AttentionCall, initial=None, kv_heads=None, more=None, into=None):
    """(out, LSE) without autograd. initial: (out, LSE) of the same queries over earlier keys, continued by this call.

    out has query's shape and dtype; LSE is [B, H, rows], fp32 (fp64 for fp64), natural log, -inf for a query without a
    key. into: (out, LSE) to write instead of new ones: out of any type (fp32 for a part that is continued, so that it
    is rounded once) and strides, LSE perhaps the initial one.
    Where joins_keys says so: kv_heads, (first, end) of those whose query heads are computed, the others' rows are left
    alone; more, (key, value) of the placement's slots from own_slots on, like key, whose heads share memory. For
    kv_heads (0, end) the out of `into` and of `initial` needs no more heads than those.
    """
    return _forward(query, key, value, call, initial, kv_heads, more, into)[:2]


def _forward(query, key, value, call: AttentionCall, initial=None, kv_heads=None, more=None, into=None):
    """(out, LSE, how to write them again for the same kind of call or None)."""
    q, k, v = check_once(query, key, value, call, more)
    form, again = call.tensor_format, None
    out, lse = (_empty_for_queries(query, call), empty_lse(query, form)) if into is None else into
    if call.packed is not None and call.backend == "reference":
        lse.fill_(float("-inf"))
    if initial is not None:
        initial = (canonical_view(initial[0], form), initial[1])
    if q.numel():
        again = _implementation(call.backend).forward(
            q,
            k,
            v,
            canonical_view(out, form),
            lse,
            call,
            initial,
            kv_heads,
            _views(more, form),
        )
    return out, lse, again


def _gradient_view(grad_out, call: AttentionCall):
    """canonical_view of a gradient that autograd made, with strides that the kernels can address."""
    view = canonical_view(grad_out, call.tensor_format)
    if call.backend == "reference" or addressable(view):
        return view
    print_once(
        f"S2 attention copies the gradient of its output, whose strides {grad_out.stride()} do not fit into 32 bits "
        "inside a tile"
    )
    return view.contiguous()


def attention_backward(grad_out, grad_lse, query, key, value, out, lse, call: AttentionCall):
    """(grad_query, grad_key, grad_value) from the final out and LSE. grad_lse [B, H, rows] or None."""
    return _backward(grad_out, grad_lse, query, key, value, out, lse, call)[0]


def _backward(grad_out, grad_lse, query, key, value, out, lse, call: AttentionCall):
    """(the three gradients, how to write them again for the same kind of call or None)."""
    again = None
    form = call.tensor_format
    grads = [_empty_like(tensor, call) for tensor in (query, key, value)]
    if query.numel():
        views = [canonical_view(tensor, form) for tensor in (query, key, value, out)]
        gradient = _gradient_view(grad_out, call)
        again = _implementation(call.backend).backward(
            gradient,
            grad_lse,
            *views,
            lse,
            *(canonical_view(g, form) for g in grads),
            call,
        )
        if gradient.data_ptr() != grad_out.data_ptr():  # a copy, of other strides
            again = None
    return grads, again


# The backward in parts, for context parallelism: between them it sends and receives.
def attention_delta(grad_out, out, lse, call: AttentionCall):
    """rowsum(out * grad_out) [B, H, rows], fp32 (fp64 for fp64), contiguous: what both other parts read."""
    row_sums = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    if out.numel():
        _implementation(call.backend).delta(
            _gradient_view(grad_out, call), None, canonical_view(out, call.tensor_format), lse, row_sums
        )
    return row_sums


def attention_backward_dkdv(
    grad_out, query, key, value, lse, row_sums, grad_key, grad_value, call: AttentionCall, returned=None
) -> None:
    """Writes the part of dK and dV that these queries give to these keys. Every row of a slot that the placement names
    is written, no other.

    lse: the final one, over all keys. row_sums: attention_delta's. grad_key, grad_value: like key, any dtype and
    strides; heads may share memory (stride 0) where their slots differ. returned: gradients of the same keys that other
    queries gave, added in fp32 before the result is rounded: (buffer [slots, block, 2 (K, V), B, D], starts int32
    [blocks * G + 1], entries int32), of which the slots of block b of KV head g are entries[starts[b * G + g]] and
    following, added in that order; for key in whole blocks, heads with memory of their own. Where the kernels compute
    blocks in parts, block stands for a part.
    """
    views = [
        _gradient_view(grad_out, call),
        *(canonical_view(tensor, call.tensor_format) for tensor in (query, key, value)),
    ]
    grads = [canonical_view(tensor, call.tensor_format) for tensor in (grad_key, grad_value)]
    if query.numel():
        _implementation(call.backend).backward_dkdv(*views, lse, row_sums, *grads, call, returned)


def attention_backward_dq(
    grad_out, query, key, value, lse, row_sums, call: AttentionCall, initial=None, kv_heads=None, more=None, into=None
):
    """dQ over these keys. initial: dQ of the same queries over other keys (fp32, fp64 for fp64), added to it. kv_heads,
    more, into (dQ, of any type): as in attention_forward."""
    grad_query = _empty_for_queries(query, call) if into is None else into
    form = call.tensor_format
    views = [_gradient_view(grad_out, call), *(canonical_view(tensor, form) for tensor in (query, key, value))]
    if query.numel():
        _implementation(call.backend).backward_dq(
            *views,
            lse,
            row_sums,
            canonical_view(grad_query, form),
            call,
            None if initial is None else canonical_view(initial, form),
            kv_heads,
            _views(more, form),
        )
    return grad_query


@lru_cache(maxsize=256)
def _placement_of_end(first_block: int, n_blocks: int, device: torch.device) -> Placement:
    """The last query blocks of a sequence, from first_block on; cached, for every layer of every decoding step of a
    block asks for the same."""
    return Placement.make(range(first_block, n_blocks), n_blocks, device=device)


class _Ending:
    """A query that is the end of a longer sequence (static inference), padded to whole blocks. rows: the dimension of
    its rows."""

    def __init__(self, query, key, call: AttentionCall):
        self.rows = FORMATS[call.tensor_format][2]
        self.length, block = query.shape[self.rows], call.layout.block_size
        start = key.shape[self.rows] - self.length
        n_blocks = -(-key.shape[self.rows] // block)
        self.before, self.padded_length = start % block, (n_blocks - start // block) * block
        self.call = call._replace(placement=_placement_of_end(start // block, n_blocks, query.device))

    def pad(self, tensor, rows: int):
        shape = list(tensor.shape)
        shape[rows] = self.padded_length
        padded = tensor.new_zeros(shape)
        padded.narrow(rows, self.before, self.length).copy_(tensor)
        return padded

    def cut(self, tensor, rows: int):
        return tensor.narrow(rows, self.before, self.length).clone(memory_format=torch.contiguous_format)


def _is_ending(query, key, call) -> bool:
    rows = FORMATS[call.tensor_format][2]
    return call.placement is None and call.packed is None and query.shape[rows] < key.shape[rows]


def _op_forward(query, key, value, call):
    known, kind = call.layout.known_forwards, kind_of_call(call, query, key, value)
    again, lse_shape = known.get(kind, (None, None))  # one look: another thread may empty the table
    if again is not None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=query.device)
        if again(query, key, value, out, lse):
            return out, lse
    call = call.on_device(query.device)
    if not _is_ending(query, key, call):
        out, lse, again = _forward(query, key, value, call)
        remember(known, kind, again and (again, lse.shape))
        return out, lse
    ending = _Ending(query, key, call)
    out, lse = attention_forward(ending.pad(query, ending.rows), key, value, ending.call)
    return ending.cut(out, ending.rows), ending.cut(lse, 2)


def _op_backward(grad_out, grad_lse, query, key, value, out, lse, call):
    known, tensors = call.layout.known_backwards, (grad_out, grad_lse, query, key, value, out, lse)
    kind = kind_of_call(call, *tensors)
    again = known.get(kind)
    if again is not None:
        grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
        if again(*tensors, *grads):
            return grads
    call = call.on_device(query.device)
    if not _is_ending(query, key, call):
        grads, again = _backward(*tensors, call)
        remember(known, kind, again)
        return grads
    ending = _Ending(query, key, call)
    grad_out, query, out = (ending.pad(tensor, ending.rows) for tensor in (grad_out, query, out))
    grad_lse, lse = None if grad_lse is None else ending.pad(grad_lse, 2), ending.pad(lse, 2)
    grad_query, grad_key, grad_value = attention_backward(grad_out, grad_lse, query, key, value, out, lse, ending.call)
    return ending.cut(grad_query, ending.rows), grad_key, grad_value


# attend(query, key, value, call of make_call) -> (out, LSE [B, H, rows]), with autograd.
attend = register_attention(_op_forward, _op_backward, resolve_backend)
