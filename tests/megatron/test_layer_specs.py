"""Which core attention the layer specs give to which layer, under every way to cut the layers into pipeline stages."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.megatron import patches
from s2_megatron.megatron.layer_specs import apply_s2, global_layer_indices, s2_block_spec, s2_mtp_block_spec
from s2_megatron.megatron.model.check import check_model
from s2_megatron.megatron.model.core_attention import S2CoreAttention, S2LatentAttention, S2SelfAttention
from s2_megatron.megatron.model.dense_core import resolve_dense_core
from s2_megatron.megatron.model.norms import sequence_parallel_norm
from s2_megatron.megatron.settings import S2Run, S2Settings
from s2_megatron.patterns.ranges import make_range_pattern
from tests.megatron.without_gpt import require_gpt_model

LAYERS = 8


@pytest.fixture(autouse=True)
def first_stage(monkeypatch):
    """Megatron asks its parallel state, which only a training run initialises, for the pipeline rank."""
    monkeypatch.setattr("megatron.core.parallel_state.get_pipeline_model_parallel_rank", lambda: 0)


def make_config(kind=TransformerConfig, **settings):
    defaults = dict(
        num_layers=LAYERS, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0,
        normalization="RMSNorm", persist_layer_norm=False, transformer_impl="local", pipeline_dtype=torch.float32,
    )  # fmt: skip
    return kind(**{**defaults, **settings})


def make_sparsity(plan="DSSSDSSS", mtp_plan="", softmax_scale=None):
    """Every S layer has another offset, so that each pattern tells which layer it was made for."""

    def layer(name, index):
        if name == "D":
            return LayerSparsity("D", None)
        pattern = make_range_pattern(
            block_size=16, num_heads=4, num_kv_heads=2, ranges=((2, 1), (None, 16)), layer_index=index, layer_step=1
        )  # fmt: skip
        return LayerSparsity(name, pattern)

    layers = tuple(layer(name, index) for index, name in enumerate(plan))
    mtp = tuple(layer(name, len(plan) + index) for index, name in enumerate(mtp_plan))
    return ResolvedSparsity(layers, mtp, softmax_scale, block_size=16, num_heads=4, num_kv_heads=2, seq_length=256)


def core_of(layer_spec):
    return layer_spec.submodules.self_attention.submodules.core_attention


def block_spec(config, sparsity, settings=S2Settings(seq_length=256), **options):  # noqa: B008
    return s2_block_spec(config, S2Run(sparsity, settings), **options)


def test_dense_layers_stay_as_they_were():
    sparsity = make_sparsity()
    stock = get_gpt_decoder_block_spec(make_config(), use_transformer_engine=False, normalization="RMSNorm")
    spec = block_spec(make_config(), sparsity)
    assert len(spec.layer_specs) == LAYERS
    for index, layer in enumerate(spec.layer_specs):
        if sparsity.layers[index].pattern is None:
            assert repr(layer) == repr(stock.layer_specs[index])
            assert core_of(layer) is DotProductAttention
        else:
            assert core_of(layer).module is S2CoreAttention
            assert core_of(layer).params["pattern"] is sparsity.layers[index].pattern
            assert layer.submodules.self_attention.module is S2SelfAttention
    assert spec.layer_norm is stock.layer_norm
    # Megatron's entries are one shared object; editing it would have changed the dense layers too.
    assert core_of(stock.layer_specs[1]) is DotProductAttention


def test_dense_layers_by_our_kernels():
    spec = block_spec(make_config(), make_sparsity(), S2Settings(dense_core="s2"))
    pattern = core_of(spec.layer_specs[0]).params["pattern"]
    assert (pattern.num_heads, pattern.num_kv_heads, pattern.density(256)) == (4, 2, 1.0)


PIPELINES = {
    "one stage": dict(),
    "two": dict(pipeline_model_parallel_size=2),
    "four": dict(pipeline_model_parallel_size=4),
    "virtual": dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "first and last": dict(
        pipeline_model_parallel_size=3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=2
    ),
    "last": dict(pipeline_model_parallel_size=2, num_layers_in_last_pipeline_stage=3),
    "embedding and loss count": dict(
        pipeline_model_parallel_size=2,
        num_layers=6,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    ),
    "layout": dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*3|t*5L"),
    "virtual layout": dict(
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et|t*3|t|t*3L",
        virtual_pipeline_model_parallel_size=2,
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_every_layer_gets_its_own_pattern_once(monkeypatch, name):
    settings = dict(PIPELINES[name])
    stages = settings.get("pipeline_model_parallel_size", 1)
    virtual = settings.get("virtual_pipeline_model_parallel_size")
    layout = settings.pop("pipeline_model_parallel_layout", None)
    config = make_config(**settings)
    if layout is not None:
        config.pipeline_model_parallel_layout = PipelineParallelLayerLayout.from_str(layout, stages)
    monkeypatch.setattr("megatron.core.parallel_state.get_virtual_pipeline_model_parallel_world_size", lambda: virtual)
    sparsity = make_sparsity("S" * config.num_layers)
    seen = {}
    for pp_rank in range(stages):
        # Some of Megatron's arithmetic asks the parallel state instead of taking the rank.
        monkeypatch.setattr("megatron.core.parallel_state.get_pipeline_model_parallel_rank", lambda rank=pp_rank: rank)
        for vp_stage in [None] if virtual is None else range(virtual):
            indices = global_layer_indices(config, vp_stage, pp_rank)
            spec = block_spec(config, sparsity, vp_stage=vp_stage, pp_rank=pp_rank)
            assert len(spec.layer_specs) == len(indices)
            for index, layer in zip(indices, spec.layer_specs):
                assert core_of(layer).params["pattern"] is sparsity.layers[index].pattern
                assert core_of(layer).params["layer_index"] == index
                seen[index] = (vp_stage or 0, pp_rank)
    assert sorted(seen) == list(range(config.num_layers))
    # The layers run stage after stage, and virtual stage after virtual stage.
    assert sorted(seen, key=lambda index: (seen[index], index)) == list(range(config.num_layers))


def test_virtual_stages_of_eight_layers():
    config = make_config(**PIPELINES["virtual"])
    offsets = {(rank, stage): global_layer_indices(config, stage, rank)[0] for rank in range(2) for stage in range(2)}
    assert offsets == {(0, 0): 0, (0, 1): 4, (1, 0): 2, (1, 1): 6}


def test_mixture_of_experts_layers_keep_their_experts():
    config = make_config(num_moe_experts=4, moe_layer_freq=[0, 1] * 4, add_bias_linear=False)
    stock = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    spec = block_spec(config, make_sparsity())
    for ours, theirs in zip(spec.layer_specs, stock.layer_specs):
        assert repr(ours.submodules.mlp) == repr(theirs.submodules.mlp)
    assert core_of(spec.layer_specs[1]).module is S2CoreAttention


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norms_under_sequence_parallelism(normalization):
    config = make_config(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        normalization=normalization,
        qk_layernorm=True,
        mtp_num_layers=1,
    )
    spec = block_spec(config, make_sparsity())
    for layer in spec.layer_specs:
        names = ("input_layernorm", "pre_mlp_layernorm")
        assert all(getattr(layer.submodules, name) is sequence_parallel_norm for name in names)
        assert layer.submodules.self_attention.submodules.q_layernorm is sequence_parallel_norm
    assert spec.layer_norm is sequence_parallel_norm
    norm = spec.layer_norm(config=config, hidden_size=64, eps=1e-6)
    assert isinstance(norm, getattr(torch.nn, normalization))
    assert norm.eps == 1e-6
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
    assert block_spec(make_config(normalization=normalization), make_sparsity()).layer_norm is WrappedTorchNorm


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        (dict(persist_layer_norm=True), "--no-persist-layer-norm"),
        (dict(layernorm_zero_centered_gamma=True), "--apply-layernorm-1p"),
        (dict(normalization="L2Norm"), "--normalization"),
    ],
)
def test_norm_settings_that_torch_lacks(setting, flag):
    config = make_config(tensor_model_parallel_size=2, sequence_parallel=True)
    for name, value in setting.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=flag):
        sequence_parallel_norm(config, 64)


@pytest.fixture
def last_stage(monkeypatch):
    monkeypatch.setattr("megatron.core.parallel_state.is_pipeline_last_stage", lambda **kwargs: True)


def mtp_spec(config, sparsity):
    return s2_mtp_block_spec(config, S2Run(sparsity, S2Settings()), pp_rank=0)


def test_multi_token_prediction_layers(last_stage):
    sparsity = make_sparsity(mtp_plan="DS")
    config = make_config(mtp_num_layers=2, tensor_model_parallel_size=2, sequence_parallel=True)
    first, second = mtp_spec(config, sparsity).layer_specs
    assert core_of(first.submodules.mtp_model_layer) is DotProductAttention
    assert core_of(second.submodules.mtp_model_layer).params["pattern"] is sparsity.mtp_layers[1].pattern
    assert core_of(second.submodules.mtp_model_layer).params["layer_index"] == 1
    for layer in (first, second):
        assert all(
            getattr(layer.submodules, name) is sequence_parallel_norm for name in ("enorm", "hnorm", "layer_norm")
        )


def test_multi_token_prediction_must_fit(last_stage):
    with pytest.raises(ValueError, match=r"mtp_num_layers=2.*says 1"):
        mtp_spec(make_config(mtp_num_layers=2), make_sparsity(mtp_plan="S"))
    repeated = make_config(mtp_num_layers=2, mtp_use_repeated_layer=True)
    with pytest.raises(ValueError, match="mtp_use_repeated_layer"):
        mtp_spec(repeated, make_sparsity(mtp_plan="SS"))
    sparsity = make_sparsity(mtp_plan="S")
    (layer,) = mtp_spec(repeated, dataclasses.replace(sparsity, mtp_layers=sparsity.mtp_layers * 2)).layer_specs
    assert core_of(layer.submodules.mtp_model_layer).module is S2CoreAttention


def test_the_number_of_layers_must_fit():
    with pytest.raises(ValueError, match=r"num_layers=8.*for 4"):
        block_spec(make_config(), make_sparsity("DSSS"))


def test_other_attention_is_refused():
    stock = get_gpt_decoder_block_spec(make_config(), use_transformer_engine=False, normalization="RMSNorm")
    stock.layer_specs[3].submodules.self_attention.module = torch.nn.Linear
    with pytest.raises(ValueError, match="expected TransformerLayer around SelfAttention or MLASelfAttention"):
        block_spec(make_config(), make_sparsity(), stock=stock)


def test_multi_latent_attention():
    """S2 computes its dense layers, too: Megatron's local core takes one head dim."""
    settings = dict(qk_layernorm=True, rope_type="rope", sequence_parallel=True)
    config = make_config(MLATransformerConfig, tensor_model_parallel_size=2, **settings)
    sparsity = make_sparsity()
    for layer, spec in zip(sparsity.layers, block_spec(config, sparsity).layer_specs):
        attention = spec.submodules.self_attention
        assert attention.module is S2LatentAttention and attention.submodules.kv_layernorm is sequence_parallel_norm
        assert layer.pattern in (None, core_of(spec).params["pattern"])
        assert core_of(spec).params["pattern"].num_heads == 4


