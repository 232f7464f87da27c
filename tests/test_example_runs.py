"""The examples run, at CPU size and shortened, and print what examples/README.md says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from s2_megatron.megatron.records.loss_log import read_loss_log
from tests.megatron.without_gpt import require_gpt_model
from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SOURCED = ("launch.sh", "small.sh", "checks.sh")  # by the others
LOSS = r"(\d\.\d{4})"


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """Where the examples write; they share the corpus."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def run(runs):
    """run(file of examples/, settings) -> what it printed."""

    def run_example(name: str, **settings) -> str:
        if name.endswith(".sh"):  # it trains a GPT
            require_gpt_model()
        environment = {**os.environ, "PYTHON": sys.executable, "RUNS": str(runs), "OMP_NUM_THREADS": "1", **settings}
        environment["PYTHONPATH"] = python_path()
        command = ["bash"] if name.endswith(".sh") else [sys.executable]
        done = subprocess.run(
            [*command, str(EXAMPLES / name)], env=environment, cwd=runs, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run_example


def losses(output: str) -> list[float]:
    """Of the lines "iteration ... loss"."""
    return [float(loss) for loss in re.findall(rf"iteration \d+ of \d+: loss {LOSS}", output)]


def last_losses(output: str) -> list[float]:
    """Of the last line, "validation loss: ..."."""
    last = output.splitlines()[-1]
    assert last.startswith("validation loss: ")
    return [float(loss) for loss in re.findall(LOSS, last)]


@pytest.mark.slow
def test_the_op(run):
    output = run("attention_op.py")
    assert "local 4 + stride 8, 4 offsets: 31.0% of the causal pairs" in output
    (difference,) = re.findall(r"largest difference from PyTorch's attention: (\S+)", output)
    assert 0 < float(difference) < 1e-5


@pytest.mark.slow
def test_a_refused_setting_is_one_line(tmp_path):
    """It is not lost in torchrun's report."""
    environment = {**os.environ, "PYTHON": sys.executable, "RUNS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(EXAMPLES / "long_context_cp.sh")]
    done = subprocess.run(
        command, env=environment | {"SEQ_LENGTH": "40960"}, cwd=tmp_path, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    line = done.stderr.splitlines()[-1]
    assert (
        line.startswith("error: Megatron refuses these flags: max_position_embeddings (32768) must be greater than")
        and done.stderr.count("error:") == 1
    )


@pytest.mark.parametrize(
    "script, setting, words",
    [
        ("dense_to_s2.sh", "ITERATIONS=abc", "expected a number, 1 or more, such as ITERATIONS=60"),
        ("dense_to_s2.sh", "CHOOSE=yes", "expected a number, 1 or more, such as CHOOSE=2"),
        ("moe_expert_parallel.sh", "ITERATIONS=0", "expected a number, 1 or more"),
        ("own_pattern/run.sh", "ITERATIONS=1 2", "expected a number, 1 or more"),
        ("long_context_cp.sh", "CP=08", "expected a number, 1 or more, such as CP=2"),
        ("long_context_cp.sh", "SEQ_LENGTH=-1", "expected a number, 1 or more, such as SEQ_LENGTH=2048"),
        (
            "long_context_cp.sh",
            "CP=3",
            "whole blocks of 64 tokens, as context parallelism cuts the sequence; use one of: 2 4 8 16\n",
        ),
        ("long_context_cp.sh", "CP=32", "expected ranks that cut SEQ_LENGTH=2048 into 2 * CP pieces"),
        ("long_context_cp.sh", "SEQ_LENGTH=2000", "expected 2 * CP pieces of whole blocks"),
        ("long_context_cp.sh", "SEQ_LENGTH=100", "use a multiple of 256\n"),
        ("own_pattern/run.sh", "RUNS={file}", "{file} is no folder; expected a folder, there or to be made"),
        ("existing_launch/run.sh", "RUNS={file}/a/b", "{file} is no folder"),
        ("convert/run.sh", "MODEL={file}.none", "expected a folder or a .gguf that is there"),
        ("dense_beside_s2.sh", "RUNS={file}.gone", "{file}.gone is no folder"),
    ],
)
def test_a_wrong_setting_starts_nothing(tmp_path, script, setting, words):
    (file := tmp_path / "file").touch()
    Path(f"{file}.gone").symlink_to("nowhere")
    setting, words = setting.format(file=file), words.format(file=file)
    name, _, value = setting.partition("=")
    environment = {**os.environ, "PYTHON": sys.executable, "RUNS": str(tmp_path / "runs"), name: value}
    done = subprocess.run(["bash", str(EXAMPLES / script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {Path(script).name}: {setting}; ") and words in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_existing_launch(run):
    output = run("existing_launch/run.sh", ITERATIONS="10")
    changed = re.findall(r"^([<>])  ", output, re.M)
    assert sorted(changed) == ["<", ">", ">", ">", ">"]
    assert re.search(r"│ 0, 2 +│ S +│ s2 ", output)
    dense, sparse = last_losses(output)
    assert dense != sparse and abs(dense - sparse) < 0.1
    assert max(dense, sparse) < losses(output)[0] - 1


@pytest.mark.slow
def test_dense_beside_s2(run, runs):
    output = run("dense_beside_s2.sh", ITERATIONS="20")
    assert len(losses(output)) == 6  # iterations 1, 10 and 20 of two runs
    assert re.search(r"s2 and dense are not told apart|s2 is (better|worse) than dense", " ".join(output.split()))
    page = (runs / "compare.html").read_text()
    assert "dense" in page and "s2" in page and len(page) > 10000


@pytest.mark.slow
def test_long_context(run):
    output = run("long_context_cp.sh", ITERATIONS="4")
    assert re.search(r"│ 0 +│ sparse +│ +0\.0781 │", output)
    one_rank, two_ranks = last_losses(output)
    assert abs(one_rank - two_ranks) <= 2e-4


@pytest.mark.slow
def test_mixture_of_experts(run, runs):
    output = run("moe_expert_parallel.sh", ITERATIONS="10")
    assert re.search(r"│ 0, 2 +│ S +│ s2 ", output)
    first, last = losses(output)
    assert last < first - 1
    logged = (runs / "moe" / "train.log").read_text()
    assert "expert_model_parallel_size ...................... 2" in logged


@pytest.mark.slow
def test_a_dense_checkpoint_goes_on_as_s2(run, runs):
    output = run("dense_to_s2.sh", ITERATIONS="12")
    assert output.count("layers 0-2: dense -> local 2 + stride 4") == 2
    before, switched, after = last_losses(output)
    untrained = losses(output)[0]
    assert abs(switched - before) < 0.2 and switched < untrained - 1
    assert after < switched
    assert (runs / "dense_to_s2" / "checkpoints" / "iter_0000012").is_dir()


@pytest.mark.long
def test_a_dense_checkpoint_goes_on_with_heads_that_were_chosen(run, runs):
    output = run("dense_to_s2.sh", ITERATIONS="2", CHOOSE="2")
    assert "chosen.yaml: 4 of 8 KV heads are dense" in output
    assert sum("chosen.yaml" in line for line in output.splitlines() if ": torchrun" in line) == 2
    assert (runs / "chosen.yaml").is_file() and len(last_losses(output)) == 3


@pytest.mark.slow
def test_a_dense_model_goes_on_at_a_longer_context(run, runs):
    output = run("extend_context.sh", ITERATIONS="10")
    assert output.count("layers 0-2: dense -> local 2 + stride 4") == 1
    before, dense, sparse = last_losses(output)
    assert max(dense, sparse) < before + 0.2 and 0 < abs(sparse - dense) < 0.2
    first = losses(output)[0::2]  # before any step: the weights came along
    assert len(first) == 3 and max(first[1:]) < first[0] - 1
    logged = (runs / "long_s2" / "train.log").read_text()
    assert "rotary_base ..................................... 48761" in logged
    assert (runs / "long_s2" / "checkpoints" / "iter_0000010").is_dir()


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory) -> Path:
    """A Hugging Face folder of two layers with four KV heads, and a tokenizer of bytes."""
    pytest.importorskip("transformers")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from examples.quickstart.dataset import Document, train_tokenizer

    folder = tmp_path_factory.mktemp("llama") / "small"
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    config = LlamaConfig(vocab_size=320, num_key_value_heads=2, max_position_embeddings=512, **sizes)
    train_tokenizer([Document("texts", (ROOT / "README.md").read_text())], folder, 320)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_model_of_others_goes_on_sparse(run, runs, small_llama):
    """The whole road of docs/convert.md."""
    output = run("convert/run.sh", MODEL=str(small_llama), HEADS="1", SEQ_LENGTH="256", ITERATIONS="20")
    assert "logits equal transformers' (all layers; " in output
    assert "window_sink.yaml without its sink" in output and "chosen.yaml: 1 of 4 KV heads are dense" in output
    assert len(losses(output)) == 6  # iterations 1, 10 and 20 of two runs
    folder = runs / "convert"
    dense, sparse = (read_loss_log(folder / name / "losses.jsonl")[0] for name in ("dense", "sparse"))
    assert 0 < abs(sparse[1]["lm loss"] - dense[1]["lm loss"]) < 0.01
    assert "sparse and dense are not told apart" in " ".join(output.split())
    assert yaml.safe_load((folder / "chosen.yaml").read_text())["specs"]["S"]["sink_tokens"] == 64
    config = json.loads((folder / "sparse-hf" / "config.json").read_text())
    assert config["model_type"] == "s2_gpt" and config["s2_sparsity"]
    assert re.search(r"^\d+ tokens of prompt and \d+ of answer: \S+ s, a cache of \S+ MiB$", output, re.M)


@pytest.mark.slow
def test_patterns_of_ones_own(run, runs):
    output = run("own_pattern/run.sh", ITERATIONS="5")
    # Rows of 1, 2, 3, 3, ... key blocks, the own one half.
    assert "16 query blocks, 45 blocks attended" in output
    for row in (r"│ 1 +│ M +│ s2 +│ block mask 16 x 16, 1 ", r"│ 2-3 +│ F +│ s2 +│ block mask 16 x 16, 4 "):
        assert len(re.findall(row, output)) == 2  # of inspect and of the run
    assert losses(output)
    assert (runs / "own_pattern.png").stat().st_size > 1000


@pytest.mark.parametrize("script", ["dense_beside_s2.sh", "pretrain_7b.sh"])
def test_a_python_without_torch_is_one_line(tmp_path, script):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    settings = {"PYTHON": str(python), "MOCK_DATA": "1", "OUTPUT": str(tmp_path / "output")}
    command = ["bash", str(EXAMPLES / script)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {Path(script).name}: PYTHON={python} has no torch")


@pytest.mark.parametrize("on_path, in_venv, taken", [(0, 0, "python"), (1, 0, ".venv/bin/python"), (1, None, "python")])
def test_which_python_is_taken(tmp_path, on_path, in_venv, taken):
    """That of PATH where it has torch and Megatron (status 0), else .venv's where there is one."""
    for place, status in (("bin/python", on_path), ("checkout/.venv/bin/python", in_venv)):
        (tmp_path / place).parent.mkdir(parents=True)
        if status is not None:
            (tmp_path / place).write_text(f"#!/bin/sh\nexit {status}\n")
            (tmp_path / place).chmod(0o755)
    (tmp_path / "checkout/examples").mkdir()
    shutil.copy(EXAMPLES / "checks.sh", tmp_path / "checkout/examples")
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    command = ["bash", "-c", f"source {tmp_path}/checkout/examples/checks.sh; echo $PYTHON"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip().removeprefix(f"{tmp_path}/checkout/") == taken


def test_a_run_that_fails_shows_why(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *distributed*) echo from Megatron; exit 3;; esac\n')
    python.chmod(0o755)
    command = ["bash", str(EXAMPLES / "moe_expert_parallel.sh")]
    environment = os.environ | {"PYTHON": str(python), "RUNS": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    error = f"error: moe failed; {tmp_path}/moe/train.log has its output"
    assert done.stderr.splitlines() == ["from Megatron", error]


def test_the_readme_has_them_all():
    text = (EXAMPLES / "README.md").read_text()
    linked = {EXAMPLES / target.rstrip("/") for target in re.findall(r"\]\(([^.)][^)#]*)\)", text)}
    scripts = [path for path in EXAMPLES.rglob("*.sh") if path.name not in SOURCED]
    scripts.append(EXAMPLES / "attention_op.py")
    missing = [path for path in scripts if not {path, path.parent} & linked]
    assert len(scripts) > 10 and not missing
    commands = re.findall(r"`(?:\w+=\S+ )*(?:python )?(examples/\S+)`", text)
    assert len(commands) == 10 and all((ROOT / command).is_file() for command in commands)
