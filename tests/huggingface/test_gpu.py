"""S2Cache on a GPU: long texts, bf16, and a captured step that is replayed over the borders of blocks."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.timing import milliseconds
from s2_megatron.huggingface import CACHE_ARGUMENT, S2Cache
from s2_megatron.huggingface.attention import attend
from s2_megatron.huggingface.decode_kernel import Kept, decode
from s2_megatron.huggingface.decoding import decode_attention, decode_mask
from tests.huggingface.test_decode_kernel import expected_step, random_kept
from tests.huggingface.tiny import BLOCK, NAMES, config_of, model_of, plan_of, sparsity_named, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_decoding_equals_the_full_cache(name, dtype, backend):
    sparsity = sparsity_named(name)
    pattern = sparsity.layers[1].pattern
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, count, 600, 64, generator=generator).cuda().to(dtype) for count in (4, 2, 2)]
    starts = torch.tensor([0, 37])
    cache = S2Cache(config_of(sparsity, head_dim=64), max_length=640, decode_backend=backend)
    cache.layers = [cache.layers[1]]
    out = []
    for first, count in ((0, 500), *((500 + step, 1) for step in range(100))):
        out.append(cache.attend(0, *(part[:, :, first : first + count] for part in parts), starts, 0.2, pattern))
    out = torch.cat(out, 2)
    for row, start in enumerate(starts.tolist()):
        rows = [part[row : row + 1, :, start:].cpu().double() for part in parts]
        expected = attend(*rows, pattern, 0.2)
        error = (out[row : row + 1, :, start:].cpu().double() - expected).abs().max()
        assert error < (2e-3 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps), error  # fp32: TF32 in SDPA


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_long_text_is_read_at_the_memorys_speed(kv_heads):
    """The kernel that torch chooses cuts the keys of few heads into parts: without, it reads below 0.3 TB/s."""
    query = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    keys, values = (torch.randn(1, kv_heads, 2**19, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask = decode_mask(
        torch.ones(1, 1, 1, 2**19, dtype=torch.bool, device="cuda"), kv_heads, 8 // kv_heads, query.dtype
    )
    decode_attention(query, keys, values, mask, 0.1)  # cuDNN plans at the first call, for half a second
    took = milliseconds(lambda: decode_attention(query, keys, values, mask, 0.1), 10)
    assert 2 * keys.nbytes / took / 1e9 > 0.8, f"{2 * keys.nbytes / took / 1e9:.2f} TB/s"


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_the_kernel_reads_a_long_text_at_the_memorys_speed(kv_heads):
    shape = (1, kv_heads, 2**19, 128)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    shown = torch.ones(1, 1, 1, shape[2], dtype=torch.bool, device="cuda")
    place = torch.full((1, 1, 1), shape[2] - 1, device="cuda")
    kept = Kept(keys, values, shown, place, torch.arange(kv_heads, device="cuda"))
    query, new = (torch.randn(1, heads, 1, 128, device="cuda", dtype=keys.dtype) for heads in (8, kv_heads))
    decode(query, new, new, [kept], 0.1)  # compiles
    took = milliseconds(lambda: decode(query, new, new, [kept], 0.1), 10)
    assert 2 * keys.nbytes / took / 1e9 > 0.8, f"{2 * keys.nbytes / took / 1e9:.2f} TB/s"


# query heads of a KV head, head dims of keys and values, dtype, softmax offset
KERNELS = [
    (4, dims, dtype, True)
    for dims in ((64, 64), (128, 128), (256, 256), (192, 128), (80, 72))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
] + [(group, (128, 128), torch.bfloat16, False) for group in (1, 4, 17)]


@pytest.mark.parametrize("group, dims, dtype, offset", KERNELS)
def test_the_kernels_out_and_lse_against_fp64(group, dims, dtype, offset):
    """Two groups of KV heads that keep as much as 4,160 and 64 tokens; equal calls give equal bits."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((3 * group, dims[0]), (3, dims[0]), (3, dims[1]))
    parts = [torch.randn(2, 1, *size, generator=generator).cuda().to(dtype).transpose(1, 2) for size in sizes]
    groups = [
        random_kept(heads, kept, dims, dtype, "cuda", rows, generator)
        for heads, kept, rows in (([1], 4160, 1), ([0, 2], 64, group))
    ]
    sinks = torch.randn(3 * group, generator=generator).cuda() if offset else None
    expected, expected_lse = expected_step(*parts, groups, dims[0] ** -0.5, sinks)
    found = [decode(*parts, groups, dims[0] ** -0.5, None, sinks) for _ in range(20)]
    out, lse = (part.cpu().double() for part in found[0])
    error = (out - expected).abs().max() / expected.abs().max()
    assert error < (4e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps), error
    finite = expected_lse.isfinite()
    assert torch.equal(finite, lse.isfinite())
    assert (lse - expected_lse)[finite].abs().max() < 2e-5 * max(1, expected_lse[finite].abs().max())
    for again, again_lse in found[1:]:
        assert torch.equal(again, found[0][0]) and torch.equal(again_lse, found[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("name", ["s2", "dense_heads", "tokens_by_head"])
def test_the_kernel_generates_what_sdpa_generates(name, replayed, dtype):
    """RoPE, padding and the offset in the kernel; greedy text, and logits of the same tokens within the roundings."""
    model = model_of(sparsity_named(name), head_dim=64, softmax_type="learnable", qk_norm=True).cuda().to(dtype)
    text, mask = tokens(2, 60).cuda(), torch.ones(2, 60 + 5 * BLOCK, dtype=torch.int64)
    mask[1, :13] = 0  # on the CPU: a captured step cannot look at the device
    places = (mask.cumsum(1) - 1).clamp(min=0).cuda()
    runs: dict[str, list[torch.Tensor]] = {}
    for backend in ("reference", "triton"):
        cache = S2Cache(model.config, max_length=256, decode_backend=backend)
        given = {CACHE_ARGUMENT: cache}
        ids, positions = text[:, :1].clone(), places[:, :1].clone()
        # torch's fused kernels compute fp32 in TF32.
        exact = sdpa_kernel(SDPBackend.MATH) if dtype == torch.float32 else nullcontext()
        with torch.no_grad(), exact:
            out = model(text, attention_mask=mask[:, :60], position_ids=places[:, :60], **given).logits
            runs[backend], graph = [out[:, -1].float()], None
            for at in range(60, mask.shape[1]):
                ids.copy_(runs["reference"][at - 60].argmax(-1)[:, None])
                positions.copy_(places[:, at : at + 1])
                arguments = dict(attention_mask=mask[:, : at + 1], position_ids=positions) | given
                if graph is not None:
                    graph.replay()
                    cache.count_replay()
                elif replayed and at > 60:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        out = model(ids, **arguments).logits
                    graph.replay()
                else:
                    out = model(ids, **arguments).logits
                runs[backend].append(out[:, -1].float().clone())
    one, two = (torch.stack(runs[backend]) for backend in ("reference", "triton"))
    error = (one - two).square().mean().sqrt() / one.square().mean().sqrt()
    assert error < (1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps), error
    if dtype == torch.float32:
        assert torch.equal(one.argmax(-1), two.argmax(-1))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    "name, layers", [("s2", "DS"), ("dense_heads", "DSSS"), ("mask_heads", ""), ("query_slide", "DS")]
)
def test_a_captured_step_is_replayed_over_block_borders(name, layers, backend):
    model = model_of(plan_of(name, layers) if layers else sparsity_named(name)).cuda()
    text = tokens(2, 200).cuda()
    expected = model(text, use_cache=False).logits.detach()
    cache = S2Cache(model.config, max_length=256, decode_backend=backend)
    ids = text[:, 60:61].clone()

    def step():
        positions = (cache.position + 1)[:, None]
        return model(ids, position_ids=positions, **{CACHE_ARGUMENT: cache}).logits

    with torch.no_grad():
        model(text[:, :60], **{CACHE_ARGUMENT: cache})
        step()  # token 60, eagerly: makes what a capture must not make
        ids.copy_(text[:, 61:62])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        for index in range(61, 61 + 5 * BLOCK):
            ids.copy_(text[:, index : index + 1])
            graph.replay()
            if index > 61:
                cache.count_replay()
            assert (logits[:, 0] - expected[:, index]).abs().max() < 2e-2, index
    assert cache.get_seq_length() == 61 + 5 * BLOCK