def test_dense_core_of_multi_latent_attention():
    sizes = dict(context_parallel_size=1, multi_latent_attention=True)
    assert resolve_dense_core(S2Settings(seq_length=128), transformer_impl="local", **sizes)[0] == "s2"
    assert resolve_dense_core(S2Settings(seq_length=128), transformer_impl="transformer_engine", **sizes)[0] == "stock"


DENSE_CORE = {
    # (choice, Transformer Engine, CP, packed, length): who computes the dense layers
    ("auto", True, 8, True, 131072): "stock",
    ("stock", True, 8, True, 131072): "stock",
    ("s2", True, 1, False, 128): "s2",
    ("auto", False, 1, False, 4096): "stock",
    ("auto", False, 1, False, 4097): "s2",
    ("auto", False, 1, True, 128): "s2",
    ("auto", False, 2, False, 128): "s2",
    ("stock", False, 1, False, 131072): "stock",
    ("stock", False, 1, True, 128): ValueError,
    ("stock", False, 2, False, 128): ValueError,
}


@pytest.mark.parametrize(("case", "expected"), DENSE_CORE.items())
def test_dense_core(case, expected):
    choice, engine, cp, packed, length = case
    settings = S2Settings(dense_core=choice, packed=packed, seq_length=length)
    sizes = dict(transformer_impl="transformer_engine" if engine else "local", context_parallel_size=cp)
    if expected is ValueError:
        with pytest.raises(ValueError, match="--s2-dense-core"):
            resolve_dense_core(settings, **sizes)
    else:
        assert resolve_dense_core(settings, **sizes)[0] == expected


