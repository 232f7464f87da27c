"""--s2-config window-size: Megatron's --window-size and --window-attn-skip-freq on S2's kernels, without a YAML."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest

from s2_megatron.config.load import SparsityConfig
from s2_megatron.megatron.sparsity import check_layer_window, check_windows, stock_sparsity
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern
from s2_megatron.tools.hf.architecture import shape_of_arguments, sparsity_of_arguments
from s2_megatron.tools.hf.stock import plan_windows
from tests.megatron.arguments import arguments, parse_cases
from tests.megatron.without_gpt import require_mtp
from tests.tiers import mostly_slow

SHAPE = dict(num_heads=4, num_kv_heads=2)
# Of 4 layers: (flags beside --window-size 99,0, the plan, the plan of the multi-token-prediction layers).
PLANS = {
    "every layer": ({}, "WWWW", ""),
    "every third sees all": ({"--window-attn-skip-freq": "3"}, "WWDW", ""),
    "a list": ({"--window-attn-skip-freq": "[0]+[1]*3"}, "DWWW", ""),
    "none": ({"--window-attn-skip-freq": "1"}, "DDDD", ""),
    # Megatron counts these layers from 1 again.
    "more predictions": ({"--window-attn-skip-freq": "2", "--mtp-num-layers": "2"}, "WDWD", "WD"),
    "a list for predictions": ({"--window-attn-skip-freq": "[1,0,0,1]", "--mtp-num-layers": "2"}, "WDDW", "WD"),
    "one prediction, repeated": (
        {"--window-attn-skip-freq": "2", "--mtp-num-layers": "2", "--mtp-use-repeated-layer": None},
        "WDWD",
        "WW",
    ),
}  # fmt: skip
# (flags, what the one line says)
REFUSED = {
    "no window": ({}, "--s2-config window-size without --window-size; expected the window in Megatron's flag; add"),
    "keys behind": ({"--window-size": "16,1"}, "--window-size 16,1: expected two numbers, how many keys"),
    "both sides": ({"--window-size": "16,16"}, "use --window-size 16,0"),
    "no limit behind": ({"--window-size": "16,-1"}, "use --window-size 16,0"),
    "one number": ({"--window-size": "16"}, "--window-size 16: expected two numbers"),
    "no limit on both sides": ({"--window-size": "(-1,-1)"}, "--window-size -1,-1: no window, every layer attends"),
    "no limit": ({"--window-size": "(-1,0)"}, "--window-size -1,0: no window, every layer attends everything"),
    "a frequency of 0": ({"--window-size": "16,0", "--window-attn-skip-freq": "0"}, "expected a number N from 1"),
    "a short list": ({"--window-size": "16,0", "--window-attn-skip-freq": "[1,0]"}, "2 entries; expected one for each"),
    "lists in a list": ({"--window-size": "16,0", "--window-attn-skip-freq": "[[1],[0]]*2"}, "a list with a 1 for"),
    "too many predictions": (
        {"--window-size": "16,0", "--window-attn-skip-freq": "[1,0,1,0]", "--mtp-num-layers": "5"},
        "--mtp-num-layers 5 with --window-attn-skip-freq [1, 0, 1, 0]: 4 entries",
    ),
    "too long": ({"--window-size": "1073741824,0"}, "--window-size 1073741824,0: specs.W.window: got 1073741825"),
}  # fmt: skip
STOCK = {"--window-size": "99,0", "--window-attn-skip-freq": "3"}


@cache
def results() -> dict[str, dict]:
    ours = {"--s2-config": "window-size"}
    flags = {name: {**ours, "--window-size": "99,0", **more} for name, (more, *_) in PLANS.items()}
    flags |= {name: {**ours, **more} for name, (more, _) in REFUSED.items()} | {"stock": STOCK}
    return dict(zip(flags, parse_cases([{"argv": arguments(each)} for each in flags.values()]), strict=True))


def yaml_sparsity(plan, mtp_plan=""):
    data = {"layers": plan, "specs": {"W": {"window": 100}}} | ({"mtp_layers": mtp_plan} if mtp_plan else {})
    sizes = dict(num_layers=4, seq_length=1024, mtp_num_layers=len(mtp_plan))
    return SparsityConfig.from_data(data).resolve(**SHAPE, **sizes)


@pytest.mark.parametrize("name", PLANS)
def test_the_sparsity_is_that_of_a_yaml(name):
    """--window-size w,0 sees w + 1 keys."""
    result = results()[name]
    _, plan, mtp_plan = PLANS[name]
    assert result["error"] is None and result["is_s2"], result["message"]
    expected = yaml_sparsity(plan, mtp_plan)
    assert result["args"]["s2_sparsity"] == expected.canonical_json()
    assert result["args"]["s2_density"] == expected.density()


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_window_is_refused_in_one_line(name):
    result = results()[name]
    assert result["error"] in ("ValueError", "ConfigError") and result["refused_by_megatron"] is None, result
    assert REFUSED[name][1] in result["message"] and "\n" not in result["message"]


def test_without_the_flag_the_model_is_megatrons():
    result = results()["stock"]
    assert result["error"] is None and not result["is_s2"]
    assert "no --s2-config: the model is Megatron's own" in result["printed"]


def namespace(**more):
    sizes = dict(num_layers=4, num_attention_heads=4, group_query_attention=True, num_query_groups=2, seq_length=1024)
    flags = dict(window_size=(99, 0), window_attn_skip_freq=3, mtp_num_layers=None)
    return SimpleNamespace(**sizes | flags | more)


def test_what_megatrons_own_model_computes():
    """So that a checkpoint of Megatron's own windows goes on under the same ones, and under no others."""
    ours = yaml_sparsity("WWDW")
    assert stock_sparsity(namespace()).canonical_json() == ours.canonical_json()
    dense = stock_sparsity(namespace(window_size=None)).canonical_json()
    assert dense == yaml_sparsity("DDDD").canonical_json()
    assert stock_sparsity(namespace(window_size=(16, 16), transformer_impl="local")).canonical_json() == dense
    assert stock_sparsity(namespace(window_size=(-1, 0))).canonical_json() == dense
    engine = namespace(window_size=(99, 16), transformer_impl="transformer_engine")
    assert stock_sparsity(engine).canonical_json() == ours.canonical_json()
    assert engine.window_size == (99, 16)
    old = namespace()
    del old.window_size, old.window_attn_skip_freq, old.mtp_num_layers
    assert stock_sparsity(old).canonical_json() == dense


