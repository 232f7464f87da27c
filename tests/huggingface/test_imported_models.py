"""import-hf as a user meets it: the scale of RoPE, the launch line that it prints, its comparison of logits."""

import json
import os
import re
import shlex
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from s2_megatron.tools.hf import launch_text
from tests.huggingface.forked import ROOT

CHECK = "s2_megatron.tools.hf.logit_check"
SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, initializer_range=0.2, max_position_embeddings=16384,
)  # fmt: skip
ROPE = dict(
    rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
LAYER, WORDS = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96, 256 * 64  # parameters


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "in"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=130, rope_parameters=dict(ROPE), **SIZES))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """With 300 words, of which the tokenizer knows 90: another padding than that of its words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("qwen") / "in"
    Qwen3ForCausalLM(Qwen3Config(vocab_size=300, tie_word_embeddings=True, **SIZES)).save_pretrained(folder)
    words = {f"w{number}": number for number in range(89)} | {"<eos>": 89}
    fast = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>").save_pretrained(folder)
    return folder


def launch_line(printed: str) -> list[str]:
    return shlex.split(printed[printed.index("CUDA_DEVICE_MAX_CONNECTIONS") :].replace("\\\n", " "))


def test_the_factor_of_rope_and_the_launch_line(tools, llama, tmp_path):
    out, _ = tools("import-hf", "--input", llama, "--output", tmp_path / "mcore")
    assert "logits equal transformers' (all layers; largest difference " in out
    line = launch_line(out)
    assert {"--rope-scaling-factor=32.0", "--hidden-dropout=0", "--attention-dropout=0", "--finetune"} <= set(line)
    assert {"--padded-vocab-size=256", "--vocab-size=129"} <= set(line)  # no token in the rows that are no words
    out, errors = tools("check", "--", *line)
    assert "nothing wrong found" in out and "dropout" not in errors
    line = [word for word in line if word != "--hidden-dropout=0"]  # Megatron's default is 0.1
    _, errors = tools("check", "--", *line)
    assert "warning: this run has --hidden-dropout 0.1 (0.1 is Megatron's default), and the model in --load" in errors
    tools("export-hf", "--load", tmp_path / "mcore", "--output", tmp_path / "again", "--as-dense")
    rope = json.loads((tmp_path / "again" / "config.json").read_text())["rope_parameters"]
    assert rope == ROPE


def test_more_rows_than_the_tokenizer_has_words(tools, qwen, tmp_path):
    out, _ = tools("import-hf", "--input", qwen, "--output", tmp_path / "mcore")
    line = launch_line(out)
    assert "--padded-vocab-size=384" in line and f"--tokenizer-model={qwen}" in line
    out, _ = tools("check", "--", *line)
    assert "nothing wrong found" in out


@pytest.mark.parametrize(
    "layers, said",
    [(2.5, "logits equal transformers' (the first 2 layers, not the rest, for its time; largest difference"),
     (0.5, "not compared with transformers: one layer of the model takes too much (time) here")],
)  # fmt: skip
def test_as_many_layers_as_there_is_time_for(tools, llama, tmp_path, layers, said):
    limit = {f"{CHECK}:MOST_FLOPS": 4 * 256 * (WORDS + layers * LAYER)}
    assert said in tools("import-hf", "--input", llama, "--output", tmp_path / "out", **limit)[0]


def test_a_wrong_import_is_refused(tools, llama, tmp_path):
    """A config whose RoPE Megatron does not compute, let through."""
    (tmp_path / "in").mkdir()
    for path in llama.iterdir():
        (tmp_path / "in" / path.name).symlink_to(path)
    content = json.loads((llama / "config.json").read_text())
    content["rope_parameters"]["original_max_position_embeddings"] = 1024
    (tmp_path / "in" / "config.json").unlink()
    (tmp_path / "in" / "config.json").write_text(json.dumps(content))
    let_through = {"s2_megatron.tools.hf.config_keys:_ROPES": {"llama3": dict.fromkeys(ROPE)}}
    arguments = ("import-hf", "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert "the imported model computes other logits than transformers" in tools.refused(*arguments, **let_through)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    out, _ = tools(*arguments, "--no-logit-check", **let_through)
    assert "logits not compared with transformers: --no-logit-check" in out


def test_weights_that_are_no_numbers(tools, llama, tmp_path):
    model = LlamaForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[5, 5] = float("nan")
    model.save_pretrained(tmp_path / "in")
    line = tools.refused("import-hf", "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert "model.layers.3.mlp.up_proj.weight holds NaN or infinity" in line
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("there, expected", [
    ((), ["--transformer-impl=local", "--no-gradient-accumulation-fusion"]),
    (("transformer_engine",), ["--no-gradient-accumulation-fusion"]),
    (("transformer_engine", "fused_weight_gradient_mlp_cuda"), []),
])  # fmt: skip
def test_the_launch_line_asks_for_no_package_that_is_missing(monkeypatch, there, expected):
    """Megatron's output layer adds gradients with a kernel of NVIDIA's Apex, whoever makes the other layers."""
    monkeypatch.setattr(launch_text, "find_spec", lambda name: name in there or None)
    stored = Namespace(max_position_embeddings=4096, tokenizer_type=None)
    words = launch_text.launch_words(Path("out"), [], stored, 100, launch_text.Gpus(1, 80.0))
    assert [
        word for word in words if word in ("--transformer-impl=local", "--no-gradient-accumulation-fusion")
    ] == expected


def test_the_script_is_the_launch_line(tools, llama, tmp_path):
    """Its data are random tokens until some are given; it can be moved, with its checkpoint."""
    out, _ = tools("import-hf", "--input", llama, "--output", tmp_path / "mcore", "--no-logit-check")
    assert f"Train it on with `{tmp_path}/mcore/train.sh --data-path PREFIX --save FOLDER`" in out
    line = launch_line(out)
    moved = (tmp_path / "mcore").rename(tmp_path / "a folder")
    (python := tmp_path / "python").write_text('#!/bin/sh\necho "$CUDA_DEVICE_MAX_CONNECTIONS"; printf "%s\\n" "$@"\n')
    python.chmod(0o755)

    def words(*given, cwd=ROOT, **settings):
        environment = {key: value for key, value in os.environ.items() if key != "CUDA_DEVICE_MAX_CONNECTIONS"}
        environment |= {"PYTHON": str(python), "PREFLIGHT": "0"} | settings
        return subprocess.run([moved / "train.sh", *given], env=environment, cwd=cwd, capture_output=True, text=True)

    start = ["1", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", f"{ROOT}/pretrain_gpt_s2.py"]
    line = line[line.index("pretrain_gpt_s2.py") + 1 :]
    weights, save = [f"--load={tmp_path}/mcore", "--finetune"], f"--save={tmp_path}/mcore-trained"
    flags = [word for word in line if word not in (*weights, save, "--mock-data")]
    assert len(flags) == len(line) - 4
    weights, save = [f"--load={moved}", "--finetune"], ["--save", f"{moved}-trained"]
    assert words("--lr=1").stdout.splitlines() == [*start, *flags, *weights, *save, "--mock-data", "--lr=1"]
    for data in (
        ["--data-path", "a b"], ["--data-path=x"], ["--mock-data"], ["--train-data-path", "x"],
        ["--per-split-data-args-path=x"],
    ):  # fmt: skip
        assert words(*data).stdout.splitlines() == [*start, *flags, *weights, *save, *data]
    own = ["--load", "x", "--mock-data"]
    assert words(*own).stdout.splitlines() == [*start, *flags, *save, *own]
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "latest_checkpointed_iteration.txt").write_text("3")
    for given in ([f"--save={tmp_path}/begun"], ["--save", f"{tmp_path}/begun"]):
        done = words(*given)
        assert done.stderr == f"train.sh: goes on from {tmp_path}/begun\n"
        assert done.stdout.splitlines() == [*start, *flags, f"--load={tmp_path}/begun", "--mock-data", *given]
    given = words("--lr=1", LAYOUT="--tensor-model-parallel-size=2 --sequence-parallel", GPUS_PER_NODE="2").stdout
    layout = ["--tensor-model-parallel-size=2", "--sequence-parallel"]
    start[4] = "--nproc-per-node=2"
    assert given.splitlines() == [*start, *flags, *layout, *weights, *save, "--mock-data", "--lr=1"]
    nodes = dict(NNODES="2", NODE_RANK="1", MASTER_ADDR="gpu07", MASTER_PORT="4242")
    start[3:5] = [
        "--nnodes", "2", "--node-rank", "1", "--master-addr", "gpu07", "--master-port", "4242", "--nproc-per-node=1",
    ]  # fmt: skip
    given = words("--lr=1", DRY_RUN="1", **nodes).stdout.splitlines()
    assert given[:3] == ["env", "CUDA_DEVICE_MAX_CONNECTIONS=1", str(python)] and given[3:-1] == [
        *start[1:], *flags, *weights, *save, "--mock-data",
    ]  # fmt: skip
    first = words(PREFLIGHT="1").stdout.splitlines()  # the check's output is not shown; then the run itself
    assert first.count("torch.distributed.run") == 1
    for settings, said in (
        (dict(NNODES="2"), "NODE_RANK is not set"), (nodes | dict(NODE_RANK="2"), "NODE_RANK=2; expected 0 to 1"),
        (dict(DRY_RUN="true"), "DRY_RUN=true; expected 0 or 1"), (dict(OUTPUT="x"), "OUTPUT=x is no setting"),
        (dict(NNODES="0"), "NNODES=0; expected a number"), (dict(GPUS_PER_NODE="x"), "GPUS_PER_NODE=x; expected"),
    ):  # fmt: skip
        done = words(**settings)
        assert done.returncode == 2 and done.stderr.startswith(f"error: train.sh: {said}") and not done.stdout
    done = words("--save", str(moved))
    assert done.returncode == 2 and "holds the imported weights; expected another folder" in done.stderr
    done = words(cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: train.sh: no pretrain_gpt_s2.py in") and done.stderr.count("\n") == 1


def test_a_model_that_takes_several_gpus(tools, llama, tmp_path):
    """train.sh spreads it over GPUs as large as is said, and `check` names the same flags for a line without them."""
    gpus = {"s2_megatron.tools.forecast.tables:MEMORY_GIB": {"h100": 0.157}}
    arguments = ("import-hf", "--input", llama, "--no-logit-check", "--output")
    out, _ = tools(*arguments, tmp_path / "mcore", "--train-on", "8xH100", **gpus)
    script = (tmp_path / "mcore" / "train.sh").read_text()
    layout = re.search(r"\{LAYOUT-(.+)\}", script).group(1).split()
    line = launch_line(out)
    expected = "takes about 0 of 0 GiB a GPU, with Transformer Engine, which it expects there\n"
    assert f"its training on 8192 tokens {expected}" in out and line[-len(layout) :] == layout
    assert "--use-distributed-optimizer" in layout and "local" not in script and "check --gpu H100 --" in script
    assert {"--nproc-per-node=8", "--bf16", "--global-batch-size=64"} <= set(line)
    out, errors = tools("check", "--gpu", "H100", "--", *line, **gpus)
    assert "8 processes (" in out and "fullest GPU" not in errors
    _, errors = tools("check", "--gpu", "H100", "--", *line[: -len(layout)], **gpus)
    assert "warning: the fullest GPU needs about 0 GiB and has 0: the run " in errors
    assert f"add {' '.join(layout)} (then about 0 GiB)" in errors
    small = {"s2_megatron.tools.forecast.tables:MEMORY_GIB": {"h100": 0.01}}
    out, _ = tools(*arguments, tmp_path / "none", "--train-on", "8xH100", **small)
    assert "note: no layout is known with which the training fits into 8 GPUs" in out
    for given in ("8xB100", "H100", "0xH100", "8", "32xH100"):
        assert f"--train-on {given}: expected the GPUs of one node" in tools.refused(
            *arguments, tmp_path / "x", "--train-on", given
        )
    assert "--gpu B100: its memory is not known" in tools.refused("check", "--gpu", "B100", "--", *line)