def test_transformer_engine_does_not_take_rows_cut_as_one_sequence():
    sizes = dict(transformer_impl="transformer_engine", context_parallel_size=2)
    assert resolve_dense_core(S2Settings(packed=True), **sizes)[0] == "stock"
    assert resolve_dense_core(S2Settings(packed=True, packed_cut="sequence"), **sizes)[0] == "s2"
    with pytest.raises(ValueError, match="use --s2-dense-core s2 or auto"):
        resolve_dense_core(S2Settings(dense_core="stock", packed=True, packed_cut="sequence"), **sizes)


def make_run(**sparsity):
    return S2Run(make_sparsity(**sparsity), S2Settings(seq_length=256))


def make_model_config(**settings):
    require_gpt_model()
    from megatron.training.models.gpt import GPTModelConfig

    return GPTModelConfig(transformer=make_config(**settings), vocab_size=128)


def test_apply_without_a_sparsity_changes_nothing():
    model_config = make_model_config()
    before = dict(vars(model_config))
    apply_s2(model_config, None)
    assert vars(model_config) == before


def test_apply_sets_spec_and_scale(capsys):
    model_config = make_model_config()
    apply_s2(model_config, make_run(softmax_scale=0.25))
    assert model_config.transformer.softmax_scale == 0.25
    spec = model_config.transformer_layer_spec(model_config, vp_stage=None)
    assert core_of(spec.layer_specs[1]).module is S2CoreAttention
    assert "Megatron local" in capsys.readouterr().err


