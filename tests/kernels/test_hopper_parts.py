"""Which columns of dK and dV are divided into parts, and how: chosen without a GPU. What the parts visit:
test_hopper_schedule.py."""

import torch

from benchmarks.suites import s2_pattern
from s2_megatron.kernels.hopper import launch as hopper
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import Placement, build_layout


def parts_of(pattern, rows, batch=1, dim=128):
    """(columns of a unit in parts, steps of a part, most parts of a column) of a launch."""
    query, key = (
        torch.empty(batch, heads, rows, dim, device="meta") for heads in (pattern.num_heads, pattern.num_kv_heads)
    )
    call = hopper.Geometry(query, key, key, AttentionCall(build_layout(pattern), 1.0))
    arguments = call.key_tiles.arguments
    n_split, part_steps = arguments.get("n_split", 0), arguments.get("part_steps", 0)
    further = arguments["n_programs"] - (arguments["n_long"] + arguments["n_rest"]) * arguments["units"]
    assert n_split * arguments["units"] * 2 * 128 * call.block_dim * 4 <= 14 * 2**20
    return n_split, part_steps, 1 + (further // (n_split * arguments["units"]) if n_split else further)


def test_few_long_columns_are_divided(monkeypatch):
    """Where one would keep a program at work longer than all others: parts of a quarter of what a multiprocessor has to
    do."""
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 132)
    divided = [
        (4, 1, 32, 1, 128, (16, 64, 32)),  # Llama-8B with TP 8
        (8, 1, 32, 1, 128, (16, 128, 32)),
        (8, 1, 128, 1, 128, (64, 1280, 13)),  # Llama-70B with TP 8
        (16, 2, 128, 1, 128, (56, 2496, 7)),  # more would take more than 14 MiB
        (8, 1, 128, 1, 64, (64, 1280, 13)),
        (32, 8, 8, 1, 128, (4, 128, 4)),
        (32, 8, 32, 1, 128, (0, 0, 1)),  # columns as long as what a multiprocessor has to do
        (32, 8, 128, 1, 128, (0, 0, 1)),
        (32, 32, 8, 1, 128, (0, 0, 1)),
        (8, 1, 32, 8, 128, (0, 0, 1)),
        (8, 1, 1, 1, 128, (1, 64, 2)),
        (4, 1, 1, 1, 128, (0, 0, 1)),
        (8, 1, 128, 1, 192, (0, 0, 1)),
    ]
    for heads, kv_heads, length, batch, dim, expected in divided:
        assert parts_of(s2_pattern(heads, kv_heads), length * 1024, batch, dim) == expected, (
            heads,
            kv_heads,
            length,
            batch,
            dim,
        )
    assert parts_of(s2_pattern(8, 1, ((16, 1),)), 128 * 1024) == (0, 0, 1), "a window has no long columns"


def test_a_placement_without_any_key(monkeypatch):
    """A rank may receive nothing for its KV heads: there is no longest column, and nothing is divided."""
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 132)
    pattern = s2_pattern(4, 2)
    placement = Placement.make(range(8), 16, torch.full((2, 16), -1), "cpu", pattern)
    query, key = (torch.empty(1, heads, 512, 64) for heads in (4, 2))
    arguments = hopper.Geometry(
        query, key, key, AttentionCall(build_layout(pattern), 1.0, placement=placement)
    ).key_tiles.arguments
    assert arguments["n_split"] == 0
