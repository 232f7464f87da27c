"""What the patterns refuse: each ValueError names the argument, the value, what was expected and what to do."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.layer_step import choose_layer_step
from s2_megatron.patterns.ranges import RangePattern, dense_kv_heads, make_range_pattern
from tests.refusing import refuses

GOOD = {"block_size": 64, "num_heads": 4, "num_kv_heads": 2, "ranges": ((2, 1), (None, 4))}
# settings of make_range_pattern -> words of the message, in order
BAD = [
    (dict(head_step=1.5), "head_step=1.5; expected an integer, 0 to 16777216; use 'auto'"),
    (dict(head_step=True), "head_step=True; expected an integer"),
    (dict(head_step=-1), "head_step=-1; expected 0 to 16777216; use 'auto'"),
    (dict(head_step="papr"), "head_step='papr'; expected 'auto', 'paper' or a number of blocks; use 'auto'"),
    (dict(head_step=None), "head_step=None; expected an integer"),
    (dict(layer_step="paper"), "layer_step='paper'; expected 'auto' or a number of blocks; use 'auto'"),
    (dict(layer_step=2.0), "layer_step=2.0; expected an integer"),
    (dict(layer_index=1.0), "layer_index=1.0; expected an integer, 0 to 65536; count the layers of a spec from 0"),
    (dict(layer_index=-1), "layer_index=-1; expected 0 to"),
    (dict(base_offset="3"), "base_offset='3'; expected an integer"),
    (dict(base_offset=10**30), "base_offset=1" + "0" * 30 + "; expected -16777216 to 16777216; use 0"),
    (dict(block_size=48), "block_size=48; expected a power of two; use e.g. 64"),
    (dict(block_size=64.0), "block_size=64.0; expected an integer, 1 to 65536; use a power of two, e.g. 64"),
    (dict(block_size=0), "block_size=0; expected 1 to 65536"),
    (dict(num_heads=5), "num_heads=5 is not a multiple of num_kv_heads=2; expected the same number", "num_kv_heads=1"),
    (dict(num_heads=0), "num_heads=0; expected 1 to 65536; use the number of query heads"),
    (dict(num_heads="4"), "num_heads='4'; expected an integer"),
    (dict(num_heads=10**9), "num_heads=1000000000; expected 1 to 65536"),
    (dict(num_kv_heads=np.array([2])), "num_kv_heads=array([2]); expected an integer"),
    (dict(num_kv_heads=-2), "num_kv_heads=-2; expected 1 to"),
    (dict(slide="head"), "slide='head'; expected 'kv' or 'query'; use 'kv'"),
    (dict(slide=None), "slide=None; expected 'kv' or 'query'"),
    (dict(ranges=()), "ranges=(); expected at least one (end, stride); use for example ((16, 1), (None, 16))"),
    (dict(ranges=16), "ranges=16; expected a list or tuple of (end in blocks or None, stride); use"),
    (dict(ranges="16"), "ranges='16'; expected a list or tuple"),
    (dict(ranges=(16, 1)), "ranges[0]=16; expected (end, stride); use"),
    (dict(ranges=((16, 1, 2),)), "ranges[0]=(16, 1, 2); expected two entries, (end in blocks or None, stride); use"),
    (dict(ranges=((2.0, 1), (None, 4))), "the end of ranges[0]=2.0; expected an integer"),
    (dict(ranges=((2, 2),)), "the stride of ranges[0]=2; expected 1 to 1; use 1: a token must see its own block"),
    (dict(ranges=((4, 1), (3, 2))), "the end of ranges[1]=3; expected 5 to", "the ends must grow; use 5 or more"),
    (dict(ranges=((0, 1),)), "the end of ranges[0]=0; expected 1 to"),
    (dict(ranges=((4, 1), (None, 0))), "the stride of ranges[1]=0; expected 1 to 16777216"),
    (dict(ranges=((4, 1), (None, 2**31))), "the stride of ranges[1]=2147483648; expected 1 to 16777216; use"),
    (dict(ranges=((4, 1), (None, 2.5))), "the stride of ranges[1]=2.5; expected an integer"),
    (dict(ranges=((4, 1), (None, False))), "the stride of ranges[1]=False; expected an integer"),
    (dict(ranges=((None, 1), (8, 2))), "the end of ranges[0]=None; only the last range may have no end; use 16"),
    (dict(dense_heads=[2]), "dense_heads[0]=2; expected 0 to 1; use KV heads from 0 to 1"),
    (dict(dense_heads=[0, 0.5]), "dense_heads[1]=0.5; expected an integer"),
    (dict(dense_heads={"last": 3}), "dense_heads['last']=3; expected 0 to 2; use 0 to 2, the number of KV heads"),
    (dict(dense_heads={"last": 1.0}), "dense_heads['last']=1.0; expected an integer"),
    (dict(dense_heads={"first": 1}), "dense_heads={'first': 1}; expected {'last': n} or {'spread': n}; use"),
    (dict(dense_heads={}), "dense_heads={}; expected {'last': n}"),
    (dict(dense_heads="0"), "dense_heads='0'; expected an integer, 0 to 2; use a list of KV heads"),
]  # fmt: skip


@pytest.mark.parametrize("options, words", [(options, words) for options, *words in BAD], ids=str)
def test_range_patterns(options, words):
    refuses(lambda: make_range_pattern(**{**GOOD, **options}), *words)


DENSE_HEAD = HeadPattern(((None, 1),))
PATTERN = make_range_pattern(**GOOD)
MASK = BlockMaskPattern.from_csr(16, 4, 2, [[0, 1, 3]], [[0, 0, 1]])
CALLS = {
    "offset": (lambda: HeadPattern(((None, 1),), 0.5), "offset=0.5; expected an integer"),
    "large offset": (lambda: HeadPattern(((None, 1),), 2**60), "offset=1152921504606846976; expected"),
    "no head patterns": (lambda: RangePattern(64, 1, (((None, 1),),)), "heads[0]=((None, 1),); expected a HeadPattern"),
    "one head pattern": (lambda: RangePattern(64, 1, DENSE_HEAD), "heads=HeadPattern", "expected a list or tuple"),
    "no heads": (lambda: RangePattern(64, 1, ()), "num_heads=0; expected 1 to"),
    "kv heads": (lambda: RangePattern(64, 1.0, (DENSE_HEAD,)), "num_kv_heads=1.0; expected an integer"),
    "dense pattern": (lambda: RangePattern.dense(64, 4.0, 2), "num_heads=4.0; expected an integer"),
    "rank": (lambda: PATTERN.tensor_parallel_slice(2, 2), "rank=2; expected 0 to 1; use the number of a rank of 2"),
    "negative rank": (lambda: PATTERN.tensor_parallel_slice(-1, 2), "rank=-1; expected 0 to 1"),
    "rank of a mask": (lambda: MASK.tensor_parallel_slice(4, 4), "rank=4; expected 0 to 3"),
    "float rank": (lambda: PATTERN.tensor_parallel_slice(0.0, 2), "rank=0.0; expected an integer"),
    "no ranks": (lambda: PATTERN.tensor_parallel_slice(0, 0), "size=0; expected 1 to"),
    "uneven": (lambda: PATTERN.tensor_parallel_slice(0, 3), "tensor_parallel_size=3 fits neither num_heads=4"),
    "length": (lambda: PATTERN.density(0), "seq_length=0; expected 1 to"),
    "float length": (lambda: PATTERN.attended_pairs(128.0), "seq_length=128.0; expected an integer"),
    "long": (lambda: MASK.density(64), "seq_length=64 has 4 blocks of 16, the block mask only 2; use a shorter"),
    "no length": (lambda: MASK.attended_pairs(-16), "seq_length=-16; expected 1 to"),
    "no function": (lambda: BlockMaskPattern.from_function(16, 2, 1, 4, "f"), "function='f'; expected a function"),
    "blocks": (lambda: BlockMaskPattern.from_function(16, 2, 1, 4.0, len), "num_blocks=4.0; expected an integer"),
    "result": (lambda: BlockMaskPattern.from_function(16, 2, 1, 4, lambda h, q, k: k), "expected bool[1], one per key"),
    "tables": (lambda: BlockMaskPattern(16, 2, 1, 2, ([0, 1, 2],)), "tables[0]=[0, 1, 2]; expected (indptr, indices)"),
    "no tables": (lambda: BlockMaskPattern(16, 2, 1, 2, None), "tables=None; expected one (indptr, indices) per"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_patterns(case):
    refuses(*CALLS[case])


# indptr, indices -> words
BAD_MASKS = {
    "empty row": (([0, 1, 1],), ([0],), "query block 1 attends nothing", "its own (the diagonal)"),
    "future": (([0, 1, 2],), ([1, 0],), "query block 0 lists key block 1; expected 0 to 0 (causal); remove it"),
    "negative": (([0, 1, 2],), ([0, -1],), "query block 1 lists key block -1; expected 0 to 1 (causal)"),
    "out of range": (([0, 1, 2],), ([0, 9],), "query block 1 lists key block 9; expected 0 to 1 (causal)"),
    "unsorted": (([0, 1, 3],), ([0, 1, 0],), "not strictly ascending; sort them"),
    "repeated": (([0, 1, 3],), ([0, 1, 1],), "not strictly ascending; sort them"),
    "indptr": (([0, 1, 5],), ([0, 1],), "indptr[0]=[0, 1, 5]; expected", "grow from 0 to len(indices[0])=2; count"),
    "falling": (([0, 2, 1, 3],), ([0, 1, 2],), "indptr[0]=[0, 2, 1, 3]; expected"),
    "from one": (([1, 2],), ([0, 0],), "indptr[0]=[1, 2]; expected"),
    "heads": (([0, 1],) * 3, ([0],) * 3, "for 3 heads; expected 1, num_kv_heads=2 or num_heads=4; give"),
    "lengths": (([0, 1], [0, 1, 2]), ([0], [0, 1]), "[1, 2] query blocks; expected the same number"),
    "floats": (([0.0, 1.0],), ([0],), "indptr[0] has dtype float64 and 1 dimensions; expected integers, 1-D"),
    "booleans": (([0, 1],), ([True],), "indices[0] has dtype bool"),
    "not in lists": ([0, 1, 3], [0, 0, 1], "indptr[0] has dtype int64 and 0 dimensions", "per pattern head"),
    "one array": (np.array([0, 1, 3]), np.array([0, 0, 1]), "expected a list with one array per pattern head; use ["),
    "nested": ([[[0, 1]]], [[0]], "indptr[0] has dtype int64 and 2 dimensions; expected integers, 1-D"),
    "ragged": ([[[0, 1], [2]]], [[0]], "indptr[0]=[[0, 1], [2]]; expected integers"),
    "counts": (([0, 1],), ([0], [0]), "indptr has 1 arrays and indices 2; expected one of each"),
    "nothing": ((), (), "indptr=[]; expected one array per pattern head"),
    "none": (None, None, "indptr=None; expected a list with one array per pattern head; use [indptr]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MASKS)
def test_block_masks(case):
    indptr, indices, *words = BAD_MASKS[case]
    refuses(lambda: BlockMaskPattern.from_csr(16, 4, 2, indptr, indices), *words)


def test_what_is_taken_as_it_is_meant():
    """Lists for tuples, NumPy's integers, a number of dense heads to spread."""
    same = make_range_pattern(
        block_size=np.int64(64), num_heads=np.int32(4), num_kv_heads=2, ranges=[[np.int64(2), 1], [None, 4]]
    )
    assert same == PATTERN and hash(same) == hash(PATTERN)
    assert type(same.block_size) is int and type(same.heads[0].ranges[0][0]) is int
    assert json.dumps(same.canonical()) == json.dumps(PATTERN.canonical())
    plain, narrow = (
        make_range_pattern(block_size=64, num_heads=4, num_kv_heads=2, ranges=(), window=window, sink_tokens=sink)
        for window, sink in ((200, 4), ([np.uint8(200)] * 2, np.uint8(4)))
    )
    assert narrow.key_blocks(0, 9).tolist() == [0, 5, 6, 7, 8, 9] and narrow == plain
    assert json.dumps(narrow.canonical()) == json.dumps(plain.canonical())
    assert HeadPattern((), 0, 200, 0, np.uint8(64)).key_blocks(9).tolist() == [5, 6, 7, 8, 9]
    assert RangePattern(64, 2, list(PATTERN.heads)) == PATTERN
    assert dense_kv_heads(2, 8) == dense_kv_heads({"spread": 2}, 8) == {0, 4}
    arrays = BlockMaskPattern.from_csr(16, 4, 2, np.array([[0, 1, 3]]), np.array([[0, 0, 1]]))
    assert arrays.canonical() == MASK.canonical()


