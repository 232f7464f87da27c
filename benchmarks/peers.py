"""The peers that the benchmark knows. Each computes the case's window and stride in tokens at its smallest block, or
dense causal attention.

Dense: FlashAttention-2 and cuDNN through torch's SDPA, FlashAttention-4 (package flash-attn-4). Sparse: FlexAttention
and FlashAttention-4's block-sparse mode at blocks of 128 (smaller ones have no backward on Hopper), FlashAttention-4's
sliding window, and the S2 paper's kernels (package dkernel) at the case's own block.

One block of 128 where ours has one of 64 is twice the pairs along a stripe. The entries "... equal pairs" therefore
compute the same window with the same stride in blocks, hence stripes twice as far apart: not the same attention, but
the fastest that the peer has to offer.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import block_lists, coarsen, equal_pairs
from benchmarks.entries import LeftOut, Runner, entry
from benchmarks.timing import milliseconds
from s2_megatron.patterns.ranges import RangePattern

PEER_BLOCK = 128
LARGEST_LISTS = 2**28  # entries; a peer's [H, N, N] index tables beyond that are not worth their memory
# FlexAttention chooses its tiles by a table of its own; these are tried beside it, and the fastest is measured.
FLEX_OPTIONS = (
    {},
    dict(fwd_BLOCK_M=128, fwd_BLOCK_N=128, fwd_num_warps=8, fwd_num_stages=2,
         bwd_BLOCK_M1=64, bwd_BLOCK_N1=128, bwd_BLOCK_M2=128, bwd_BLOCK_N2=64, bwd_num_warps=8, bwd_num_stages=2),
    dict(fwd_BLOCK_M=64, fwd_BLOCK_N=64, fwd_num_warps=4, fwd_num_stages=3,
         bwd_BLOCK_M1=64, bwd_BLOCK_N1=64, bwd_BLOCK_M2=64, bwd_BLOCK_N2=64, bwd_num_warps=4, bwd_num_stages=3),
)  # fmt: skip
_flex_choice: dict[tuple, dict] = {}


def _dense(case):
    return RangePattern.dense(case.pattern.block_size, case.heads, case.kv_heads)


def _sparse_pattern(case, equal: bool):
    if case.documents is not None:
        raise LeftOut("has no block-sparse backward for packed documents")
    if equal and (case.pattern.block_size >= PEER_BLOCK or not _has_stripes(case.pattern)):
        raise LeftOut("only for ranges with strides at blocks smaller than its own")
    pattern = equal_pairs(case.pattern, PEER_BLOCK) if equal else coarsen(case.pattern, PEER_BLOCK, case.length)
    if case.heads * (-(-case.length // pattern.block_size)) ** 2 > LARGEST_LISTS:
        raise LeftOut(f"its index tables for {case.length} tokens are too large")
    return pattern


def _has_stripes(pattern):
    return any(stride > 1 for head in getattr(pattern, "heads", ()) for _, stride in head.ranges)


def _sdpa(case, tensors, backend):
    if case.documents is not None:
        raise LeftOut("takes no packed documents")
    inputs, grad = tensors.contiguous("bhsd")
    grouped = case.heads != case.kv_heads

    def forward():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=grouped)

    return Runner(forward, inputs, grad, "bhsd", case.dense_pairs, _dense(case))


@entry("FA-2 dense")
def flash_attention_2(case, tensors):
    if case.documents is None:
        return _sdpa(case, tensors, SDPBackend.FLASH_ATTENTION)
    from torch.nn.attention.varlen import varlen_attn

    if case.heads != case.kv_heads:
        raise LeftOut("torch's varlen_attn takes no grouped KV heads")
    inputs, grad = tensors.contiguous("thd")
    edges, longest = tensors.packed.cu_seqlens, tensors.packed.max_seqlen

    def forward():
        return varlen_attn(*inputs, edges, edges, longest, longest, window_size=(-1, 0))

    return Runner(forward, inputs, grad, "thd", case.dense_pairs, _dense(case))


@entry("cuDNN dense")
def cudnn(case, tensors):
    return _sdpa(case, tensors, SDPBackend.CUDNN_ATTENTION)


def _first(result):
    return result[0] if isinstance(result, tuple) else result


@entry("FA-4 dense")
def flash_attention_4(case, tensors):
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if case.documents is None:
        inputs, grad = tensors.contiguous("bshd")
        return Runner(
            lambda: _first(flash_attn_func(*inputs, causal=True)), inputs, grad, "bshd", case.dense_pairs, _dense(case)
        )
    inputs, grad = tensors.contiguous("thd")
    edges, longest = tensors.packed.cu_seqlens, tensors.packed.max_seqlen

    def forward():
        return _first(
            flash_attn_varlen_func(
                *inputs, cu_seqlens_q=edges, cu_seqlens_k=edges, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
            )
        )

    return Runner(forward, inputs, grad, "thd", case.dense_pairs, _dense(case))


def window_tokens(pattern) -> int | None:
    """The window of a pattern that is nothing but a sliding window, in tokens."""
    kinds = {head.canonical for head in getattr(pattern, "heads", ())}
    ranges, _, window, sink, _ = kinds.pop() if len(kinds) == 1 else ((), 0, None, 0, None)
    if window is not None or sink:
        return None if ranges or sink else window
    return ranges[0][0] * pattern.block_size if len(ranges) == 1 and ranges[0][0] is not None else None


@entry("FA-4 window")
def flash_attention_4_window(case, tensors):
    window = window_tokens(case.pattern)
    if window is None:
        raise LeftOut("the pattern is no sliding window")
    from flash_attn.cute import flash_attn_func

    if case.documents is not None:
        raise LeftOut("not set up for packed documents")
    inputs, grad = tensors.contiguous("bshd")
    short = min(window, case.length)
    pairs = case.heads * case.batch * (short * (short + 1) // 2 + (case.length - short) * window)

    def forward():
        return _first(flash_attn_func(*inputs, causal=True, window_size=(window - 1, 0)))

    return Runner(forward, inputs, grad, "bshd", pairs, None, note=f"token window {window}")


def _index_tensors(pattern, case, device):
    """(below, above): (counts [1, H, n], indices [1, H, n, most]) int32 of full blocks by query block, and by key
    block."""
    counts, blocks = block_lists(pattern, case.length)
    n = counts.shape[1]
    below = torch.from_numpy(counts)[None].to(device), torch.from_numpy(blocks)[None].to(device)
    mask = torch.zeros(counts.shape[0], n, n, dtype=torch.bool, device=device)
    valid = torch.arange(blocks.shape[2], device=device) < below[0][0, :, :, None]
    head, row, place = valid.nonzero(as_tuple=True)
    mask[head, row, below[1][0, head, row, place].long()] = True
    columns = mask.transpose(1, 2)
    column_counts = columns.sum(-1, dtype=torch.int32)
    most = max(1, int(column_counts.max()))
    ordered = columns.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most].to(torch.int32)
    return below, (column_counts[None].contiguous(), ordered[None].contiguous())


def _own_blocks(case, n, device):
    """(counts, indices) of the diagonal blocks, which are masked by token."""
    ones = torch.ones(1, case.heads, n, dtype=torch.int32, device=device)
    diagonal = torch.arange(n, dtype=torch.int32, device=device)[None, None, :, None].expand(1, case.heads, n, 1)
    return ones, diagonal.contiguous()


@functools.cache
def _cute_causal():
    import cutlass.cute as cute

    @cute.jit
    def causal(batch, head, query, key, seqlen_info, aux_tensors):
        return key <= query

    return causal


@entry("FA-4 block-sparse")
def flash_attention_4_sparse(case, tensors, equal=False):
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    pattern = _sparse_pattern(case, equal)
    below, above = _index_tensors(pattern, case, tensors.device)
    ones, diagonal = _own_blocks(case, below[0].shape[2], tensors.device)
    block = (pattern.block_size, pattern.block_size)
    forward_lists, backward_lists = (
        BlockSparseTensorsTorch(
            mask_block_cnt=ones,
            mask_block_idx=diagonal,
            full_block_cnt=full[0],
            full_block_idx=full[1],
            block_size=block,
        )
        for full in (below, above)
    )
    inputs, grad = tensors.contiguous("bshd")
    causal = _cute_causal()

    def forward():
        return _first(
            flash_attn_func(
                *inputs, mask_mod=causal, block_sparse_tensors=forward_lists, block_sparse_tensors_bwd=backward_lists
            )
        )

    return Runner(forward, inputs, grad, "bshd", case.pairs(pattern), pattern)


def _causal(batch, head, query, key):
    return query >= key


@entry("FlexAttention")
def flex(case, tensors, equal=False):
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    pattern = _sparse_pattern(case, equal)
    (counts, blocks), _ = _index_tensors(pattern, case, tensors.device)
    n = counts.shape[2]
    ones, diagonal = _own_blocks(case, n, tensors.device)
    # Its tables are square: the number of columns says how many key blocks there are.
    padded = [torch.nn.functional.pad(table, (0, n - table.shape[3])) for table in (diagonal, blocks)]
    lengths = (case.length, case.length)
    mask = BlockMask.from_kv_blocks(ones, padded[0], counts, padded[1], pattern.block_size, _causal, lengths)
    inputs, grad = tensors.contiguous("bhsd")
    # Every shape is compiled for itself; after eight of them torch would run it eagerly, which ignores the block lists.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    compiled = torch.compile(flex_attention, dynamic=False)

    def runner(options):
        def forward():
            return compiled(
                *inputs,
                block_mask=mask,
                enable_gqa=case.heads != case.kv_heads,
                kernel_options={"ROWS_GUARANTEED_SAFE": True, **options},
            )

        return Runner(
            forward, inputs, grad, "bhsd", case.pairs(pattern), pattern, note=f"options {options or 'its own'}"
        )

    key = (case.head_dim, case.dtype)
    if key not in _flex_choice:
        times = [(_flex_time(runner(options)), index) for index, options in enumerate(FLEX_OPTIONS)]
        _flex_choice[key] = FLEX_OPTIONS[min(times)[1]]
    return runner(_flex_choice[key])


def _flex_time(runner) -> float:
    """Milliseconds of forward and backward; infinite where the tile sizes do not compile."""
    try:
        runner.backward(runner.forward())
        return min(milliseconds(lambda: runner.backward(runner.forward()), 1) for _ in range(3))
    except Exception as problem:  # noqa: BLE001 - the compiler's errors have no common class
        print(f"FlexAttention: {runner.note} left out, {type(problem).__name__}")
        return float("inf")


entry("FA-4 equal pairs")(functools.partial(flash_attention_4_sparse, equal=True))
entry("FlexAttention equal pairs")(functools.partial(flex, equal=True))


@entry("S2 paper's")
def dkernel(case, tensors):
    from dkernel import SparseAttention

    if case.documents is not None:
        raise LeftOut("has no backward for packed documents")
    block = case.pattern.block_size
    n = -(-case.length // block)
    counts, blocks = block_lists(case.pattern, case.length)
    mask = torch.eye(n, dtype=torch.uint8).repeat(case.heads, 1, 1)
    head, row, place = (torch.arange(blocks.shape[2]) < torch.from_numpy(counts)[..., None]).nonzero(as_tuple=True)
    mask[head, row, torch.from_numpy(blocks)[head, row, place].long()] = 1
    kernels = SparseAttention(block, mask, seq_dim=1).to(tensors.device)
    inputs, grad = tensors.contiguous("bshd")
    return Runner(lambda: kernels(*inputs), inputs, grad, "bshd", case.pairs(case.pattern), case.pattern)
