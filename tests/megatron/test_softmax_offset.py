"""--softmax-type off-by-one and learnable: S2's core attention beside Megatron's own, its parameter and its place in a
checkpoint; and one training that stops and resumes."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import GlobalMemoryBuffer

from s2_megatron.megatron.checkpoints.compare import StoredCheckpoint, compare_softmax_type
from s2_megatron.megatron.checkpoints.folder import CheckpointError
from s2_megatron.megatron.model.dense_core import resolve_dense_core
from s2_megatron.megatron.settings import S2Settings
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.tools.hf.torch_dist import TorchDistReader
from tests.megatron.test_core_attention import (
    BLOCK,
    DIM,
    GROUPS,
    HEADS,
    Group,
    make_config,
    make_core,
    make_pattern,
    make_qkv,
)
from tests.tiers import mostly_slow

DENSE = RangePattern.dense(BLOCK, HEADS, GROUPS)


@pytest.fixture
def make_stock(monkeypatch):
    """Megatron's local DotProductAttention, on the CPU."""
    for name in ("current_device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: "cpu")
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
    tracker = SimpleNamespace(fork=nullcontext)
    monkeypatch.setattr(dot_product_attention.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)

    def make(config, rank=0, size=1):
        groups = SimpleNamespace(tp=Group(rank, size))
        return DotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)

    return make


def differentiated(core, inputs, mask=None):
    """(out, the gradients of query, key and value, that of the offset or None)."""
    leaves = [tensor.detach().float().requires_grad_() for tensor in inputs]
    out = core(*leaves, mask)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    offset = core.softmax_offset
    return [out.detach(), *(leaf.grad for leaf in leaves), None if offset is None else offset.grad]


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_a_dense_layer_equals_megatrons(make_stock, softmax_type):
    config = make_config(softmax_type=softmax_type, init_method_std=1.0, masked_softmax_fusion=False)
    torch.manual_seed(3)
    stock = make_stock(config)
    torch.manual_seed(3)
    ours = make_core(config, pattern=DENSE)
    assert torch.equal(stock.softmax_offset, ours.softmax_offset)
    assert ours.softmax_offset.any() == (softmax_type == "learnable")
    assert {name: tensor.shape for name, tensor in stock.state_dict().items()} == {
        name: tensor.shape for name, tensor in ours.state_dict().items()
    }
    future = torch.ones(96, 96, dtype=torch.bool).triu(1)[None, None]
    expected, got = differentiated(stock, make_qkv(), future), differentiated(ours, make_qkv())
    assert (got[4] is None) == (softmax_type == "off-by-one")
    for one, two in zip(got, expected):
        assert two is None or torch.allclose(one, two, rtol=1e-5, atol=1e-5 * two.abs().max().item())
    plain = differentiated(make_core(pattern=DENSE), make_qkv())
    assert not torch.allclose(plain[0], got[0], rtol=0.05), "the offset must show"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_parameter_is_megatrons(make_stock, dtype, monkeypatch):
    """Its name, type, shape, and what a distributed checkpoint stores of it on every tensor-parallel rank."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # else every group has one rank to Megatron
    config = make_config(softmax_type="learnable", params_dtype=dtype)
    for rank in range(4):
        stock, ours = make_stock(config, rank, 4), make_core(config, rank, 4)
        (name,), (own_name,) = stock.state_dict(), ours.state_dict()
        assert name == own_name == "softmax_offset"
        assert ours.softmax_offset.dtype == stock.softmax_offset.dtype == dtype
        metadata = dict(dp_cp_group=Group())
        (key, theirs), (own_key, own) = (
            next(iter(core.sharded_state_dict("layers.", ((0, 1, 3),), metadata).items())) for core in (stock, ours)
        )
        assert key == own_key == "layers.softmax_offset"
        places = [
            (shard.key, shard.dtype, shard.local_shape, shard.global_shape, shard.global_offset, shard.replica_id)
            for shard in (theirs, own)
        ]
        assert places[0] == places[1] and places[0][2:5] == ((2,), (3, 8), (1, 2 * rank))
        ours.load_state_dict(stock.state_dict())
        assert torch.equal(ours.softmax_offset, stock.softmax_offset)
        # Each rank's heads count in the gradients' norm.
        assert ours.softmax_offset.tensor_model_parallel


def test_without_a_parameter_nothing_is_stored():
    for softmax_type in ("vanilla", "off-by-one"):
        core = make_core(make_config(softmax_type=softmax_type))
        assert not core.state_dict() and not core.sharded_state_dict("", (), dict(dp_cp_group=Group()))


def test_offsets_begin_as_those_of_the_stock_layer():
    options = dict(softmax_type="learnable", init_method_std=1.0)
    assert make_core(make_config(**options)).softmax_offset.abs().min() > 0
    assert not make_core(make_config(transformer_impl="transformer_engine", **options)).softmax_offset.any()


@pytest.mark.parametrize("transformer_impl", ["local", "transformer_engine"])
def test_layers_of_a_mixed_plan_store_what_the_dense_ones_do(transformer_impl):
    """Transformer Engine's dense core has an _extra_state beside its offset, Megatron's local one has none. Megatron
    neither saves nor loads an object that some layers have and others lack: a mixed plan's first load ended there."""
    core = make_core(make_config(softmax_type="learnable", transformer_impl=transformer_impl))
    stored = core.sharded_state_dict("core_attention.", [(0, 1, 3)], dict(dp_cp_group=Group()))
    has_state = transformer_impl == "transformer_engine"
    assert stored.keys() == {"core_attention.softmax_offset", *["core_attention._extra_state"] * has_state}
    if has_state:
        state = stored["core_attention._extra_state"]
        assert state.unique_key == "core_attention._extra_state/shard_1_3" and state.data is None
        loaded = {"softmax_offset": torch.ones(HEADS), "_extra_state": None}
        core.load_state_dict(loaded, strict=True)
        assert core.softmax_offset.all()


