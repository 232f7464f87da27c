"""Which KV heads share an attention of vLLM's, and which plans are refused."""

from dataclasses import replace

import pytest

from s2_megatron.config.load import SparsityConfig
from s2_megatron.config.sparsity import LayerSparsity
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import DENSE, RangePattern
from s2_megatron.vllm.head_groups import group_size, head_groups, kv_head_windows, local_kv_heads

HEADS, KV_HEADS = 8, 4


def plan(layers, **spec):
    data = dict(block_size=16, layers=layers) | (dict(specs=dict(W=spec)) if spec else {})
    config = SparsityConfig.from_data(data)
    return config.resolve(num_layers=4, num_heads=HEADS, num_kv_heads=KV_HEADS, seq_length=1024)


def test_windows_by_kv_head():
    found = kv_head_windows(plan("DW", window=[40, 50, 40, 1], dense_heads=[1]))
    assert found == ((None,) * 4, (40, None, 40, 1)) * 2


@pytest.mark.parametrize(
    "spec, message",
    [
        (dict(local_blocks=4), "layer 1, head 0 has a window of blocks (local_blocks, local_tokens), which shows 49 to "
         "64 keys; {}; train with `window: 64` in its place"),
        (dict(window=40, stride=4), "layer 1, head 0 has stride 4; {}; train with `window: 1024` alone"),
        (dict(window=40, sink_tokens=4, dense_heads=[0]), "layer 1, head 2 has sink_tokens 4; {}; train without them"),
    ],
)  # fmt: skip
def test_what_vllm_does_not_compute_is_refused(spec, message):
    wanted = "expected heads that are dense or have one exact window, which is what vLLM's attention computes"
    roads = ", or run the model where all plans run: in transformers (S2Cache) or with `s2-megatron generate`"
    with pytest.raises(ValueError) as refused:
        kv_head_windows(plan("DW", **spec))
    assert str(refused.value) == "vLLM: " + message.format(wanted) + roads


def test_block_masks_and_query_heads_that_differ_are_refused():
    from tests.huggingface.tiny import random_mask

    masked = replace(plan("D"), layers=(LayerSparsity("M", random_mask(1)),))
    with pytest.raises(ValueError, match=r"^vLLM: layer 0, head 0 has a block mask; expected"):
        kv_head_windows(masked)
    heads = [HeadPattern((), 0, 40, 0, 16)] * HEADS
    heads[5] = HeadPattern(DENSE, 0, 40, 0, 16)  # the same window, and all keys beyond it
    mixed = replace(plan("D"), layers=(LayerSparsity("M", RangePattern(16, KV_HEADS, tuple(heads))),))
    with pytest.raises(
        ValueError, match=r"layer 0, head 5 has all keys, head 4 of the same KV head has window 40; .* for all query"
    ):
        kv_head_windows(mixed)


def test_groups_have_one_size_and_one_window():
    """The largest that fits every layer: pages of one size, and as few attentions as that allows."""
    mixed, pairs, dense = (40, None, 40, 40), (None, 40, 40, None), (None,) * 4
    assert [group_size(layers) for layers in ([mixed, dense], [pairs, dense], [dense], [(40, 50, None, 60)])] == [
        1, 2, 4, 1
    ]  # fmt: skip
    assert head_groups(mixed, range(4), 1) == ((40, (0,)), (None, (1,)), (40, (2,)), (40, (3,)))
    assert head_groups(pairs, range(4), 2) == ((None, (0, 3)), (40, (1, 2)))
    assert head_groups(dense, range(4), 2) == ((None, (0, 1)), (None, (2, 3)))


def test_groups_of_ranks():
    """A rank has its own heads only; the size fits all ranks, whose caches must have equal pages."""
    pairs = (None, 40, 40, None)
    assert group_size([pairs], ranks=2) == 1
    assert [group_size([(40, 40, None, None)], ranks=ranks) for ranks in (1, 2, 4, 8)] == [2, 2, 1, 1]
    assert head_groups(pairs, local_kv_heads(4, 2, 1), 1) == ((40, (2,)), (None, (3,)))


def test_heads_of_ranks():
    """As vLLM's QKVParallelLinear: slices, or copies where there are more ranks than heads."""
    assert [list(local_kv_heads(4, 2, rank)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(local_kv_heads(2, 4, rank)) for rank in range(4)] == [[0], [0], [1], [1]]
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4 for 6 KV heads; .*use tensor_parallel_size=2$"):
        local_kv_heads(6, 4, 0)
