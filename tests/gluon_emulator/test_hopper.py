"""The Hopper kernels as plain Python (emulator.py), launched as on a GPU: what they compute, and how loading and
computing partitions wait for each other, in an order of events that chance decides."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction

from s2_megatron.kernels import dispatch as launch
from s2_megatron.kernels import trial
from s2_megatron.kernels.hopper import backward_loads as hopper_backward_loads
from s2_megatron.kernels.hopper import launch as hopper
from s2_megatron.kernels.hopper.parts import part_of_program
from s2_megatron.ops import api as attention
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import build_layout
from s2_megatron.ops.parts import attention_backward_dkdv, attention_delta, attention_forward
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.testing import kernel_trial
from s2_megatron.testing.oracle import check_against_eager, make_inputs, token_mask
from tests.conftest import HAS_GPU
from tests.gluon_emulator.emulator import Machine
from tests.kernels.placed_blocks import PAPER, check_placed_blocks
from tests.kernels.test_hopper import (
    MIX,
    check_documents,
    in_parts,  # noqa: F401 (a fixture)
    tiles,  # noqa: F401 (a fixture)
)
from tests.ops.test_attention import packed_case, pattern_of, random_mask
from tests.tiers import mostly_slow

F16 = torch.float16
pytestmark = [
    pytest.mark.op,
    pytest.mark.usefixtures("nan_scratch", "in_python"),
    pytest.mark.skipif(HAS_GPU, reason="where there is a GPU the kernels run on it"),
]
SEVERAL = ((2, 1), (4, 2), (None, 4))


@pytest.fixture(params=[0])
def in_python(request, monkeypatch):
    machine = Machine(request.param)
    monkeypatch.setattr(
        GluonJITFunction, "run", lambda kernel, *arguments, **options: machine.run(kernel, *arguments, **options)
    )
    monkeypatch.setattr(attention, "resolve_backend", lambda name, device_type: name)
    monkeypatch.setattr(launch, "_is_hopper", lambda device: True)
    monkeypatch.setattr(trial, "MEASURED", (trial.release(),))
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 2)


def check(pattern, dim, length, deterministic=True, batch=1, **options):
    inputs, grad_lse = make_inputs(pattern, length, dim, F16, "cpu", batch, form="sbhd")
    check_against_eager(
        inputs,
        grad_lse,
        pattern,
        "sbhd",
        token_mask(pattern, length),
        2 * dim**-0.5,
        backend="gluon",
        deterministic=deterministic,
        **options,
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 136, 256])
def test_head_dims(dim, deterministic):
    """Two query heads of a KV group in a tile."""
    check(pattern_of(((2, 1), (None, 2)), 64, 2, 1), dim, 410, deterministic)


@pytest.mark.parametrize("dim", [128, 192])
@pytest.mark.parametrize("length", [1, 64, 65, 640])
def test_two_query_blocks_in_a_tile(length, dim, monkeypatch):
    """With the kernel of dK and dV for many KV heads."""
    monkeypatch.setattr(hopper, "FEW_UNITS", 0)
    check(pattern_of(SEVERAL, 64, 2, 2), dim, length, batch=2 if length == 65 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("in_python", [1, 2], indirect=True)
def test_long_columns_in_pairs():
    """With query heads that share their keys, dQ in the same pass, and an odd number of blocks."""
    pattern = RangePattern(
        64, 2, tuple(HeadPattern(((2, 1), (None, 2)), offset) for offset in (0, 1) for _ in range(3))
    )
    check(pattern, 64, 1153, deterministic=False)


@pytest.fixture
def few_columns(in_python, in_parts, monkeypatch):  # noqa: F811
    """For so many multiprocessors: columns are divided into parts of a few steps."""
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 24)
    monkeypatch.setattr(hopper, "PART_STEPS", 2)


@pytest.mark.parametrize("in_python", mostly_slow([1, 2], 1), indirect=True)
@pytest.mark.usefixtures("few_columns")
@pytest.mark.parametrize(
    "heads, dim, length, batch, deterministic",
    [
        pytest.param((4, 1), 64, 833, 1, False, marks=pytest.mark.slow),
        pytest.param((4, 1), 64, 833, 1, True, marks=pytest.mark.slow),
        ((8, 1), 128, 449, 1, True),
        pytest.param((4, 2), 128, 500, 2, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_columns_in_parts(heads, dim, length, batch, deterministic):
    check(pattern_of(((2, 1), (None, 2)), 64, *heads), dim, length, deterministic, batch)


@pytest.mark.slow
@pytest.mark.usefixtures("few_columns")
def test_columns_in_parts_of_heads_that_differ():
    check(pattern_of(PAPER, 64, 4, 1, "query"), 64, 833)
    check(RangePattern(64, 2, MIX.heads[1:] * 2), 128, 600)


@pytest.mark.usefixtures("few_columns")
@pytest.mark.parametrize("deterministic", mostly_slow([False, True], True))
def test_columns_in_parts_of_masks(deterministic):
    check(random_mask(64, 4, 1, 1, 8), 64, 500, deterministic)


@pytest.mark.slow
@pytest.mark.usefixtures("few_columns")
@pytest.mark.parametrize("ranks", [2, 4])
def test_columns_in_parts_of_placed_blocks(ranks):
    check_placed_blocks(64, "paper", ranks, 8, "cpu", F16)


@pytest.mark.usefixtures("few_columns")
def test_columns_in_parts_with_wide_gradients_and_few_sums(monkeypatch):
    """The first column of each KV head in parts, and the others not: the sums would take too much."""
    monkeypatch.setattr(hopper, "MOST_SUMS", 2**18)
    pattern = pattern_of(((2, 1), (None, 2)), 64, 8, 2)
    (query, key, value, grad), _ = make_inputs(pattern, 700, 64, F16, "cpu", form="sbhd")
    call = AttentionCall(build_layout(pattern), 0.2, "sbhd", None, None, "gluon", True)
    out, lse = attention_forward(query, key, value, call)
    sums, grads = attention_delta(grad, out, lse, call), []
    for dtype in (F16, torch.float32):
        grads.append([torch.full(tensor.shape, torch.nan, dtype=dtype) for tensor in (key, value)])
        attention_backward_dkdv(grad, query, key, value, lse, sums, *grads[-1], call)
    for one, two in zip(*grads):
        assert torch.equal(one, two.to(F16)) and not torch.equal(one, two)


@gluon.jit
def last_part_first(index, schedule):
    beyond = (
        schedule.n_programs - schedule.n_rest * schedule.units
    )  # the long columns and their further parts come before
    return part_of_program(gl.where(index < beyond, beyond - 1 - index, index), schedule)


@pytest.mark.usefixtures("few_columns")
def test_parts_in_the_wrong_order_would_wait_for_ever(monkeypatch):
    monkeypatch.setattr(hopper_backward_loads, "part_of_program", last_part_first)
    with pytest.raises(AssertionError, match="nothing can go on"):
        check(pattern_of(((2, 1), (None, 2)), 64, 8, 1), 64, 449)


@pytest.mark.parametrize("pattern", [pattern_of(PAPER, 64, 4, 2, "query"), MIX], ids=["query", "mix"])
def test_heads_that_differ(pattern):
    check(pattern, 192, 450)


@pytest.mark.parametrize("dim", mostly_slow([128, 256], 128))
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 2), (2, 1, 2)], ids=str)
def test_block_masks(heads, diagonal, dim):
    check(random_mask(64, *heads, 8, diagonal=diagonal), dim, 500)


@pytest.mark.parametrize("pattern", [
    pattern_of(((2, 1), (None, 2)), 128, 2, 1), pattern_of(((1, 1), (None, 3)), 128, 2, 2),
    random_mask(128, 4, 2, 2, 4), random_mask(128, 2, 2, 2, 4, diagonal=False),
    pattern_of(((1, 1), (None, 2)), 256, 2, 2),
], ids=["ranges", "a window of one block", "mask", "mask without diagonal", "256"])  # fmt: skip
def test_larger_blocks(pattern):
    """Of 128 tokens and more: lists of parts of 64; the sequence ends inside of a part that is not its block's last."""
    check(pattern, 64 if pattern.block_size == 256 else 128, 430)


