"""What the op refuses: each ValueError names the argument, the value, what was expected and what to do. And what it
takes although it is written in another way."""

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s2_megatron.context_parallel.attention import ContextParallel
from s2_megatron.kernels import dispatch
from s2_megatron.ops import checks
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import PackedSequence, Placement, build_layout, layout_for
from s2_megatron.ops.parts import attention_forward
from s2_megatron.testing.oracle import random_mask
from tests.calls import KINDS, equal, make_call, results
from tests.ops.test_attention import GOOD, PAPER, pattern_of
from tests.refusing import refuses

PATTERN = pattern_of(PAPER, 16, 4, 2)
BORDERS = torch.tensor([0, 30, 64], dtype=torch.int32)


def packed_of(*borders, longest=64, padded=None, dtype=torch.int32):
    padded = None if padded is None else torch.tensor(padded, dtype=torch.int32)
    return PackedSequence(torch.tensor(borders, dtype=dtype), longest, padded)


META = torch.zeros(64, 1, 2, 32, device="meta")
# shapes of tensors or tensors, options of s2_attention, words of the message
BAD = {
    "heads": (dict(query=(64, 1, 6, 32)), {}, "query has 6 heads and key 2; the layout has 4 and 2; use the pattern"),
    "kv heads": (dict(key=(64, 1, 4, 32), value=(64, 1, 4, 32)), {}, "query has 4 heads and key 4; the layout has"),
    "value": (dict(value=(60, 1, 2, 32)), {}, "shapes do not fit", "value [60, 1, 2, 32]; expected the same batch"),
    "head dim": (dict.fromkeys(GOOD, (64, 1, 4, 288)), dict(layout=pattern_of(PAPER, 16, 4, 4)), "288; expected at mo"),
    "no head dim": (dict(query=(64, 1, 4, 0)), {}, "query has shape [64, 1, 4, 0]; expected at least one row and one"),
    "no rows": (dict(query=(0, 1, 4, 32)), {}, "query has shape [0, 1, 4, 32]; expected at least one row", "leave"),
    "no keys": (dict(key=(0, 1, 2, 32), value=(0, 1, 2, 32)), {}, "query has 64 rows and key 0"),
    "no dims": (dict(query=()), {}, "query has 0 dimensions; expected 4, tensor_format=sbhd"),
    "list": (dict(query=[[1.0]]), {}, "query is [[1.0]]; expected a dense tensor; use a torch.Tensor"),
    "array": (dict(key=np.zeros((64, 1, 2, 32))), {}, "key is array(", "expected a dense tensor"),
    "none": (dict(value=None), {}, "value is None; expected a dense tensor"),
    "sparse": (dict(query=torch.zeros(64, 1, 4, 32).to_sparse()), {}, "query is a Tensor of shape [64, 1, 4, 32]; exp"),
    "integers": (dict.fromkeys(GOOD, torch.zeros(64, 1, 4, 32, dtype=torch.int32)), {}, "query has dtype torch.int32"),
    "two types": (dict(key=torch.zeros(64, 1, 2, 32).half()), {}, "key is torch.float16 on cpu, query torch.float32"),
    "format": ({}, dict(tensor_format="sdbh"), "tensor_format='sdbh'; expected one of sbhd, bshd, bhsd, thd; use sbhd"),
    "format list": ({}, dict(tensor_format=["sbhd"]), "tensor_format=['sbhd']; expected one of sbhd"),
    "dimensions": ({}, dict(tensor_format="thd"), "query has 4 dimensions; expected 3, tensor_format=thd"),
    "longer query": (dict(query=(80, 1, 4, 32)), {}, "query has 80 rows and key 64"),
    "scale": ({}, dict(softmax_scale=-1.0), "softmax_scale=-1.0; expected a number, 1e-06 to 1e+06; use None"),
    "scale zero": ({}, dict(softmax_scale=0), "softmax_scale=0; expected a number, 1e-06 to 1e+06"),
    "scale text": ({}, dict(softmax_scale="0.1"), "softmax_scale='0.1'; expected a number, 1e-06 to 1e+06"),
    "scale bool": ({}, dict(softmax_scale=True), "softmax_scale=True; expected a number, 1e-06 to 1e+06"),
    "scale nan": ({}, dict(softmax_scale=float("nan")), "softmax_scale=nan; expected a number, 1e-06 to 1e+06"),
    "scale inf": ({}, dict(softmax_scale=float("inf")), "softmax_scale=inf; expected a number, 1e-06 to 1e+06"),
    "scale large": ({}, dict(softmax_scale=1e39), "softmax_scale=1e+39; expected a number, 1e-06 to 1e+06"),
    "scale denormal": ({}, dict(softmax_scale=1e-39), "softmax_scale=1e-39; expected a number, 1e-06 to 1e+06"),
    "scale tensor": ({}, dict(softmax_scale=torch.ones(())), "softmax_scale=a Tensor of shape []; expected a number"),
    "key on meta": (dict(key=META), {}, "key is torch.float32 on meta, query torch.float32 on cpu; expected the same"),
    "value on meta": (dict(value=META), {}, "value is torch.float32 on meta, query torch.float32 on cpu"),
    "backend": ({}, dict(backend="cuda"), "backend='cuda'; expected one of auto, gluon, triton, reference; use auto"),
    "backend none": ({}, dict(backend=None), "backend=None; expected one of auto"),
    "deterministic": ({}, dict(deterministic="no"), "deterministic='no'; expected True or False"),
    "return_lse": ({}, dict(return_lse=1), "return_lse=1; expected True or False"),
    "layout": ({}, dict(layout=((2, 1), (None, 4))), "layout=((2, 1), (None, 4)); expected a Layout or a pattern; use"),
    "no layout": ({}, dict(layout=None), "layout=None; expected a Layout or a pattern"),
    "placement": ({}, dict(placement=[0, 1]), "placement=[0, 1]; expected a Placement or None; use Placement.make"),
    "packed": ({}, dict(packed=BORDERS), "packed=a Tensor of shape [3]; expected a PackedSequence; use PackedSequence"),
    "packed tuple": ({}, dict(packed=(BORDERS, 34)), "expected a PackedSequence"),
    "packed sbhd": ({}, dict(packed=packed_of(0, 64)), "tensor_format=sbhd with packed=set; thd needs"),
}  # fmt: skip


