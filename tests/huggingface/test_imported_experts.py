"""import-hf of models with experts, as transformers saves them: the logits, the way back, training, what is refused."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, MellumConfig, MixtralConfig, Qwen3MoeConfig

from s2_megatron.config.load import load_config
from s2_megatron.tools.hf.architecture import config_as_read, megatron_flags, shape_of_config
from s2_megatron.tools.hf.logit_check import extent
from s2_megatron.tools.hf.weights import BEFORE_EXPERTS, Experts, pieces
from tests.huggingface import stock_checkpoints
from tests.huggingface.forked import ROOT
from tests.huggingface.test_import_refusals import refused
from tests.huggingface.test_imported_models import launch_line
from tests.megatron.without_gpt import require_gpt_model
from tests.processes import python_path
from tests.tiers import mostly_slow

S, F = "sliding_attention", "full_attention"
WINDOW, NEAR = 37, 1e-5  # of the largest logit
SIZES = dict(
    vocab_size=128, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    initializer_range=0.2, max_position_embeddings=2048, num_experts_per_tok=2,
)  # fmt: skip
QWEN = SIZES | dict(intermediate_size=96, moe_intermediate_size=48, num_experts=6)
ROPE = dict(rope_type="default", rope_theta=50000.0)
YARN = dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=64)
# (config, which layers have experts, the plan's layers)
MODELS = {
    "qwen3_moe": (Qwen3MoeConfig(**QWEN, norm_topk_prob=True), "1111", None),
    "qwen3_moe, some layers": (
        Qwen3MoeConfig(**QWEN, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[1]), "0001", None,
    ),
    "mixtral": (MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=6), "1111", None),
    "mixtral windows": (
        MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=6, sliding_window=WINDOW), "1111", "W",
    ),
    "mellum": (
        MellumConfig(
            **QWEN, norm_topk_prob=False, sliding_window=WINDOW, layer_types=[F, S, F, S],
            mlp_layer_types=["sparse", "dense", "sparse", "sparse"], rope_parameters={F: ROPE, S: ROPE},
        ), "1011", "DW",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def imported(tools, tmp_path_factory):
    """name -> (the folder that transformers made, the checkpoint, what import-hf said and printed), made once."""
    require_gpt_model()
    root, made = tmp_path_factory.mktemp("experts"), {}

    def make(name):
        if name not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(MODELS[name][0])
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(0.1 * torch.randn_like(weight) * (weight.ndim == 1))
            folder = root / name.replace(" ", "_")
            model.save_pretrained(folder / "in")
            printed = tools("import-hf", "--input", folder / "in", "--output", folder / "out")
            made[name] = (folder / "in", folder / "out", *printed)
        return made[name]

    return make


@pytest.mark.parametrize("name", mostly_slow(MODELS, "qwen3_moe, some layers", "mixtral windows"))
def test_the_logits_and_the_way_back(tools, imported, tmp_path, name):
    config, layers, plan = MODELS[name]
    source, checkpoint, out, errors = imported(name)
    what = "all layers" if plan is None else f"all layers, {(4 // len(plan)) * plan.count('W')} with a window of 37"
    difference, largest = re.search(rf"equal transformers' \({what}; largest difference (\S+) of (\S+)\)", out).groups()
    assert float(difference) <= NEAR * float(largest) and float(largest) > 1
    assert "router_aux_loss_coef=0.001: train.sh balances no experts" in errors
    shape = shape_of_config(config_as_read(json.loads((source / "config.json").read_text()), "x"), 128)
    normalized = config.model_type == "mixtral" or config.norm_topk_prob
    assert shape.experts == Experts(tuple(one == "1" for one in layers), 6, 48, 2, normalized)
    if plan is not None:
        assert load_config(checkpoint / "windows.yaml").settings.layers == plan
    tools("export-hf", "--load", checkpoint, "--output", tmp_path / "again", "--stock")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    before, after = (AutoConfig.from_pretrained(folder).to_dict() for folder in (source, tmp_path / "again"))
    own = {
        "num_nextn_predict_layers",
        "router_aux_loss_coef",
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "_name_or_path",
    }
    if name == "qwen3_moe, some layers":
        own |= {"decoder_sparse_step", "mlp_only_layers"}  # said otherwise
    assert {key for key in before if before[key] != after.get(key)} <= own


@pytest.mark.parametrize("flag", ["--moe-router-topk=3", "--moe-router-topk=1", "--moe-router-pre-softmax"])
def test_the_check_sees_another_routing(tools, imported, flag):
    source, checkpoint, *_ = imported("mixtral windows")
    plan = dict(block_size=64, layers="W", specs=dict(W=dict(window=WINDOW)))
    flags = [flag] + ["--moe-router-pre-softmax"] * flag.endswith("=1")  # without, Megatron takes no single expert
    job = dict(source=str(source), load=str(checkpoint), plan=plan)
    assert tools.ask(compare=job)["status"] == 0
    answer = tools.ask(compare=job | dict(flags=flags))
    assert answer["status"] == 2 and "the imported model computes other logits than transformers" in answer["err"]


@pytest.mark.parametrize("name", ["mellum", "mixtral windows"])
def test_as_many_layers_as_there_is_time_for(tools, imported, tmp_path, name):
    """Of layers that are not stacked, and of those that are."""
    source = imported(name)[0]
    shape = shape_of_config(config_as_read(json.loads((source / "config.json").read_text()), "x"), 128)
    one = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96  # the attention, and two of the experts or the dense MLP
    limit = {"s2_megatron.tools.hf.logit_check:MOST_FLOPS": 4 * 256 * (128 * 64 + 2.5 * one)}
    out, _ = tools("import-hf", "--input", source, "--output", tmp_path / "out", **limit)
    assert re.search(
        r"equal transformers' \(the first 2 layers, \d with a window of 37, not the rest, for its time", out
    )
    rest = 4 * (3 * 128 * 64 + 2 * 256 * 128)
    all_experts = 4 * (64 * 16 * 12 + 6 * 3 * 64 * 48)
    assert extent(shape, 2 * (rest + 3 * all_experts)).layers == 3


TWO = "--expert-model-parallel-size=2 --moe-token-dispatcher-type=alltoall"


@pytest.mark.parametrize("layout", mostly_slow(("", TWO), ""))
def test_it_trains(tools, imported, tmp_path, layout):
    """By its own script, of which `check` finds nothing wrong; what it saves leaves again. Two processes share the
    checkpoint, which was written as one: they have the same losses."""
    _, checkpoint, out, _ = imported("qwen3_moe, some layers")
    assert "'--moe-layer-freq=[0,0,0,1]'" in out and "--moe-router-pre-softmax" in out
    assert "nothing wrong found" in tools("check", "--", *launch_line(out))[0]

    def losses(name, **settings):
        given = (
            "--train-iters=2 --seq-length=64 --global-batch-size=2 --lr-warmup-iters=0 --eval-iters=0 "
            f"--save-interval=2 --save={tmp_path}/{name}"
        )
        environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [checkpoint / "train.sh", *given.split()], env=environment | {"PYTHON": sys.executable} | settings,
            cwd=ROOT, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return [float(loss) for loss in re.findall(r"iteration +\d/ +2 .*? lm loss: (\S+)", done.stdout)]

    alone = losses("run")
    assert len(alone) == 2 and all(4 < loss < 9 for loss in alone)  # of random weights as large as these
    if layout:
        assert losses("two", LAYOUT=layout, GPUS_PER_NODE="2") == pytest.approx(alone, rel=1e-5)
    tools("export-hf", "--load", tmp_path / ("two" if layout else "run"), "--output", tmp_path / "again", "--stock")
    assert stock_checkpoints.written_config(tmp_path / "again")["model_type"] == "qwen3_moe"


def test_the_norm_that_transformer_engine_names_otherwise(tools, monkeypatch, tmp_path):
    """Its layers' checkpoints are loaded into local layers; import-hf writes it for both."""
    shape = stock_checkpoints.shape_of(experts=Experts((True,) * 4, 6, 48, 2, True))
    more = dict(num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=48)
    found = {}
    for left_out in (None, *BEFORE_EXPERTS):
        with monkeypatch.context() as patch:
            if left_out is not None:
                add = stock_checkpoints.TorchDistWriter.add
                patch.setattr(
                    stock_checkpoints.TorchDistWriter, "add",
                    lambda self, name, *rest: None if name.endswith(left_out) else add(self, name, *rest),  # noqa: B023
                )  # fmt: skip
            load = stock_checkpoints.write(tmp_path / str(left_out), shape, **more)
        job = dict(load=str(load), output=str(tmp_path / "x.npz"), dense_core="s2", s2_config=None, words=128)
        answer = tools.ask(logits=job)
        assert answer["status"] == 0, answer
        found[left_out] = np.load(tmp_path / "x.npz")["logits_65"]
        tools("export-hf", "--load", load, "--output", tmp_path / f"{left_out}-out", "--stock")
    assert all(np.array_equal(found[None], logits) for logits in found.values())


