"""Which blocks the compact cache keeps, against the pattern objects block by block; and how many they are."""

import numpy as np
import pytest
import torch

from s2_megatron.config.load import SparsityConfig, load_config
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.huggingface.cache import cache_summary, kept_tokens
from s2_megatron.huggingface.cache_layer import joined_slots
from s2_megatron.huggingface.slots import kept_slots
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern
from tests.huggingface.tiny import BLOCK, HEADS, KV_HEADS, NAMES, SHIPPED, SPECS, plan_of, random_mask, sparsity_named

BLOCKS = 40
RATIO = HEADS // KV_HEADS


def pattern_named(name):
    return sparsity_named(name).layers[1].pattern or RangePattern.dense(BLOCK, HEADS, KV_HEADS)


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_shows_exactly_the_blocks_that_the_pattern_attends(name):
    pattern = pattern_named(name)
    query_blocks = torch.arange(BLOCKS)
    seen_heads = []
    for slots in kept_slots(pattern, BLOCKS):
        held = slots.held_blocks(query_blocks).expand(-1, len(slots.kv_heads), -1)
        attended = slots.attended_slots(query_blocks, slots.held_blocks(query_blocks))
        attended = attended.expand(-1, len(slots.kv_heads), RATIO, -1)
        for index, kv_head in enumerate(slots.kv_heads):
            seen_heads.append(kv_head)
            for inside in range(RATIO):
                for query in range(BLOCKS):
                    shown = held[query, index][attended[query, index, inside]].tolist()
                    assert sorted(shown) == pattern.key_blocks(kv_head * RATIO + inside, query).tolist()
    assert sorted(seen_heads) == list(range(KV_HEADS))


@pytest.mark.parametrize("name", NAMES)
def test_a_block_stays_where_it_was_written_until_no_head_will_ask_for_it(name):
    pattern = pattern_named(name)
    for slots in kept_slots(pattern, BLOCKS):
        written = {}
        for query in range(BLOCKS):
            at = torch.tensor([query])
            for index, kv_head in enumerate(slots.kv_heads):
                places = slots.write_slots(at).expand(1, len(slots.kv_heads), -1)[0, index].tolist()
                written.update({(kv_head, place): query for place in places})
                held = slots.held_blocks(at).expand(1, len(slots.kv_heads), -1)[0, index].tolist()
                assert all(block == -1 or written[kv_head, place] == block for place, block in enumerate(held))
                future = set()
                for later in range(query, BLOCKS):
                    for head in range(kv_head * RATIO, (kv_head + 1) * RATIO):
                        future.update(pattern.key_blocks(head, later).tolist())
                assert {block for block in future if block <= query} <= set(held)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("mask")])
def test_slots_that_grow_keep_their_blocks(name):
    for slots in kept_slots(pattern_named(name), 7):
        larger, places = slots.grown(BLOCKS)
        at = torch.arange(7)
        before, after = slots.held_blocks(at), larger.held_blocks(at)
        assert torch.equal(after[..., places], before)
        rest = np.setdiff1d(np.arange(larger.n_slots), places.numpy())
        assert (after[..., rest] == -1).all()


def test_a_sink_longer_than_the_text_takes_no_more_than_the_text():
    pattern = make_range_pattern(
        block_size=BLOCK, num_heads=1, num_kv_heads=1, ranges=(), window=BLOCK, sink_tokens=6 * BLOCK
    )
    (slots,) = kept_slots(pattern, 2)
    assert slots.n_slots == 4
    larger, places = slots.grown(BLOCKS)
    assert larger.n_slots == kept_slots(pattern, BLOCKS)[0].n_slots == 8
    assert torch.equal(larger.held_blocks(torch.arange(2))[..., places], slots.held_blocks(torch.arange(2)))


def layers_of(pattern, heads, kv_heads, dense, total):
    layers = [LayerSparsity("D", None)] * dense + [LayerSparsity("S", pattern)] * (total - dense)
    return ResolvedSparsity(tuple(layers), (), None, 64, heads, kv_heads, 131072)