def test_tensor_parallel_ranks_together_are_the_whole():
    config = make_config(softmax_type="learnable", init_method_std=1.0)
    whole = make_core(config)
    expected = differentiated(whole, make_qkv())
    expected[0] = expected[0].view(96, 2, HEADS, DIM)
    for rank in range(4):
        heads, groups = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
        part = make_core(config, rank, 4)
        with torch.no_grad():
            part.softmax_offset.copy_(whole.softmax_offset[heads])
        query, key, value = make_qkv()
        leaves = [tensor.detach().float().requires_grad_() for tensor in (query, key, value)]
        out = part(leaves[0][:, :, heads], leaves[1][:, :, groups], leaves[2][:, :, groups])
        gradient = torch.linspace(-1, 1, whole.softmax_offset.numel() * 96 * 2 * DIM).view(96, 2, HEADS, DIM)
        out.backward(gradient[:, :, heads].flatten(2))
        assert torch.allclose(out.view(96, 2, 2, DIM), expected[0][:, :, heads], atol=1e-6)
        assert torch.allclose(part.softmax_offset.grad, expected[4][heads], rtol=1e-4, atol=1e-5)


def test_inference_with_a_prefix_is_the_end_of_the_full_forward():
    core = make_core(make_config(softmax_type="learnable", init_method_std=1.0))
    query, key, value = make_qkv()
    full = core(query, key, value)
    for new in (1, 20):
        assert torch.allclose(core(query[-new:], key, value, None, attn_mask_type=AttnMaskType.no_mask), full[-new:])