def test_megatron_asks_the_spec_for_multi_token_prediction_layers(last_stage, monkeypatch):
    """Its builder makes them dense otherwise. Applied twice it is patched once, and a model without S2 stays stock."""
    require_gpt_model()
    from megatron.training.models import gpt

    monkeypatch.setattr(gpt, "mtp_block_spec", inspect.unwrap(gpt.mtp_block_spec))
    monkeypatch.setattr(patches, "_asks_layer_spec", False)
    model_config = make_model_config(mtp_num_layers=1)
    stock = repr(gpt.mtp_block_spec(model_config, None))
    apply_s2(model_config, make_run(mtp_plan="S"))
    patched = gpt.mtp_block_spec
    (layer,) = patched(model_config, model_config.transformer_layer_spec(model_config)).layer_specs
    assert core_of(layer.submodules.mtp_model_layer).module is S2CoreAttention
    other = make_model_config(mtp_num_layers=1)
    assert repr(patched(other, None)) == stock
    apply_s2(other, make_run(mtp_plan="S"))
    assert gpt.mtp_block_spec is patched
    assert patched(make_model_config(), None) is None


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda config: setattr(config, "transformer_layer_spec", "a spec"), "--spec"),
        (lambda config: setattr(config, "builder", "somewhere.Else"), "somewhere.Else"),
        (lambda config: setattr(config.transformer, "softmax_scale", 0.5), "softmax_scale=0.25"),
        (lambda config: setattr(config.transformer, "transformer_impl", "inference_optimized"), "--transformer-impl"),
    ],
)
def test_apply_refuses_two_sources(prepare, words):
    model_config = make_model_config()
    prepare(model_config)
    with pytest.raises(ValueError, match=words):
        apply_s2(model_config, make_run(softmax_scale=0.25))


def test_apply_refuses_other_objects():
    model_config = make_model_config()
    for wrong in ((make_run(), model_config), (model_config, make_sparsity()), (model_config.transformer, make_run())):
        with pytest.raises(ValueError, match=r"apply_s2 got a .* write apply_s2\(model_config, run\)"):
            apply_s2(*wrong)


def test_a_layer_with_an_attention_of_another_kind_is_seen():
    """One that a script's own spec brought, behind apply_s2."""
    layer = TransformerLayer.__new__(TransformerLayer)
    torch.nn.Module.__init__(layer)
    layer.self_attention, layer.layer_number = torch.nn.Identity(), LAYERS
    sparsity = make_sparsity()
    assert sparsity.layers[-1].pattern is not None
    with pytest.raises(ValueError, match=rf"layers {LAYERS - 1} \(counted from 0\) were built without S2 attention"):
        check_model("sparse.yaml", sparsity, [torch.nn.ModuleList([layer])])
    layer.self_attention = S2SelfAttention.__new__(S2SelfAttention)
    torch.nn.Module.__init__(layer.self_attention)
    check_model("sparse.yaml", sparsity, [torch.nn.ModuleList([layer])])


def test_apply_refuses_a_missing_transformer_engine(monkeypatch):
    monkeypatch.setattr("megatron.core.extensions.transformer_engine.HAVE_TE", False)
    model_config = make_model_config()
    model_config.transformer.transformer_impl = "transformer_engine"
    with pytest.raises(ValueError, match="--transformer-impl local"):
        apply_s2(model_config, make_run())
