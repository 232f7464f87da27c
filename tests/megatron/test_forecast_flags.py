"""The forecast reads Megatron's flags without Megatron: names, defaults and FLOPs are compared with Megatron's own."""

import json
import re
import subprocess
import sys

import pytest

from s2_megatron.megatron.model.dense_core import resolve_dense_core
from s2_megatron.megatron.settings import S2Settings
from s2_megatron.tools.forecast.flags import CHECKED, FLAGS, MODULES, REFUSED, UNKNOWN, destination, read_flags
from s2_megatron.tools.forecast.flops import token_flops
from s2_megatron.tools.forecast.memory import rank_parameters
from s2_megatron.tools.forecast.run import dense_sparsity, training_run
from tests.megatron.arguments import ROOT, arguments

EXPERTS = {"--num-experts": "8", "--moe-shared-expert-intermediate-size": "96", "--moe-router-topk": "3"}
OTHER_SIZES = {
    "--num-experts": "4", "--moe-ffn-hidden-size": "192", "--moe-latent-size": "48", "--mamba-state-dim": "64",
    "--mamba-num-groups": "4", "--mamba-num-heads": "6", "--linear-num-key-heads": "4", "--linear-num-value-heads": "8",
    "--linear-key-head-dim": "32", "--linear-value-head-dim": "64", "--linear-conv-kernel-dim": "3",
}  # fmt: skip
LINES = (
    arguments({"--swiglu": None, "--untie-embeddings-and-output-weights": None}),
    arguments({"--ffn-hidden-size": "320", "--kv-channels": "16", "--vocab-size": "501"}),
    arguments({"--hybrid-layer-pattern": "*--M*EG-E", "--swiglu": None, **EXPERTS}, without=("--num-layers",)),
    arguments({"--hybrid-layer-pattern": "GM*EM*--", **OTHER_SIZES}, without=("--num-layers",)),
)
SCRIPT = """
import argparse, json, sys
from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu
install_if_no_gpu()
from megatron.training import training
from megatron.training.arguments import add_megatron_arguments
from s2_megatron.megatron.arguments import add_s2_arguments
from tests.megatron.arguments import parse
parser = argparse.ArgumentParser()
add_megatron_arguments(parser)
add_s2_arguments(parser)
found = {"flags": {}, "flops": [], "sizes": []}
for action in parser._actions:
    for name in action.option_strings:
        found["flags"][name] = dict(
            default=action.default if action.nargs != 0 else False, switch=action.nargs == 0, nargs=action.nargs,
            type=getattr(action.type, "__name__", "str"),
            choices=[getattr(choice, "name", choice) for choice in action.choices or ()])
from megatron.core.transformer.transformer_config import TransformerConfig
try:
    TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, recompute_granularity="selective",
        recompute_modules=["x"])
except AssertionError as error:
    found["modules"] = str(error).partition("Allowed")[2]
for line in json.loads(sys.argv[1]):
    sys.argv = ["pretrain_gpt_s2.py"]
    args, refused = parse(line)
    assert refused is None, refused
    args.padded_vocab_size = 512
    found["flops"].append(float(training.num_floating_point_operations(args, 1)))
    found["sizes"].append([args.ffn_hidden_size, args.kv_channels])
print("the result:", json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def megatron():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(LINES)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("the result:")[1])


@pytest.mark.slow
def test_flags_are_megatrons(megatron):
    known = megatron["flags"]
    for flag, (default, settings) in FLAGS.items():
        assert flag in known, flag
        assert known[flag]["switch"] == (settings.get("action") == "store_true"), flag
        assert known[flag]["default"] == default, flag
    assert len({destination(flag) for flag in FLAGS}) == len(FLAGS)


def test_types_and_choices_are_megatrons(megatron):
    """What Megatron takes is never refused here."""
    for flag, settings in ({flag: settings for flag, (_, settings) in FLAGS.items()} | CHECKED).items():
        known = megatron["flags"][flag]
        assert known["switch"] == (settings.get("action") == "store_true"), flag
        assert known["choices"] == list(settings.get("choices", ())), flag
        if not known["switch"]:
            kind = "enum_type_handler" if flag == "--attention-backend" else settings.get("type", str).__name__
            assert (known["nargs"], known["type"]) == (settings.get("nargs"), kind), flag


def test_parts_to_recompute_are_megatrons(megatron):
    of_other_layers = {"mhc", "gdp_qkv", "gdp_in_proj"}  # of Megatron's development branch
    assert set(re.findall(r"'(\w+)'", megatron["modules"])) - of_other_layers == set(MODULES)


def test_what_is_refused_exists(megatron):
    """A flag that Megatron renamed would no longer be seen."""
    assert [flag for flag in {**REFUSED, **UNKNOWN} if flag not in megatron["flags"]] == []


@pytest.mark.parametrize("case", range(len(LINES)))
def test_flops_and_derived_sizes_are_megatrons(megatron, case):
    args = read_flags(LINES[case])
    run = training_run(args, dense_sparsity(args))
    assert [run.ffn, run.head_dim] == megatron["sizes"][case] and run.vocabulary == 512
    # Megatron counts L^2 / 2 pairs of a dense head, here L (L + 1) / 2 are.
    assert token_flops(run).model * args.seq_length == pytest.approx(megatron["flops"][case], rel=1e-3)
    if not run.symbols:
        assert rank_parameters(run, 0) > 4 * run.layer_weights


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("length, ranks", [(2048, 1), (2048, 2), (4096, 1), (4160, 1), (8192, 1)])
def test_dense_layers_are_computed_as_in_training(implementation, length, ranks):
    flags = {"--transformer-impl": implementation, "--seq-length": str(length), "--context-parallel-size": str(ranks)}
    args = read_flags(arguments(flags))
    run = training_run(args, dense_sparsity(args))
    options = dict(transformer_impl=implementation, context_parallel_size=ranks)
    core, _ = resolve_dense_core(S2Settings(seq_length=length), **options)
    assert run.s2_dense == (core == "s2")


@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_dense_layers_with_a_softmax_offset_are_computed_as_in_training(comm_type, softmax_type, ranks):
    flags = {"--transformer-impl": "transformer_engine", "--softmax-type": softmax_type, "--cp-comm-type": comm_type}
    args = read_flags(arguments(flags | {"--context-parallel-size": str(ranks)}))
    run = training_run(args, dense_sparsity(args))
    settings = S2Settings(seq_length=args.seq_length, softmax_type=softmax_type, dense_comm_types=(comm_type,))
    core, _ = resolve_dense_core(settings, transformer_impl="transformer_engine", context_parallel_size=ranks)
    assert run.s2_dense == (core == "s2") == (softmax_type != "vanilla" and ranks == 2 and comm_type == "p2p")