# What is refused, and taken

MOE = dict(SIZES, model_type="qwen3_moe", intermediate_size=96, moe_intermediate_size=48, num_experts=6)
MIXTRAL = dict(SIZES, model_type="mixtral", intermediate_size=48, num_local_experts=6)
MELLUM = MOE | dict(model_type="mellum", rope_parameters={F: ROPE, S: ROPE}, layer_types=[F] * 4)


@pytest.mark.parametrize(
    "content, message",
    [
        (MOE | dict(shared_expert_intermediate_size=48), "shared_expert_intermediate_size=48, expected no such key"),
        (MOE | dict(use_sliding_window=True, sliding_window=8), "use_sliding_window=True, expected false"),
        (MOE | dict(attention_bias=True), "attention_bias=True, expected false"),
        (MOE | dict(router_jitter_noise=0.1), "router_jitter_noise=0.1, expected no such key"),
        (MIXTRAL | dict(router_jitter_noise=0.1), "router_jitter_noise=0.1, expected 0"),
        (MIXTRAL | dict(norm_topk_prob=False), "norm_topk_prob=False, expected no such key"),
        (MIXTRAL | dict(num_experts=6), "num_experts=6, expected no such key"),
        (MIXTRAL | dict(sliding_window=8, layer_types=[S, F, S, F]), "layer_types[1]='full_attention', and transform"),
        (MOE | dict(num_local_experts=8), "num_experts=6, num_local_experts=8, expected one number of both"),
        (MOE | dict(num_experts=0), "num_experts=0, expected a whole number above 0"),
        (MOE | dict(num_experts_per_tok=7), "has num_experts_per_tok=7; expected at most its 6 experts"),
        (MIXTRAL | dict(num_experts_per_tok=1), "num_experts_per_tok=1; expected 2 or more, for Megatron scales no"),
        (MOE | dict(norm_topk_prob="yes"), "norm_topk_prob='yes', expected true or false"),
        (MOE | dict(mlp_only_layers=[4]), "mlp_only_layers=[4], expected numbers of some of the 4 layers, from 0"),
        (MOE | dict(decoder_sparse_step=0), "decoder_sparse_step=0, expected a whole number above 0"),
        (MOE | dict(router_aux_loss_coef="x"), "router_aux_loss_coef='x', expected a number from 0"),
        (MOE | dict(architectures=["Qwen2MoeForCausalLM"]), "expected Qwen3MoeForCausalLM"),
        (MOE | dict(model_type="qwen2_moe"), "model_type='qwen2_moe'; expected one of llama, qwen2, qwen3, mistral, m"),
        (MELLUM | dict(mlp_layer_types=["sparse"]), "mlp_layer_types=['sparse'], expected dense or sparse for each of"),
        (MELLUM | dict(num_mtp_layers=1), "num_mtp_layers=1, expected 0"),
        (MELLUM | dict(num_nextn_predict_layers=1), "num_nextn_predict_layers=1, expected 0"),
        (
            MELLUM | dict(rope_parameters={F: ROPE, S: ROPE | dict(rope_theta=7.0)}),
            "rope_parameters.sliding_attention={'rope_type': 'default', 'rope_theta': 7.0}, expected that of full_att",
        ),
        (
            MELLUM | dict(rope_parameters={F: ROPE | dict(rope_theta=7.5), S: ROPE}),
            "rope_parameters.full_attention: rope_parameters.rope_theta=7.5, expected a whole number",
        ),
        (MELLUM | dict(rope_parameters={F: ROPE | YARN, S: ROPE}), "rope_type='yarn'"),
    ],
)  # fmt: skip
def test_configs(tmp_path, capsys, content, message):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(content))
    shape = shape_of_config(config_as_read(MIXTRAL, "MIXTRAL"), 1)
    weights = {name: torch.zeros(size) for piece in pieces(shape) for name, size in piece.hf}
    save_file(weights, tmp_path / "in" / "model.safetensors")
    assert message in refused(capsys, tmp_path / "in")