def test_an_exported_model_has_megatrons_windows():
    """Of a checkpoint that was trained under the flag, and of one of Megatron's own."""
    ours = yaml_sparsity("WWDW").canonical_json()
    sizes = dict(hidden_size=64, ffn_hidden_size=128, kv_channels=16, padded_vocab_size=128, add_qkv_bias=False)
    form = dict(qk_layernorm=False, untie_embeddings_and_output_weights=True)
    for stored in (None, ours):
        args = namespace(s2_sparsity=stored, **sizes, **form)
        shape = shape_of_arguments(args, "checkpoint", None)
        sparsity = sparsity_of_arguments(args, shape, None)
        assert sparsity.canonical_json() == ours and plan_windows(sparsity) == (100, 100, None, 100)
    hybrid = namespace(num_layers=8, hybrid_layer_pattern="*-*-|*-*-", **sizes, **form)  # counts its MLPs, too
    assert shape_of_arguments(hybrid, "checkpoint", None) == shape
    assert plan_windows(sparsity_of_arguments(hybrid, shape, None)) == (100, None, 100, 100)
    args = namespace(window_size=(16, 16), **sizes, **form)
    with pytest.raises(ValueError, match="--window-size 16,16: expected two numbers"):
        sparsity_of_arguments(args, shape, None)


def test_a_model_without_a_window_is_said_to_be_dense():
    flags = namespace(window_attn_skip_freq=1)
    assert "leaves no layer a window: the model is DENSE" in stock_sparsity(flags).summary()
    check_windows(flags)


@pytest.mark.parametrize("layer_number, same", [(1, True), (2, True), (3, False), (4, True)])
def test_a_layer_is_what_the_model_config_says(layer_number, same):
    """A model that is built without the command line, with another pattern than its window."""
    config = namespace()
    pattern = make_range_pattern(block_size=16, **SHAPE, ranges=(), window=100)
    dense = RangePattern.dense(64, 4, 2)
    check_layer_window(pattern if same else dense, config, layer_number, "layer")
    for other in (
        dense if same else pattern,
        make_range_pattern(block_size=16, **SHAPE, ranges=(), window=99),
        make_range_pattern(block_size=16, **SHAPE, ranges=(), window=100, sink_tokens=1),
        make_range_pattern(block_size=16, **SHAPE, ranges=(), window=100, dense_heads=[1]),
    ):
        with pytest.raises(ValueError, match=r"^layer: window_size=.*use --s2-config window-size, or drop"):
            check_layer_window(other, config, layer_number, "layer")
    check_layer_window(other, namespace(window_size=None), layer_number, "layer")


# Windows that end inside of a block, with documents around them; two ranks of 2 x 64 tokens each under CP 2.
WINDOWS = "--window-size 69,0 --window-attn-skip-freq 3 --seq-length 256 --max-position-embeddings 256"
PREDICTED = "--window-size 20,0 --window-attn-skip-freq [1,0,0,1] --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"
LAYOUTS = {
    "one_process": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "cp2": (2, "--context-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}


@pytest.fixture(scope="module")
def megatrons_own(lab):
    """Ten iterations of Megatron's local core, with a checkpoint after five."""
    folder = lab.folder / "own_windows"
    run = lab.run("own_windows", f"{WINDOWS} --train-iters 10 --save {folder} --save-interval 5", sparsity=False)
    return folder, run


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, "one_process"))
def test_losses_are_those_of_megatrons_local_core(lab, megatrons_own, same_training, layout):
    """Its checkpoint goes on under the flag, optimizer included: the sparsity is found to be the same."""
    folder, own = megatrons_own
    processes, flags = LAYOUTS[layout]
    run = lab.run(
        f"windows_{layout}",
        f"{WINDOWS} --s2-config window-size --train-iters 10 --load {folder} --ckpt-step 5 {flags}",
        processes=processes,
    )
    assert "window 70" in run.output and "another sparsity" not in run.output
    same_training(run, own, steps=5)


@pytest.mark.slow
def test_losses_with_a_list_and_more_predictions(lab, same_training):
    require_mtp()
    own = lab.run("own_list", f"{PREDICTED} --train-iters 10", sparsity=False)
    run = lab.run("windows_list", f"{PREDICTED} --s2-config window-size --train-iters 10")
    assert "mtp 0" in run.output
    same_training(run, own)


@pytest.mark.slow
def test_another_window_is_another_sparsity(lab, megatrons_own):
    folder, _ = megatrons_own
    flags = f"{WINDOWS.replace('69', '68')} --s2-config window-size --train-iters 10 --load {folder} --ckpt-step 5"
    assert "window 70 " in (output := lab.run("other_windows", flags, fails=True).output)
    assert "was trained with another sparsity" in output
