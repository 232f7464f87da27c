"""S2CoreAttention by itself: what it computes, what it refuses, and how Megatron may rerun, offload and reload it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from s2_megatron.megatron.model import core_attention
from s2_megatron.megatron.model.core_attention import S2CoreAttention, S2SelfAttention
from s2_megatron.megatron.settings import S2Settings
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import PackedSequence, build_layout
from s2_megatron.patterns.ranges import make_range_pattern

HEADS, GROUPS, DIM, BLOCK = 8, 4, 16, 16


class Group:
    """A process group as far as a core attention looks at it."""

    def __init__(self, rank=0, size=1):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def make_config(**settings):
    defaults = dict(
        num_layers=2, hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, transformer_impl="local",
    )  # fmt: skip
    return TransformerConfig(**{**defaults, **settings})


def make_pattern(num_heads=HEADS, num_kv_heads=GROUPS, **settings):
    return make_range_pattern(
        block_size=BLOCK, num_heads=num_heads, num_kv_heads=num_kv_heads, ranges=((2, 1), (None, 4)), **settings
    )


def make_core(config=None, rank=0, size=1, **settings):
    arguments = dict(
        config=config or make_config(), layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
        cp_comm_type=None, softmax_scale=None, pg_collection=SimpleNamespace(tp=Group(rank, size)),
        pattern=make_pattern(),
    )  # fmt: skip
    return S2CoreAttention(**{**arguments, **settings})


def make_qkv(seq=96, batch=2, keys=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(seq, batch, HEADS, DIM), *([(keys or seq, batch, GROUPS, DIM)] * 2)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).requires_grad_() for shape in shapes]


def test_computes_s2_attention():
    query, key, value = make_qkv()
    expected = s2_attention(query, key, value, build_layout(make_pattern()))
    got = make_core()(
        query, key, value, None, attn_mask_type=AttnMaskType.causal, attention_bias=None, packed_seq_params=None
    )
    assert got.shape == (96, 2, HEADS * DIM)
    assert torch.equal(got, expected.flatten(2))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tensor_parallel_ranks_together_are_the_whole(size):
    """Also with fewer KV groups than ranks, where Megatron hands one group to several ranks and counts one group a
    rank."""
    query, key, value = make_qkv()
    whole = make_core()(query, key, value).view(96, 2, HEADS, DIM)
    local, ratio = HEADS // size, HEADS // GROUPS
    for rank in range(size):
        config = make_config(num_query_groups=max(GROUPS, size))
        heads = slice(rank * local, (rank + 1) * local)
        groups = slice(heads.start // ratio, (heads.stop - 1) // ratio + 1)
        got = make_core(config, rank, size)(query[:, :, heads], key[:, :, groups], value[:, :, groups])
        assert torch.allclose(got.view(96, 2, local, DIM), whole[:, :, heads], atol=1e-12), rank


def test_the_deterministic_backward_is_selected_by_megatrons_config(monkeypatch):
    calls = []
    monkeypatch.setattr(
        core_attention, "recompute_attention", lambda query, key, value, call, *_: calls.append(call) or query
    )
    for mode in (False, True):
        make_core(make_config(deterministic_mode=mode))(*make_qkv())
    assert [call.deterministic for call in calls] == [False, True]


def test_softmax_scale_from_the_argument_and_the_config():
    query, key, value = make_qkv()
    expected = s2_attention(query, key, value, build_layout(make_pattern()), softmax_scale=0.5).flatten(2)
    assert torch.equal(make_core(softmax_scale=0.5)(query, key, value), expected)
    assert torch.equal(make_core(make_config(softmax_scale=0.5))(query, key, value), expected)


def test_values_of_another_head_dim():
    """As multi-latent attention has them."""
    query, key, value = make_qkv()
    config = make_config()
    config.multi_latent_attention = True  # Megatron's config of it has more
    got = make_core(config, k_channels=DIM, v_channels=5)(query, key, value[..., :5])
    expected = make_core()(query, key, value).unflatten(2, (HEADS, DIM))[..., :5]
    assert torch.allclose(got, expected.flatten(2), rtol=0, atol=1e-14)


@pytest.mark.parametrize("padded", [False, True])
def test_packed_sequences(padded):
    tokens = 70
    query, key, value = (tensor[:, 0] for tensor in make_qkv(seq=tokens, batch=1))
    borders = torch.tensor([0, 20, 21, 60], dtype=torch.int32)
    starts = torch.tensor([0, 24, 28, 70], dtype=torch.int32) if padded else None
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders.clone(), cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts, max_seqlen_q=39, max_seqlen_kv=39,
    )  # fmt: skip
    got = make_core()(query, key, value, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=params)
    assert got.shape == (tokens, HEADS * DIM)
    for index, length in enumerate(borders.diff().tolist()):
        first = int((borders if starts is None else starts)[index])
        rows = slice(first, first + length)
        alone = make_core()(query[rows, None], key[rows, None], value[rows, None])
        assert torch.allclose(got[rows], alone[:, 0], atol=1e-12)
    params.max_seqlen_q = None
    assert torch.equal(make_core()(query, key, value, None, packed_seq_params=params), got)


@pytest.mark.parametrize(
    ("new", "mask_type"),
    [(1, AttnMaskType.no_mask), (20, AttnMaskType.no_mask), (20, AttnMaskType.causal_bottom_right)],
)
def test_static_inference_is_the_end_of_the_full_forward(new, mask_type):
    query, key, value = make_qkv()
    full = make_core()(query, key, value)
    got = make_core()(query[-new:], key, value, None, attn_mask_type=mask_type)
    assert torch.allclose(got, full[-new:], atol=1e-12)


def test_runs_again_under_recompute_and_with_offloaded_tensors():
    query, key, value = make_qkv()
    core = make_core()

    def gradients(function):
        return torch.autograd.grad(function(query, key, value).square().sum(), (query, key, value))

    expected = gradients(core)
    recomputed = gradients(lambda *qkv: torch.utils.checkpoint.checkpoint(core, *qkv, use_reentrant=False))
    offloaded = []

    def offload(tensor):
        offloaded.append(tensor.shape)
        return tensor.clone()

    def with_offload(*qkv):
        with torch.autograd.graph.saved_tensors_hooks(offload, lambda tensor: tensor.clone()):
            return core(*qkv)

    moved = gradients(with_offload)
    assert len(offloaded) >= 5, "q, k, v, out and LSE must go through save_for_backward"
    for one, two, three in zip(expected, recomputed, moved):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_adds_nothing_to_checkpoints_and_ignores_old_extra_state():
    parent = torch.nn.Module()
    parent.core_attention = make_core()
    assert not parent.state_dict()
    parent.load_state_dict({"core_attention._extra_state": torch.zeros(3)}, strict=True)
    with pytest.raises(RuntimeError, match=r"core_attention\.weight"):
        parent.load_state_dict({"core_attention.weight": torch.zeros(3)}, strict=True)


def test_layers_with_equal_patterns_share_a_layout(monkeypatch):
    monkeypatch.setattr(core_attention, "_layouts", {})
    query, key, value = make_qkv()
    first = make_core(pattern=make_pattern())(query, key, value)
    assert torch.equal(make_core(pattern=make_pattern())(query, key, value), first)
    assert len(core_attention._layouts) == 1
    assert not torch.equal(make_core(pattern=make_pattern(base_offset=1))(query, key, value), first)
    assert len(core_attention._layouts) == 2


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (dict(attention_dropout=0.1), "--attention-dropout 0.0"),
        (dict(window_size=(64, 0)), "--window-size"),
        (dict(qk_clip=True), "--qk-clip"),
        (dict(log_max_attention_logit=True), "--log-max-attention-logit"),
        (dict(flash_decode=True), "--flash-decode"),
        (dict(fp8_dot_product_attention=True), "set fp8_dot_product_attention=False"),
        (dict(fp8_multi_head_attention=True), "set fp8_multi_head_attention=False"),
        (dict(batch_invariant_mode=True), "--batch-invariant-mode"),
        (dict(experimental_attention_variant="dsa"), "--experimental-attention-variant"),
    ],
)
def test_refuses_a_config_it_cannot_honour(settings, flag):
    config = make_config()
    for name, value in settings.items():  # set afterwards: some of them Megatron itself checks against its installation
        setattr(config, name, value)
    (name,) = settings
    with pytest.raises(ValueError) as error:
        make_core(config)
    assert name in str(error.value)
    assert flag in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(attention_dropout=0.1), "--attention-dropout 0.0"),
        (dict(attention_type="cross"), "cross attention"),
        (dict(attn_mask_type=AttnMaskType.padding), "expected causal"),
        (dict(attn_mask_type=AttnMaskType.no_mask), "expected causal"),
        (dict(attn_mask_type=AttnMaskType.arbitrary), "expected causal"),
        (dict(k_channels=24), "--multi-latent-attention"),
        (dict(v_channels=24), "--multi-latent-attention"),
        (dict(pattern=make_pattern(num_heads=4)), "resolve the S2 config"),
        (dict(pattern=make_pattern(num_kv_heads=2)), "resolve the S2 config"),
    ],
)
def test_refuses_arguments_it_cannot_honour(arguments, words):
    with pytest.raises(ValueError) as error:
        make_core(**arguments)
    assert words in str(error.value)


def test_refuses_calls_it_cannot_honour():
    core = make_core()
    query, key, value = make_qkv()
    borders = torch.tensor([0, 96], dtype=torch.int32)
    others = torch.tensor([0, 50, 96], dtype=torch.int32)
    with pytest.raises(ValueError, match="attention_bias"):
        core(query, key, value, attention_bias=torch.zeros(1))
    for mask_type in (AttnMaskType.no_mask, AttnMaskType.padding, AttnMaskType.arbitrary, AttnMaskType.padding_causal):
        with pytest.raises(ValueError, match="attn_mask_type"):
            core(query, key, value, attn_mask_type=mask_type)
    with pytest.raises(ValueError, match="attn_mask_type"):
        core(query, key, value, attn_mask_type=AttnMaskType.padding)
    with pytest.raises(ValueError, match="'sbhd'; expected 'thd'"):
        core(
            query,
            key,
            value,
            packed_seq_params=PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=borders, cu_seqlens_kv=borders),
        )
    with pytest.raises(ValueError, match="same documents"):
        core(
            *(tensor[:, 0] for tensor in (query, key, value)),
            packed_seq_params=PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=others, max_seqlen_q=96
            ),
        )
    core.config.flash_decode = True
    with pytest.raises(ValueError, match="--flash-decode"):
        core(query, key, value)


def test_paths_around_the_core_raise():
    layer = S2SelfAttention.__new__(S2SelfAttention)
    torch.nn.Module.__init__(layer)
    layer.layer_number = 3
    with pytest.raises(ValueError, match="--flash-decode"):
        layer.flash_decode(sequence_len_offset=None)
    with pytest.raises(ValueError, match="StaticInferenceContext"):
        layer.flash_decode_and_prefill(None, None)


def test_packed_sequence_of_another_dtype_is_cast():
    """Megatron's own int32 is passed through, a user's int64 is cast rather than misread."""
    query, key, value = (tensor[:, 0] for tensor in make_qkv(batch=1))
    borders = torch.tensor([0, 40, 96])
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=56, max_seqlen_kv=56
    )
    expected = s2_attention(
        query, key, value, build_layout(make_pattern()), tensor_format="thd", packed=PackedSequence(borders.int(), 56)
    )
    assert torch.equal(make_core()(query, key, value, packed_seq_params=params), expected.flatten(1))


@pytest.mark.parametrize("packed", [False, True])
def test_inside_a_compiled_module(packed):
    """Two layers with other patterns and their projections in one graph, eager's numbers bit for bit, forward and
    backward."""

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cores = torch.nn.ModuleList(
                [make_core(), make_core(pattern=make_pattern(base_offset=1), layer_number=2)]
            )

        def forward(self, query, key, value, params):
            for core in self.cores:
                out = core(query, key, value, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=params)
                query = query + out.view(query.shape)
            return query

    tensors, params = make_qkv(batch=1), None
    if packed:
        tensors = [tensor.detach()[:, 0].requires_grad_() for tensor in tensors]
        borders = torch.tensor([0, 40, 96], dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=56, max_seqlen_kv=56
        )
    layers = Layers()
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    expected, got = layers(*tensors, params), compiled(*tensors, params)
    assert torch.equal(got, expected)
    for one, two in zip(
        torch.autograd.grad(got.sin().sum(), tensors), torch.autograd.grad(expected.sin().sum(), tensors)
    ):
        assert torch.equal(one, two)


CP_GROUP = Group(0, 2)


def make_parallel_core(**settings):
    groups = SimpleNamespace(tp=Group(), cp=CP_GROUP)
    return make_core(**{"config": make_config(context_parallel_size=2), "pg_collection": groups, **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            dict(s2_cp_comm_type="p2p"),
            r"layer 1 .*'p2p'; expected one of sparse, all_gather, a2a; set --s2-cp-comm-type",
        ),
        (
            dict(
                config=make_config(context_parallel_size=2, num_query_groups=1),
                s2_cp_comm_type="a2a",
                pattern=make_pattern(HEADS, 1),
            ),
            "--s2-cp-comm-type sparse",
        ),
        (
            dict(settings=S2Settings(seq_length=100)),
            r"--seq-length 100 with --context-parallel-size 2 .*use --seq-length 64 or 128",
        ),
    ],
)
def test_refuses_a_context_parallelism_that_does_not_fit(settings, words):
    with pytest.raises(ValueError, match=words):
        make_parallel_core(**settings)


def test_equal_layers_share_their_plan():
    first, second = make_parallel_core(), make_parallel_core(layer_number=2)
    gathered, moved = (
        make_parallel_core(s2_cp_comm_type="all_gather"),
        make_parallel_core(pattern=make_pattern(base_offset=1)),
    )
    assert first.context_parallel is second.context_parallel
    assert len({id(core.context_parallel) for core in (first, gathered, moved)}) == 3


def test_context_parallelism_refuses_a_prefix_and_an_unexpected_cut():
    query, key, value = make_qkv(seq=4 * BLOCK, keys=8 * BLOCK, batch=1)
    with pytest.raises(ValueError, match="--context-parallel-size 1 for inference"):
        make_parallel_core()(query, key, value, None)
    query, key, value = (tensor[:, 0] for tensor in make_qkv(seq=4 * BLOCK, batch=1))
    borders = torch.tensor([0, 8 * BLOCK], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=8 * BLOCK)
    core = make_parallel_core(s2_cp_comm_type="all_gather", settings=S2Settings(packed=True, packed_cut="sequence"))
    with pytest.raises(ValueError, match="packed_seq_params is PackedSeqParams, but the batch was cut by sequence"):
        core(query, key, value, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=params)
