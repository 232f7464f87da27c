"""What benchmarks.inference times is checked first.

B batch, H query heads, D head dim.
"""

from __future__ import annotations

import torch

from s2_megatron.huggingface import S2Cache
from s2_megatron.huggingface.attention import attend
from s2_megatron.patterns.ranges import RangePattern


def last_token_softmax(query, key, value, pattern, scale: float) -> torch.Tensor:
    """fp64 attention of the last token alone, head by head over the blocks that the pattern names. [B, H, D]."""
    last = key.shape[2] - 1
    heads = []
    for head in range(query.shape[1]):
        kv_head = head // (query.shape[1] // key.shape[1])
        blocks = torch.from_numpy(pattern.key_blocks(head, last // pattern.block_size)).to(key.device)
        tokens = (blocks[:, None] * pattern.block_size + torch.arange(pattern.block_size, device=key.device)).flatten()
        tokens = tokens[tokens <= last]
        k, v = (tensor[:, kv_head].index_select(1, tokens).double() for tensor in (key, value))
        scores = torch.einsum("bd,bsd->bs", query[:, head, -1].double(), k) * scale
        heads.append(torch.einsum("bs,bsd->bd", scores.softmax(-1), v))
    return torch.stack(heads, 1)


def check_attention(model, context: int) -> list[str]:
    """Prefill and decode of one layer of each kind against an fp64 softmax of the same tensors; what it found. The
    bound is twice the rounding of the largest output. Raises AssertionError for a wrong result."""
    config, device = model.config, model.device
    sparsity = config.sparsity
    found = []
    for index in (0, len(sparsity.layers) - 1):
        pattern = sparsity.layers[index].pattern
        dense = RangePattern.dense(sparsity.block_size, sparsity.num_heads, sparsity.num_kv_heads)
        sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        query, key, value = (
            torch.randn(2, count, context, config.head_dim, device=device).to(model.dtype) for count in sizes
        )
        scale = config.head_dim**-0.5
        expected = last_token_softmax(query, key, value, pattern or dense, scale)
        cache = S2Cache(config, max_length=context)
        cache.layers = [cache.layers[index]]
        with torch.no_grad():
            for part in (slice(None, -1), slice(-1, None)):
                parts = (tensor[:, :, part] for tensor in (query, key, value))
                decoded = cache.attend(0, *parts, None, scale, pattern)[:, :, -1]
            prefilled = attend(query, key, value, pattern, scale)[:, :, -1]
        bound = 2 * max(torch.finfo(model.dtype).eps * float(expected.abs().max()), 1e-6)
        for name, got in (("decoding", decoded), ("prefill", prefilled)):
            error = float((got.double() - expected).abs().max())
            assert error <= bound, f"layer {index}, {name}: error {error:.2e} against fp64, bound {bound:.2e}"
            found.append(f"layer {index} {name} at {context:,}: error {error:.1e} (bound {bound:.1e})")
    return found


def check_replay(step) -> None:
    """A replayed step gives the eager step's logits.

    cuBLAS may choose another algorithm while a graph is captured. Then every layer rounds anew, and roundings add up
    like a random walk: the bound on the RMS of the difference is 2 * eps * sqrt(layers) of the logits' RMS.
    """
    eager, replayed = step.eager().float(), step.replay().float()
    layers = step.model.config.num_hidden_layers
    bound = 2 * torch.finfo(step.model.dtype).eps * layers**0.5
    error = float((eager - replayed).square().mean().sqrt() / eager.square().mean().sqrt())
    assert error <= bound, f"a replayed step differs from an eager one by {error:.2e} of its RMS; bound {bound:.2e}"