def test_experts_that_are_one_tensor(imported, tmp_path, capsys):
    source = imported("mixtral windows")[0]
    weights = load_file(source / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".experts." not in name}
    fused = {f"model.layers.{layer}.mlp.experts.gate_up_proj": torch.zeros(6, 96, 64) for layer in range(4)}
    (tmp_path / "in").mkdir()
    save_file(kept | fused, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_bytes((source / "config.json").read_bytes())
    line = refused(capsys, tmp_path / "in")
    assert "model.layers.0.mlp.experts.gate_up_proj holds all experts of a layer; expected tensors of each" in line


def test_keys_of_published_folders_are_known():
    common = dict(
        attention_dropout=0.0, bos_token_id=1, eos_token_id=2, hidden_act="silu", output_router_logits=False,
        rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False,
        torch_dtype="bfloat16", transformers_version="4.51.0", use_cache=True,
    )  # fmt: skip
    qwen = MOE | common | dict(
        architectures=["Qwen3MoeForCausalLM"], attention_bias=False, decoder_sparse_step=1, max_window_layers=48,
        mlp_only_layers=[], norm_topk_prob=True, rope_scaling=None, router_aux_loss_coef=0.001,
        use_sliding_window=False,
    )  # fmt: skip
    mixtral = MIXTRAL | common | dict(architectures=["MixtralForCausalLM"], router_aux_loss_coef=0.02)
    for content in (qwen, mixtral):
        read = config_as_read(content, "published")
        shape = shape_of_config(read, 128)
        assert shape.experts == Experts((True,) * 4, 6, 48, 2, True) and shape.stacked
        flags = megatron_flags(read, shape)
        assert {"--num-experts=6", "--moe-router-topk=2", "--moe-ffn-hidden-size=48", "--rotary-base=1000000"} <= {
            *flags
        }
        assert not [flag for flag in flags if "pre-softmax" in flag or "layer-freq" in flag]
    none = config_as_read(qwen | dict(mlp_only_layers=[0, 1, 2, 3]), "dense")
    assert shape_of_config(none, 128).experts is None
