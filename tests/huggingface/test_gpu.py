"""S2Cache on a GPU: long texts, bf16, and a captured step that is replayed over the borders of blocks."""

import pytest
import torch

from benchmarks.timing import milliseconds
from s2_megatron.huggingface import CACHE_ARGUMENT, S2Cache
from s2_megatron.huggingface.attention import attend
from s2_megatron.huggingface.decoding import decode_attention, decode_mask
from tests.huggingface.tiny import BLOCK, NAMES, config_of, model_of, sparsity_named, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_decoding_equals_the_full_cache(name, dtype):
    sparsity = sparsity_named(name)
    pattern = sparsity.layers[1].pattern
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, count, 600, 64, generator=generator).cuda().to(dtype) for count in (4, 2, 2)]
    starts = torch.tensor([0, 37])
    cache = S2Cache(config_of(sparsity, head_dim=64), max_length=640)
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


@pytest.mark.parametrize("name", ["s2", "dense_heads", "mask_heads", "query_slide"])
def test_a_captured_step_is_replayed_over_block_borders(name):
    model = model_of(sparsity_named(name)).cuda()
    text = tokens(2, 200).cuda()
    expected = model(text, use_cache=False).logits.detach()
    cache = S2Cache(model.config, max_length=256)
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