@pytest.mark.parametrize("dim", mostly_slow([128, 192], 128))
@pytest.mark.parametrize("ratio", [1, 2])
def test_packed(ratio, dim):
    pattern = pattern_of(((2, 1), (None, 2)), 64, 2, 2 // ratio)
    inputs, grad_lse, packed, mask = packed_case(
        pattern, [200, 1, 64, 150], [256, 64, 64, 192], dim, F16, "cpu", extra=7
    )
    check_against_eager(inputs, grad_lse, pattern, "thd", mask, 0.2, backend="gluon", packed=packed, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [128, 192])
def test_documents_do_not_see_nan(tiles, dim):  # noqa: F811
    check_documents(True, dim, "paper", "cpu", F16)


@pytest.mark.parametrize("dim", mostly_slow([128, 192], 128))
@pytest.mark.parametrize("kind", mostly_slow(["paper", "mask"], "mask"))
def test_placed_blocks_and_continued(kind, dim):
    check_placed_blocks(dim, kind, 2, 8, "cpu", F16)


@pytest.mark.slow
def test_placed_blocks_of_128():
    check_placed_blocks(64, "paper of 128", 2, 4, "cpu", F16)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 192])
def test_several_ranks_return_gradients_of_a_block(dim):
    check_placed_blocks(dim, "paper", 4, 8, "cpu", F16)


KIND = dict(
    dtype="float16",
    head_dim=64,
    heads_of_kv_head=2,
    n_ranges=2,
    heads_pair=True,
    mixed=False,
    packed=False,
    placed=False,
    deterministic=True,
)


@pytest.mark.parametrize(
    "flags", [{}, {"packed": True}, {"placed": True}, {"n_ranges": 0, "deterministic": False}], ids=str
)
def test_the_trial_for_a_new_triton_finds_no_difference(flags):
    kind = {**KIND, **flags}
    pattern = pattern_of(((2, 1), (None, 2)), 64, 4, 2) if kind["n_ranges"] else (4, 2)
    found = kernel_trial.differences("cpu", kind, pattern, 6)
    assert max(found.values()) < kernel_trial.TOLERANCE / 5, found
    assert set(found) >= {"out", "lse", "dQ", "dK", "dV"}


def test_the_trial_for_a_new_triton_sees_one_wrong_tile(monkeypatch):
    """A tile of the forward that has lost one of its steps."""

    def forget(query, key, value, out, *rest):
        real(query, key, value, out, *rest)
        out[:, 1, 128:192] *= 0.9

    real = hopper.forward
    monkeypatch.setattr(hopper, "forward", forget)
    monkeypatch.setattr(kernel_trial, "BLOCKS", 4)
    assert kernel_trial.reason("cpu", KIND, pattern_of(((2, 1), (None, 2)), 64, 4, 2)).startswith("out differs")


def test_the_trial_for_a_new_triton_says_what_does_not_compile(monkeypatch):
    def fail(*_):
        raise RuntimeError("at 5:10:\nno such operation")

    monkeypatch.setattr(hopper, "forward", fail)
    assert (
        kernel_trial.reason("cpu", KIND, pattern_of(((2, 1), (None, 2)), 64, 4, 2)) == "RuntimeError: no such operation"
    )
