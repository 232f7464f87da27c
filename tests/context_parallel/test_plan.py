"""The exchange plan against its definition, its size at full scale, and its errors."""

from __future__ import annotations

import dataclasses
import time
from functools import partial

import numpy as np
import pytest
import torch

from s2_megatron.context_parallel import attention as context_parallel
from s2_megatron.context_parallel import exchange as cp_exchange
from s2_megatron.context_parallel import plan as cp_plan
from s2_megatron.context_parallel import sparse as cp_sparse
from s2_megatron.context_parallel.attention import ContextParallel
from s2_megatron.context_parallel.dense import sequence_order
from s2_megatron.context_parallel.plan import (
    block_pairs,
    check_block_count,
    check_comm_type,
    heads_beside,
    make_plan,
    needed_blocks,
    owners,
    rank_pairs,
    zigzag_blocks,
)
from s2_megatron.kernels import dispatch as launch
from s2_megatron.kernels.hopper import launch as hopper
from s2_megatron.ops import device_lists, layout
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import Placement
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern
from s2_megatron.testing.context_parallel_cases import CASES


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_needed_blocks_by_definition(name, size):
    case = CASES[name]
    pattern = case.pattern
    n_blocks = 2 * size * (48 // (2 * size))
    ratio = pattern.num_heads // pattern.num_kv_heads
    needed = needed_blocks(pattern, size, n_blocks)
    for rank in range(size):
        expected = np.zeros((pattern.num_kv_heads, n_blocks), dtype=bool)
        for head in range(pattern.num_heads):
            for query in zigzag_blocks(rank, size, n_blocks):
                expected[head // ratio, pattern.key_blocks(head, int(query))] = True
        assert np.array_equal(needed[rank], expected)


@pytest.mark.parametrize("name", CASES)
def test_pairs_of_blocks_by_definition(name):
    pattern = CASES[name].pattern
    queries, held = np.arange(3, 24, 2), np.arange(24) % 5 < 3
    expected = [
        sum(held[pattern.key_blocks(head, int(query))].sum() for query in queries) for head in range(pattern.num_heads)
    ]
    assert block_pairs(pattern, queries, held).tolist() == expected


def test_heads_that_hide_the_exchange(monkeypatch):
    """As many as it takes, more over a slow network, fewer where the rest of a step takes longer; never none, never
    more than there are."""
    pattern = make_range_pattern(block_size=64, num_heads=32, num_kv_heads=16, ranges=((16, 1), (None, 16)))
    plan = make_plan(pattern, 1, 4, 2048)
    found = {
        (products, rate): heads_beside(pattern, plan, 128, 2, products, rate)
        for products in (2, 3)
        for rate in (160e9, 40e9)
    }
    seconds = plan.received_slots * 2 * 64 * 128 * 2 / 160e9
    held = np.isin(np.arange(2048), plan.query_blocks)
    flops = np.cumsum(block_pairs(pattern, plan.query_blocks, held)[::2] * 2) * 64 * 64 * 4 * 128
    assert (
        flops[found[2, 160e9] - 2] / cp_plan.ATTENTION_RATE
        < seconds
        <= flops[found[2, 160e9] - 1] / cp_plan.ATTENTION_RATE
    )
    assert 1 < found[3, 160e9] < found[2, 160e9] < found[3, 40e9] <= found[2, 40e9] <= 16
    monkeypatch.setattr(cp_plan, "ATTENTION_RATE", 1.0)
    heads_beside.cache_clear()
    assert heads_beside(pattern, plan, 128, 2, 2, 160e9) == 1
    monkeypatch.setattr(cp_plan, "ATTENTION_RATE", 1e30)
    heads_beside.cache_clear()
    assert heads_beside(pattern, plan, 128, 2, 2, 160e9) == 16
    heads_beside.cache_clear()


@pytest.mark.parametrize(
    "local, ranks, same",
    [
        ("8", [0, 2, 4, 6], True),
        ("4", [0, 2, 4, 6], False),
        ("4", [4, 5, 6, 7], True),
        (None, [4, 5], True),
        (None, [3, 4], False),
    ],
)
def test_one_host(local, ranks, same, monkeypatch):
    """By torchrun's number of processes, without it by that of GPUs. The expected rate follows."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(cp_exchange.dist, "get_process_group_ranks", lambda group: ranks)
    assert cp_exchange.one_host(None) == same
    assert cp_exchange.receive_rate(None) == (cp_exchange.NVLINK_RATE if same else cp_exchange.NETWORK_RATE)


@pytest.mark.parametrize("name", ["paper-gqa", "mask-kv-heads", "dense-heads"])
def test_what_one_rank_sends_the_other_expects(name):
    pattern, size = CASES[name].pattern, 4
    n_blocks = 6 * size
    plans = [make_plan(pattern, rank, size, n_blocks) for rank in range(size)]
    owner = owners(size, n_blocks)
    for receiver, plan in enumerate(plans):
        filled = {}
        slot = 0
        for sender in plans:
            assert np.array_equal(sender.counts, plan.counts), "all ranks know the same counts"
            first, count = sender.counts[sender.rank, :receiver].sum(), sender.counts[sender.rank, receiver]
            for position in range(first, first + count):
                block = int(sender.query_blocks[sender.send_blocks[position]])
                assert owner[block] == sender.rank != receiver
                filled[int(sender.send_heads[position]), block] = slot
                slot += 1
        assert {
            (head, block): plan.remote_slot[head, block] for head, block in zip(*np.nonzero(plan.remote_slot >= 0))
        } == filled
        assert plan.sent_slots[receiver] == len(plan.send_heads)
        assert plan.needed_slots[receiver] == plan.received_slots == len(filled)


def test_work_of_the_ranks():
    for case in CASES.values():
        n_blocks = 48
        pairs = rank_pairs(case.pattern, 4, n_blocks)
        assert pairs.sum() == case.pattern.attended_pairs(n_blocks * case.pattern.block_size)
    paper = make_range_pattern(
        block_size=64, num_heads=32, num_kv_heads=8, ranges=((16, 1), (None, 16)), dense_heads={"spread": 1}
    )
    work = rank_pairs(paper, 8, 512)  # 32K tokens
    assert work.max() <= 1.03 * work.mean()


def test_volume_at_128k():
    """The README's claim: 6 % of the remote blocks, and no rank sends or receives more than 8 % of what an all-gather
    moves."""
    pattern = make_range_pattern(block_size=64, num_heads=32, num_kv_heads=32, ranges=((16, 1), (None, 16)))
    plan = make_plan(pattern, 0, 8, 2048)
    assert plan.all_gather_slots * plan.slot_bytes(128, 2) == 1792 * 2**20
    assert max(plan.sent_slots + plan.needed_slots) <= 0.08 * plan.all_gather_slots
    assert np.mean(plan.needed_slots) == pytest.approx(0.0606 * plan.all_gather_slots, rel=0.01)


def test_a_plan_for_a_million_tokens_takes_moments():
    pattern = make_range_pattern(
        block_size=64, num_heads=32, num_kv_heads=32, ranges=((16, 1), (None, 16)), layer_index=7, layer_step=1
    )
    start = time.process_time()
    plan = make_plan(pattern, 3, 8, 2**20 // 64)
    assert time.process_time() - start < 5
    assert make_plan(pattern, 3, 8, 2**20 // 64) is plan, "layers with equal patterns share a plan"


class Ranks:
    """A process group that nothing is sent in."""

    def size(self):
        return 4

    def rank(self):
        return 1


@pytest.mark.parametrize("one_pass", [0, 1], ids=["all heads in two passes", "one head in one pass"])
@pytest.mark.parametrize("dtype, made", [(torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize(
    "comm_type, pattern", [("sparse", "paper-gqa"), ("sparse", "mask-kv-heads"), ("all_gather", "paper-gqa")]
)
def test_what_kernels_read_is_there_before_the_first_call(comm_type, pattern, dtype, made, one_pass, monkeypatch):
    """Prepared as for a Hopper GPU, launches need no new list; dtypes that those kernels do not compute get none."""
    monkeypatch.setattr(launch, "_is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 3)
    monkeypatch.setattr(context_parallel, "resolve_backend", lambda name, device_type: name)
    monkeypatch.setattr(cp_exchange, "one_host", lambda group: True)
    monkeypatch.setattr(cp_sparse, "heads_beside", lambda pattern, *_: pattern.num_kv_heads - one_pass)
    pattern = CASES[pattern].pattern
    if isinstance(pattern, BlockMaskPattern):
        pattern = dataclasses.replace(pattern, block_size=64)
    else:
        pattern = RangePattern(64, pattern.num_kv_heads, pattern.heads)
    cp, cpu = ContextParallel(pattern, Ranks(), comm_type), torch.device("cpu")
    with torch.device("meta"):  # as Megatron may build the layers
        cp.prepare(48 * 64, cpu, 64, dtype, "auto")
    state = cp.state(48 * 64, cpu)
    assert cp._prepared == {(48 * 64, cpu): state}
    placements = state.read_by_kernels(64, 2, False) if comm_type == "sparse" else [state.placement]
    assert len(placements) == (one_pass + 2 if comm_type == "sparse" else 1)
    assert comm_type != "sparse" or len(state.read_by_kernels(64, 2, True)) == 3, "dQ with saved blocks takes one pass"

    made_now = []
    for name in ("query_lists", "key_lists"):
        monkeypatch.setattr(
            device_lists,
            name,
            partial(lambda make, *args: made_now.append(make) or make(*args), getattr(device_lists, name)),
        )
    for placement in placements:
        query = torch.empty(1, pattern.num_heads, 12 * 64, 64)
        key = torch.empty(1, pattern.num_kv_heads, placement.n_slots * 64, 64)
        call = hopper.Geometry(query, key, key, AttentionCall(state.layout, 1.0, placement=placement))
        made_launches = [call.query_tiles(call.tiles.forward), call.query_tiles(call.tiles.grad_query)]
        if placement.own_slots == placement.n_slots:
            made_launches.append(call.key_tiles)
        assert all(launches.arguments["list_steps_ptr"].device == cpu for launches in made_launches)
    assert (not made_now) == made


@pytest.mark.parametrize("length, nearest", [(1000, "896 or 1024"), (100, "128"), (0, "128"), (1088, "1024 or 1152")])
def test_lengths_that_cannot_be_cut_name_the_nearest(length, nearest):
    with pytest.raises(ValueError, match=f"--seq-length {nearest}, or a smaller block_size"):
        check_block_count(length, 4, 16)
    assert check_block_count(1024, 4, 16) == 64


def test_comm_types():
    for comm_type, kv_heads in (("sparse", 2), ("all_gather", 2), ("a2a", 8)):
        check_comm_type(comm_type, kv_heads, 4)
    for unknown in ("p2p", "allgather"):  # Megatron's spelling is translated where the command line is read
        with pytest.raises(ValueError, match="expected one of sparse, all_gather, a2a; set --s2-cp-comm-type"):
            check_comm_type(unknown, 8, 4)
    with pytest.raises(
        ValueError,
        match=r"2 KV heads .*context_parallel_size=4; expected a multiple of 4; use --s2-cp-comm-type sparse",
    ):
        check_comm_type("a2a", 2, 4)


@pytest.mark.parametrize("n_blocks, together", [(256, 32), (512, 2)])
def test_heads_that_share_l2_follow_from_the_whole_sequence(n_blocks, together):
    """Not from a rank's rows: their stripes are those of the sequence. Columns of keys pass by a rank's queries."""
    placement = Placement.make(np.arange(8), n_blocks)
    tensor = torch.empty(1, 2, 8 * 64, 128)
    pattern = make_range_pattern(block_size=64, num_heads=2, num_kv_heads=2, ranges=((2, 1), (None, 4)))
    tiles = hopper.Geometry(
        tensor, tensor, tensor, AttentionCall(layout.build_layout(pattern), 1.0, placement=placement)
    ).tiles
    assert tiles.forward.heads == tiles.grad_query.heads == together and tiles.backward.heads == 4


@pytest.mark.parametrize("tokens, size", [(6, 2), (34, 2), (9, 3)])
def test_a_sequence_without_equal_chunks_is_refused(tokens, size):
    with pytest.raises(ValueError, match=rf"{tokens} tokens cannot be cut .* multiple of {2 * size}; pad it"):
        sequence_order(tokens, size, torch.device("cpu"))
    assert sorted(sequence_order(12 * size, size, torch.device("cpu")).tolist()) == list(range(12 * size))