def call(shapes, options):
    given = {name: shapes.get(name, shape) for name, shape in GOOD.items()}
    tensors = {name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in given.items()}
    return s2_attention(**tensors, **{"layout": PATTERN, "backend": "reference", **options})


@pytest.mark.parametrize("case", BAD)
def test_calls(case):
    shapes, options, *words = BAD[case]
    refuses(lambda: call(shapes, options), *words)


# of a packed call of 64 tokens: PackedSequence -> words; whether the kernels look at it, too, without S2_CHECK_VALUES
BAD_PACKED = {
    "list": (PackedSequence([0, 64], 64), True, "cu_seqlens=[0, 64]; expected an int32 tensor", "torch.tensor([0, ..."),
    "int64": (packed_of(0, 64, dtype=torch.int64), True, "cu_seqlens is torch.int64 on cpu; expected contiguous int32"),
    "floats": (packed_of(0, 64, dtype=torch.float32), True, "cu_seqlens is torch.float32 on cpu; expected contiguous"),
    "2-D": (PackedSequence(BORDERS[None], 64), True, "cu_seqlens has shape [1, 3]; expected one more entry than doc"),
    "one": (packed_of(0), True, "cu_seqlens has shape [1]; expected one more entry than documents, at least 2"),
    "strided": (PackedSequence(torch.zeros(6, dtype=torch.int32)[::2], 64), True, "int32 on cpu, not contiguous; exp"),
    "device": (PackedSequence(BORDERS.to("meta"), 64), True, "cu_seqlens is torch.int32 on meta; expected contiguous"),
    "padded": (packed_of(0, 64, padded=[0, 9, 64]), True, "cu_seqlens has 2 entries, cu_seqlens_padded 3; expected"),
    "padded list": (PackedSequence(BORDERS, 64, [0, 30, 64]), True, "cu_seqlens_padded=[0, 30, 64]; expected an int32"),
    "longest": (packed_of(0, 64, longest=64.0), True, "max_seqlen=64.0; expected an integer"),
    "longest text": (packed_of(0, 64, longest="64"), True, "max_seqlen='64'; expected an integer"),
    "longest tensor": (packed_of(0, 64, longest=torch.tensor(64)), True, "max_seqlen=a Tensor of shape []; expected"),
    "negative": (packed_of(0, 64, longest=-1), True, "max_seqlen=-1; expected 0 to"),
    "decreasing": (packed_of(0, 40, 30, 64), False, "cu_seqlens[2]=30 is less than cu_seqlens[1]=40; expected borders"),
    "from one": (packed_of(1, 64), False, "cu_seqlens[0]=1; expected 0; use the cumulative lengths, beginning with 0"),
    "beyond": (packed_of(0, 30, 65), False, "cu_seqlens[1]=30 and 35 tokens end behind the 64 tokens of query; expect"),
    "too small": (packed_of(0, 30, 64, longest=33), False, "max_seqlen=33; expected 34 or more", "use 34"),
    "overlap": (packed_of(0, 30, 60, padded=[0, 20, 64]), False, "cu_seqlens_padded[1]=20; expected 30 or more, where"),
    "padded beyond": (packed_of(0, 30, 60, padded=[0, 40, 64]), False, "cu_seqlens_padded[1]=40 and 30 tokens end be"),
    "before": (packed_of(0, 30, padded=[-1, 64]), False, "cu_seqlens_padded[0]=-1; expected 0 or more"),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("case", BAD_PACKED)
def test_packed_documents(case, backend, monkeypatch):
    """Values are looked at by the reference, and by the kernels when S2_CHECK_VALUES=1; all else always."""
    packed, always, *words = BAD_PACKED[case]
    tensors = [torch.zeros(64, heads, 32, dtype=torch.float16) for heads in (4, 2, 2)]
    started = []
    monkeypatch.setattr(dispatch, "forward", lambda *arguments: started.append(arguments))
    monkeypatch.delenv("S2_CHECK_VALUES", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = dict(tensor_format="thd", packed=packed, backend=backend)
    if backend == "triton" and not always:
        s2_attention(*tensors, PATTERN, **options)
        assert len(started) == 1
        monkeypatch.setenv("S2_CHECK_VALUES", "1")
    refuses(lambda: s2_attention(*tensors, PATTERN, **options), *words)
    assert len(started) == (backend == "triton" and not always)


def test_values_are_not_read_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setenv("S2_CHECK_VALUES", "1")
    assert checks.checks_values()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not checks.checks_values()


PLACEMENTS = {
    "floats": (([0.5, 1.5], 4), "query_block_ids has dtype float64 and 1 dimensions; expected integers, 1-D; use a li"),
    "nested": (([[0, 1]], 4), "query_block_ids has dtype int64 and 2 dimensions; expected integers, 1-D"),
    "none": ((None, 4), "query_block_ids has dtype object"),
    "twice": (([0, 0], 4), "query_block_ids=[0, 0]; expected strictly ascending blocks within 0..3; sort them"),
    "beyond": (([3, 4], 4), "query_block_ids=[3, 4]; expected"),
    "empty": (([], 4), "query_block_ids=[]; expected"),
    "blocks": (([0], 4.0), "n_blocks=4.0; expected an integer"),
    "no blocks": (([0], 0), "n_blocks=0; expected 1 to"),
    "float slots": (([0], 2, [[0.0, 1.0]]), "key_slot has dtype float64 and 2 dimensions; expected integers, 2-D"),
    "slots": (([0], 2, [0, 1]), "key_slot has dtype int64 and 1 dimensions; expected integers, 2-D; use an array [KV"),
    "few slots": (([0], 4, [[0]]), "key_slot has shape [1, 1]; expected [KV heads, n_blocks=4]"),
    "large slot": (([0], 1, [[2**31]]), "key_slot has the slot 2147483648; expected 0 to"),
    "negative slot": (([0], 1, [[-2]]), "key_slot has the slot -2; expected 0 to", "-1 for an absent block"),
    "device": (([0], 1, None, "gpu"), "device='gpu'; expected a device of torch; use e.g. 'cuda' or 'cpu'"),
    "pattern": (([0], 1, None, "cpu", "paper"), "pattern='paper'; expected a pattern or None"),
    "own slots": (([0], 2, [[0, 1]], "cpu", None, 1.0), "own_slots=1.0; expected an integer, 1 to 2; use the slots"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACEMENTS)
def test_placements(case):
    arguments, *words = PLACEMENTS[case]
    refuses(lambda: Placement.make(*arguments), *words)


GROUP = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
OTHERS = {
    "no pattern": (lambda: build_layout(16), "pattern=16; expected a RangePattern or a BlockMaskPattern; use make_ran"),
    "ranges": (lambda: build_layout(((16, 1),)), "pattern=((16, 1),); expected a RangePattern"),
    "layout": (lambda: build_layout(build_layout(PATTERN)), "pattern=RangeLayout(", "expected a RangePattern"),
    "device": (lambda: build_layout(PATTERN, "gpu"), "device='gpu'; expected a device of torch"),
    "device number": (lambda: build_layout(PATTERN, 1.5), "device=1.5; expected a device of torch"),
    "cp pattern": (lambda: ContextParallel(build_layout(PATTERN), GROUP), "pattern=RangeLayout(", "expected the patte"),
    "cp group": (lambda: ContextParallel(PATTERN, None), "group=None; expected a process group; use torch.distributed"),
    "cp type": (lambda: ContextParallel(PATTERN, GROUP, "ring"), "'ring'; expected one of sparse, all_gather, a2a"),
    "cp type list": (lambda: ContextParallel(PATTERN, GROUP, ["sparse"]), "['sparse']; expected one of sparse"),
    "cp cut": (lambda: ContextParallel(PATTERN, GROUP, cut="rows"), "cut='rows'; expected one of sequence, document; "),
    "cp received": (lambda: ContextParallel(PATTERN, GROUP, keep_received=1), "keep_received=1; expected True or Fals"),
    "cp scale": (
        lambda: ContextParallel(PATTERN, GROUP).attention(*map(torch.zeros, GOOD.values()), softmax_scale="1"),
        "softmax_scale='1'; expected a number, 1e-06 to 1e+06",
    ),
    "cp tensors": (lambda: ContextParallel(PATTERN, GROUP).attention(1, 2, 3), "query is 1; expected a dense tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_layouts_and_context_parallelism(case):
    refuses(*OTHERS[case])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_is_taken_for_a_layout(kind):
    leaves, options = make_call(kind, "cpu")
    expected = results(lambda *qkv: s2_attention(*qkv, **options), leaves)
    pattern = copy.deepcopy(options.pop("layout").pattern)
    assert equal(results(lambda *qkv: s2_attention(*qkv, pattern, **options), leaves), expected)
    layout = layout_for(pattern)
    s2_attention(*leaves, pattern, **options)
    assert layout_for(pattern) is layout, "built once"


@pytest.mark.parametrize("make", [lambda: pattern_of(PAPER, 16, 4, 2), lambda: random_mask(16, 4, 2, 2)])
def test_the_layout_lives_as_long_as_its_pattern(make):
    pattern = make()
    layout, expected = weakref.ref(layout_for(pattern)), pattern.canonical()
    assert layout_for(pattern).to("meta") is layout_for(pattern).to("meta")
    twin = pickle.loads(pickle.dumps(pattern))
    assert layout_for(twin) is not layout() and twin.canonical() == expected
    del pattern, twin
    gc.collect()
    assert layout() is None


@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_a_pattern_is_compiled(first):
    leaves, options = make_call("sbhd", "cpu")
    expected = results(lambda *qkv: s2_attention(*qkv, **options), leaves)
    pattern = pattern_of(PAPER, 16, 4, 2)
    options["layout"] = pattern
    if first == "eager":
        s2_attention(*leaves, **options)

    def attend(query, key, value):
        return s2_attention(query, key, value, **options)

    assert equal(results(torch.compile(attend, backend="aot_eager", fullgraph=True), leaves), expected)


JUNK = [
    None, True, 0, -1, 1, 2.5, float("nan"), "", "sbhd", "reference", b"x", [], [0, 64], (), (0.5,), {}, {"last": 1},
    object(), np.float32(0.5), np.zeros(3), torch.zeros(2), torch.zeros(64, 1, 4, 32), torch.zeros(64, 1, 2, 32, 1),
    torch.zeros(64, 1, 2, 32, dtype=torch.int64), torch.zeros(0, 1, 2, 32), torch.zeros(64, 1, 2, 0), torch.ones(()),
    torch.tensor([0, 30, 64], dtype=torch.int32), torch.zeros(64, 1, 4, 32, device="meta"), torch.float16,
    PATTERN, pattern_of(PAPER, 16, 2, 2), random_mask(16, 4, 2, 2, 2), build_layout(PATTERN), packed_of(0, 30, 64),
    packed_of(0, 30, 99), packed_of(9, 3), PackedSequence([0, 9], 9), PackedSequence(None, None), PATTERN.heads[0],
    Placement.make([0, 1], 4), Placement.make(range(4), 4, [range(4)] * 2), lambda: None, torch.device("cpu"), 10**30,
]  # fmt: skip
ARGUMENTS = [
    "query", "key", "value", "layout", "softmax_scale", "tensor_format", "packed", "placement", "backend",
    "deterministic", "return_lse",
]  # fmt: skip


@settings(max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.sampled_from(["sbhd", "thd"]), st.data())
def test_any_call_works_like_the_reference_or_is_a_value_error(form, data):
    """One or two arguments are replaced by anything; kernels and reference then agree on whether that is a call."""
    shape = (64,) if form == "thd" else (64, 1)
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(*shape, heads, 32, generator=generator) for name, heads in
            (("query", 4), ("key", 2), ("value", 2))}  # fmt: skip
    made.update(layout=PATTERN, tensor_format=form, packed=packed_of(0, 30, 64) if form == "thd" else None)
    names = data.draw(st.lists(st.sampled_from(ARGUMENTS), min_size=1, max_size=2, unique=True))
    made.update({name: data.draw(st.sampled_from(JUNK)) for name in names})
    outcomes = []
    for backend in ("reference", "auto"):
        try:
            result = s2_attention(**{"backend": backend, **made})
        except ValueError as error:
            outcomes.append(str(error))
        else:
            outcomes.append(result[0] if isinstance(result, tuple) else result)
    first, second = outcomes
    assert isinstance(first, str) == isinstance(second, str)
    if isinstance(first, str):
        assert "\n" not in first
        return
    assert first.shape == made["query"].shape and first.dtype == made["query"].dtype
    assert first.is_meta or torch.equal(first, second)


def test_calls_without_the_api_check_what_fits():
    """attention_forward is what context parallelism calls; it gets checked calls, whose tensors may still not fit."""
    tensors = [torch.zeros(GOOD[name]) for name in GOOD]
    call = AttentionCall(build_layout(pattern_of(PAPER, 16, 8, 2)), 0.2)
    refuses(lambda: attention_forward(*tensors, call), "query has 4 heads and key 2; the layout has 8 and 2")