def test_a_copy_holds_the_fields_alone():
    pattern = make_range_pattern(**GOOD)
    assert pattern.is_kv_efficient and "is_kv_efficient" in vars(pattern)
    twin = pickle.loads(pickle.dumps(pattern))
    assert twin == pattern and "is_kv_efficient" not in vars(twin)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 9), st.floats(), st.text(max_size=4), st.binary(),
    st.just(np.int64(2)), st.just(np.array([1, 2])), st.just(object()), st.lists(st.integers(-1, 4), max_size=3),
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 9), st.floats(0, 9)), st.integers(0, 5)), max_size=3),
    st.dictionaries(st.sampled_from(["last", "spread", "first"]), st.integers(-1, 5), max_size=2),
)  # fmt: skip
SETTINGS = [*GOOD, "slide", "head_step", "base_offset", "layer_index", "layer_step", "dense_heads"]


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(SETTINGS), JUNK, min_size=1, max_size=2))
def test_any_settings_make_a_sound_pattern_or_a_value_error(options):
    try:
        pattern = make_range_pattern(**{**GOOD, **options})
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert any(name in refusal for name in SETTINGS)
        return
    json.dumps(pattern.canonical())  # integers alone
    for head in set(pattern.heads):
        for query in (0, 5):
            assert head.key_blocks(query).tolist() == [key for key in range(query + 1) if head.attends(query, key)]


def slow_layer_step(stride, residues, pattern_heads):
    """The definition: every step, layer by layer."""

    def layers_needed(step):
        seen = set()
        for layer in range(stride):
            seen |= {(residue + layer * step) % stride for residue in residues}
            if len(seen) == stride:
                return layer + 1
        return stride + 1

    return min([pattern_heads, *range(1, stride)], key=layers_needed)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_layer_step_is_the_best_one(data):
    stride = data.draw(st.integers(2, 40))
    residues = data.draw(st.sets(st.integers(0, stride - 1), min_size=1, max_size=stride - 1))
    heads = data.draw(st.integers(1, 64))
    assert choose_layer_step(stride, residues, heads) == slow_layer_step(stride, residues, heads)


@pytest.mark.parametrize("stride", [4096, 20000, 2**24])
def test_the_search_for_a_layer_step_ends(stride):
    """Without its bound this takes minutes and more; the time limit of the test run would end it."""
    options = dict(GOOD, num_heads=6, num_kv_heads=3, ranges=((2, 1), (None, stride)), head_step=5)
    assert make_range_pattern(**options, layer_index=1).heads[0].offset > 0