@pytest.mark.parametrize("kv_heads", [32, 8])
def test_a_head_keeps_9216_of_131072_tokens(kv_heads, capsys):
    pattern = make_range_pattern(block_size=64, num_heads=32, num_kv_heads=kv_heads, ranges=((16, 1), (None, 16)))
    sparsity = layers_of(pattern, 32, kv_heads, dense=2, total=32)
    kept = kept_tokens(sparsity, 131072)
    assert kept[0] == [131072] * kv_heads
    assert kept[2:] == [[9216] * kv_heads] * 30
    assert f"{sum(map(sum, kept)) / (32 * kv_heads * 131072):.1%}" == "12.8%"
    text = cache_summary(sparsity, 131072)
    assert "12.8% of a full one" in text and "9,216 tokens a KV head in 30 layers" in text


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_keep_as_much_as_their_pattern_says(name):
    heads, kv_heads, layers = (4, 2, 4) if "quickstart" in name else (32, 8, 48 if name == "gemma3" else 32)
    sparsity = load_config(SHIPPED[name]).resolve(
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, seq_length=8192
    )
    for layer, kept in zip(sparsity.layers, kept_tokens(sparsity, 8192)):
        for kv_head in range(kv_heads):
            blocks = -(-8192 // sparsity.block_size)
            if layer.pattern is None:
                assert kept[kv_head] == 8192
                continue
            ratio = heads // kv_heads
            union = {
                block
                for head in range(kv_head * ratio, (kv_head + 1) * ratio)
                for block in layer.pattern.key_blocks(head, blocks - 1).tolist()
            }
            # The union, and a block that lies in a window and in a stripe or sink twice.
            window = layer.pattern.heads[0].touched_ranges[0][0]
            assert len(union) <= kept[kv_head] / sparsity.block_size <= len(union) + window
    if name == "phi3_small":
        assert max(kept_tokens(sparsity, 8192)[0]) == (16 + 4 * 16) * 64  # four offsets in every group of heads


def test_a_mask_keeps_blocks_only_between_their_first_and_last_use():
    indptr = np.array([0, 1, 3, 4, 6])  # block 0 is wanted by 1, block 1 by 1 and 3, 2 and 3 by themselves
    mask = BlockMaskPattern.from_csr(BLOCK, 1, 1, [indptr], [np.array([0, 0, 1, 2, 1, 3])])
    (slots,) = kept_slots(mask, 4)
    assert slots.n_slots == 2
    held = slots.held_blocks(torch.arange(4))[:, 0].sort().values
    assert held.tolist() == [[-1, 0], [0, 1], [1, 2], [1, 3]]


def test_a_text_longer_than_the_mask_is_refused():
    with pytest.raises(ValueError, match="the block mask only 40"):
        kept_slots(pattern_named("mask_1"), 41)


def test_config_without_stride_keeps_its_window_alone():
    config = SparsityConfig.from_data(dict(block_size=64, layers="S", specs=dict(S=dict(local_tokens=1024))))
    sparsity = config.resolve(num_layers=1, num_heads=8, num_kv_heads=8, seq_length=65536)
    assert kept_tokens(sparsity, 65536) == [[1024] * 8]


def joined_layers(name) -> list:
    """What is kept in five layers of the pattern, or of five of its kind."""
    if name in SPECS:
        patterns = [layer.pattern for layer in plan_of(name, "SSSSS").layers]
    else:
        patterns = [pattern_named(name), random_mask(1, 3), pattern_named("s2"), pattern_named("window")]
    return [slots for pattern in dict.fromkeys(patterns) for slots in kept_slots(pattern, BLOCKS)]


@pytest.mark.parametrize("name", NAMES)
def test_joined_slots_say_what_each_says_alone(name):
    position, found = torch.tensor([0, 5, 3 * BLOCK, 17 * BLOCK + 9, BLOCKS * BLOCK - 1]), []
    groups = joined_layers(name)
    for joined in joined_slots(groups):
        masks, places = joined.token_mask(position), joined.write_tokens(position)
        assert masks.shape[1] == places.shape[1] == len(joined.members)
        for slots, mask, place in zip(joined.members, masks.unbind(1), places.unbind(1)):
            assert torch.equal(mask, slots.token_mask(position)) and torch.equal(place, slots.write_tokens(position))
            found.append(slots)
    assert set(found) == set(groups) and len(found) == len(groups)


@pytest.mark.parametrize("name, alone, together", [
    ("s2", 4, 1), ("tokens_by_head", 8, 2), ("dense_heads", 8, 2), ("query_slide", 1, 1), ("window", 1, 1),
    ("three_ranges", 4, 1),
])  # fmt: skip
def test_layers_that_differ_in_residues_are_joined(name, alone, together):
    groups = joined_layers(name)
    assert (len(groups), len(joined_slots(groups))) == (alone, together)