def test_kept_outputs_know_the_offset():
    """The second pass of a recomputed layer takes what the first one stored."""
    from s2_megatron.ops.recompute import keep_outputs

    settings = S2Settings(backend="reference", keep_attention_output=True)
    core = make_core(make_config(softmax_type="learnable", init_method_std=1.0), settings=settings)
    expected = differentiated(core, make_qkv())
    core.softmax_offset.grad = None
    leaves = [tensor.detach().float().requires_grad_() for tensor in make_qkv()]
    run = keep_outputs(core)
    with torch.no_grad():
        run(*leaves)
    out = run(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    got = [out.detach(), *(leaf.grad for leaf in leaves), core.softmax_offset.grad]
    assert all(map(torch.equal, got, expected))


def test_a_pattern_of_blocks_sees_the_offset_once_a_row():
    """Not once a block or a range: with values of 1 the output is the share that the keys have of the softmax."""
    core = make_core(make_config(softmax_type="off-by-one"), pattern=make_pattern())
    query, key, value = make_qkv()
    out = core(torch.zeros_like(query), key, torch.ones_like(value)).view(96, 2, HEADS, DIM)
    seen = torch.tensor([[make_pattern().heads[head].attends(row // BLOCK, block) for block in range(6)]
                         for head in range(HEADS) for row in range(96)]).view(HEADS, 96, 6)  # fmt: skip
    keys = torch.zeros(HEADS, 96)
    for row in range(96):
        own = row // BLOCK
        keys[:, row] = seen[:, row, :own].sum(-1) * BLOCK + row % BLOCK + 1
    assert torch.allclose(out[:, 0, :, 0].T.float(), keys / (keys + 1))


@pytest.mark.parametrize(
    "settings, ranks, words",
    [
        (dict(packed=True), 1, "packed documents"),
        (dict(), 2, "--cp-comm-type p2p .only a2a"),
        (dict(dense_comm_types=("a2a", "all_gather")), 2, "--cp-comm-type a2a all_gather .only a2a"),
        (dict(dense_comm_types=("a2a",)), 2, None),
        (dict(), 1, None),
    ],
)
def test_dense_layers_that_transformer_engine_does_not_take(settings, ranks, words):
    sizes = dict(transformer_impl="transformer_engine", context_parallel_size=ranks)
    ours = S2Settings(softmax_type="learnable", **settings)
    core, _ = resolve_dense_core(ours, **sizes)
    assert core == ("stock" if words is None else "s2")
    if words is not None:
        with pytest.raises(ValueError, match=rf"--softmax-type learnable.*{words}.*use --s2-dense-core s2 or auto"):
            resolve_dense_core(S2Settings(softmax_type="learnable", dense_core="stock", **settings), **sizes)
        assert resolve_dense_core(S2Settings(**settings), **sizes)[0] == "stock"


@pytest.mark.parametrize(
    "ours, theirs, resumed, weights",
    [
        ("learnable", "learnable", None, None),
        ("vanilla", "vanilla", None, None),
        ("off-by-one", "vanilla", "give --softmax-type vanilla, or add --finetune", ""),
        ("vanilla", "learnable", "give --softmax-type learnable, or add --finetune", ""),
        ("learnable", "vanilla", "the checkpoint lacks", "the checkpoint lacks"),
        ("learnable", "off-by-one", "the checkpoint lacks", "the checkpoint lacks"),
    ],
)
def test_a_checkpoint_of_another_softmax(capsys, ours, theirs, resumed, weights):
    """resumed, weights: what is refused where the optimizer is loaded, and where it is not; None: nothing is said."""
    run, stored = (Namespace(**{} if each == "vanilla" else {"softmax_type": each}) for each in (ours, theirs))
    for words, weights_only in ((resumed, False), (weights, True)):
        checkpoint = StoredCheckpoint("runs/a", stored, 5, weights_only)
        if words:
            with pytest.raises(CheckpointError, match=f"--load runs/a: .*--softmax-type {theirs}, .*{words}"):
                compare_softmax_type(run, checkpoint)
        else:
            compare_softmax_type(run, checkpoint)
            assert (f"trained with --softmax-type {theirs}" in capsys.readouterr().err) == (words is not None)


LEARNED = "--softmax-type learnable --train-iters 6"
# Each resumes the third iteration of one process. Its dense layer is Megatron's own, and S2's where there are CP ranks.
LAYOUTS = {
    "tp2_sp_cp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
    "cp2_a2a": (2, "--context-parallel-size 2 --s2-cp-comm-type a2a"),
    "kept_outputs": (
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --s2-keep-attention-output",
    ),
}


@pytest.fixture(scope="session")
def learned(lab):
    """(the run, its checkpoints)"""
    folder = lab.folder / "offsets"
    return lab.run("offsets", f"{LEARNED} --save {folder} --save-interval 3"), folder


def stored_offsets(folder, step):
    """[layers, heads]"""
    reader = TorchDistReader(folder / f"iter_{step:07d}")
    name = "decoder.layers.self_attention.core_attention.softmax_offset"
    return reader.read(name, (0, 0), reader.shapes[name])


def test_a_training_changes_the_offsets(learned):
    run, folder = learned
    early, late = stored_offsets(folder, 3), stored_offsets(folder, 6)
    assert early.shape == (4, 4) and len(run.losses) == 6
    assert (late != early).all(), "every head of every layer, the dense one too"


@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, "tp2_sp_cp2"))
def test_other_layouts_resume_and_train_the_same(lab, learned, same_training, name):
    run, folder = learned
    processes, flags = LAYOUTS[name]
    again = lab.folder / f"offsets_{name}"
    flags = f"{LEARNED} --load {folder} --ckpt-step 3 --save {again} --save-interval 3 {flags}"
    same_training(lab.run(f"offsets_{name}", flags, processes=processes), run, steps=3)
    assert torch.allclose(stored_offsets(again, 6), stored_offsets(folder, 6), atol=1e-5)
