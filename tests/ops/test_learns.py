"""The pattern learns what it is for: content from beyond the reach of all local windows together.

Copying with given indices. The first half of a sequence is random symbols; the second half asks for them in the same
order. Every source lies `DISTANCE` tokens back, farther than `layers x window`, so a model with the window alone can
only guess, while in S2 one head in `STRIDE` sees the block with the source. Small, plain PyTorch: about 40 seconds on
one core.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import build_layout
from s2_megatron.patterns.ranges import make_range_pattern

BLOCK, LOCAL_BLOCKS, STRIDE = 8, 2, 4
LAYERS, HEADS, WIDTH = 2, 4, 64
SYMBOLS, DISTANCE = 16, 64
STEPS, BATCH = 150, 16
WINDOW_ALONE = ((LOCAL_BLOCKS, 1),)
S2 = ((LOCAL_BLOCKS, 1), (None, STRIDE))


class Layer(nn.Module):
    """Pre-norm attention and MLP on [batch, sequence, WIDTH]."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, hidden):
        query, key, value = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        attended = s2_attention(query, key, value, self.layout, tensor_format="bshd", backend="reference")
        hidden = hidden + self.projection(attended.flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Copier(nn.Module):
    """symbols int64 [batch, 2 DISTANCE] (SYMBOLS asks) -> logits [batch, DISTANCE, SYMBOLS] of the second half.

    The same index embedding marks a source and the position that asks for it.
    """

    def __init__(self, ranges):
        super().__init__()
        self.symbol, self.index = nn.Embedding(SYMBOLS + 1, WIDTH), nn.Embedding(DISTANCE, WIDTH)
        patterns = [
            make_range_pattern(block_size=BLOCK, num_heads=HEADS, num_kv_heads=HEADS, ranges=ranges, layer_index=layer)
            for layer in range(LAYERS)
        ]
        self.layers = nn.Sequential(*(Layer(build_layout(pattern)) for pattern in patterns))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))

    def forward(self, symbols):
        hidden = self.symbol(symbols) + self.index.weight.repeat(2, 1)
        return self.head(self.layers(hidden)[:, DISTANCE:])


def accuracy_after_training(ranges) -> float:
    """Share of right symbols on fresh sequences after STEPS of training."""
    torch.manual_seed(0)
    model = Copier(ranges)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    def batch():
        sources = torch.randint(SYMBOLS, (BATCH, DISTANCE))
        return torch.cat([sources, torch.full_like(sources, SYMBOLS)], dim=1), sources

    for _ in range(STEPS):
        symbols, sources = batch()
        loss = F.cross_entropy(model(symbols).flatten(0, 1), sources.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        symbols, sources = batch()
        return (model(symbols).argmax(-1) == sources).float().mean().item()


def test_the_task_is_beyond_the_reach_of_the_windows():
    # A query sees LOCAL_BLOCKS * BLOCK - 1 tokens back at most, and as much again in every further layer.
    assert DISTANCE > LAYERS * LOCAL_BLOCKS * BLOCK


@pytest.mark.slow
def test_s2_copies_from_beyond_the_windows():
    assert accuracy_after_training(S2) >= 0.95


@pytest.mark.slow
def test_the_window_alone_stays_near_chance():
    assert accuracy_after_training(WINDOW_ALONE) <= 2 / SYMBOLS
