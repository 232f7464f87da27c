"""The op in ten lines, beside PyTorch's attention with the same mask.

python examples/attention_op.py
"""

import torch

from s2_megatron import make_range_pattern, s2_attention

device = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU s2_attention takes its PyTorch reference
# A window of 4 blocks of 64 tokens; beyond it one block in 8, another one for each KV head.
pattern = make_range_pattern(block_size=64, num_heads=8, num_kv_heads=4, ranges=((4, 1), (None, 8)))
query = torch.randn(2048, 1, 8, 64, device=device, requires_grad=True)  # [S, B, H, D]
key, value = (torch.randn(2048, 1, 4, 64, device=device, requires_grad=True) for _ in range(2))
out = s2_attention(query, key, value, pattern)
out.square().mean().backward()
print(f"{pattern.describe()}: {pattern.density(2048):.1%} of the causal pairs")

# The same with a mask of 2048 x 2048 for every head, as tests compare it.
from s2_megatron.testing.oracle import token_mask  # noqa: E402

heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [B, H, S, D]
mask = token_mask(pattern, 2048, device)
dense = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
print(f"largest difference from PyTorch's attention: {(out - dense.permute(2, 0, 1, 3)).abs().max().item():.1e}")
