"""`s2-megatron check`: every bad launch of bad_launches.py ends in its line, good ones pass, nothing is written;
whatever the flags are, the outcome is success or one error line."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from s2_megatron.megatron.arguments import add_s2_arguments
from s2_megatron.megatron.preflight.mistakes import MISTAKES
from s2_megatron.megatron.preflight.values import NUMBERS, RANGES, flag_of
from s2_megatron.megatron.refusals.flags import REFUSALS
from s2_megatron.tools import commands
from s2_megatron.tools.forecast.flags import CHECKED, FLAGS
from tests.checkpoints import SHAPES, write_checkpoint
from tests.megatron import forks
from tests.megatron.without_gpt import require_gpt_model
from tests.processes import python_path
from tests.tools.bad_launches import BAD, DATA, GOOD, MADE, MOCK, S2_FLAGS, Bad, make_files
from tests.tools.bad_values import REFUSED_FLAGS, TAKEN
from tests.tools.scripts.check_cases import WORKING, violates

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "tools" / "scripts" / "check_cases.py"
WRITTEN = {"--save": "{tmp}/new/save", "--save-interval": "10", "--tensorboard-dir": "{tmp}/new/tensorboard",
    "--s2-loss-log": "{tmp}/new/losses.jsonl", "--load": "{tmp}/new/save"}  # fmt: skip
# Without a checkpoint the weights would be what the memory holds.
UNBUILT = {"--no-initialization": None, "--init-model-with-meta-device": None}
# What passes: (launch, words of the output)
FINE = {
    "the good one": (Bad({}, ()),
        ("Attention of 4 layers", "nothing wrong found: 1 processes (one copy of the model)")),
    "without S2": (Bad({}, (), ("--s2-config",)), ("nothing wrong found",)),
    "a HybridModel": (Bad({"--hybrid-layer-pattern": "*-*--*-*E", "--num-experts": "2"}, (), ("--num-layers",)),
        ("Attention of 4 layers", "in the model", "9 layers")),
    "data": (Bad(DATA, (), ("--mock-data",)), ("nothing wrong found",)),
    "weights": (Bad(DATA | {"--data-path": ["1", "{tmp}/good"]}, (), ("--mock-data",)), ("nothing wrong found",)),
    "data for each part": (Bad({"--train-data-path": ["0", "{tmp}/good"], "--valid-data-path": "{tmp}/good"}, (),
        ("--mock-data",)), ("nothing wrong found",)),
    "counted data": (Bad(DATA | {"--per-dataset-sequences-path": "{tmp}/right_counts"}, (), ("--mock-data",)),
        ("nothing wrong found",)),
    "a cache": (Bad({"--data-cache-path": "{tmp}/cache", "--dataloader-fast-cache-load": None}, ()),
        ("nothing wrong found",)),
    "weights for nothing": (Bad(UNBUILT | {"--skip-train": None}, ()), ("nothing wrong found",)),
    "a vocabulary as it is": (Bad({"--no-pad-vocab-size": None, "--padded-vocab-size": "512"}, ()),
        ("nothing wrong found",)),
    "folders to make": (Bad(WRITTEN, ()), ("nothing wrong found",)),
    "several ranks": (Bad({"--tensor-model-parallel-size": "2"}, (), (),
        "torchrun --nproc-per-node 4 pretrain_gpt_s2.py"), ("4 processes (tensor 2, data 2)",)),
    "whole experts": (Bad({"--tensor-model-parallel-size": "2", "--num-experts": "8",
        "--expert-model-parallel-size": "2", "--expert-tensor-parallel-size": "1"}, (), (),
        "torchrun --nproc-per-node 2 pretrain_gpt_s2.py"), ("2 processes (tensor 2)",)),
    "experts over context-parallel ranks": (Bad({"--context-parallel-size": "2", "--num-experts": "8",
        "--expert-model-parallel-size": "2"}, (), (),
        "torchrun --nproc-per-node 2 pretrain_gpt_s2.py"), ("2 processes (context 2)",)),
    "the longest warm-up": (Bad({"--lr-warmup-iters": "9"}, ()), ("nothing wrong found",)),
    "a warm-up before a longer decay": (Bad({"--lr-warmup-iters": "10", "--lr-decay-iters": "11"}, ()),
        ("nothing wrong found",)),
    "a large share of warm-up": (Bad({"--lr-warmup-fraction": "0.99", "--min-lr": "1e-4"}, ()),
        ("nothing wrong found",)),
    "WSD, complete": (Bad({"--lr-decay-style": "WSD", "--lr-wsd-decay-iters": "100"}, ()), ("nothing wrong found",)),
    "samples": (Bad({"--train-samples": "12", "--lr-warmup-samples": "11"}, (), ("--train-iters",)),
        ("nothing wrong found",)),
    "a batch that shrinks": (Bad({"--global-batch-size": "3", "--decrease-batch-size-if-needed": None,
        "--eval-global-batch-size": "2"}, (), (),
        "torchrun --nproc-per-node 2 pretrain_gpt_s2.py"), ("nothing wrong found",)),
    "steps of a batch": (Bad({"--step-batch-size-schedule": "0:2 1M:4"}, (), (),
        "torchrun --nproc-per-node 2 pretrain_gpt_s2.py"), ("nothing wrong found",)),
    "no sparsity": (Bad({}, (), ("--s2-config",)), ("note: no --s2-config: the model is Megatron's own",)),
    "a split with spaces": (Bad(DATA | {"--split": " 90 10, 0 "}, (), MOCK), ("nothing wrong found",)),
    "a split in quotes": (Bad(DATA | {"--split": "'90,10,0'"}, (), MOCK), ("nothing wrong found",)),
    "nothing to validate": (Bad({"--split": "100,0,0", "--eval-iters": "0"}, ()), ("nothing wrong found",)),
    "for GPUs": (Bad({"--bf16": None, "--no-masked-softmax-fusion": None}, (), ("--distributed-backend",)),
        ("note: no GPU here", "nothing wrong found")),
    "nothing to train": (Bad({"--skip-train": None, "--train-samples": "4", "--global-batch-size": "8"}, (),
        ("--train-iters", "--lr")), ("nothing wrong found",)),
    "data of one's own": (Bad({"--split": "100,0,0"}, (), (), "torchrun mine.py"), ("nothing wrong found",)),
    "a script of one's own": (Bad({"--my-flag": "3"}, (), (), "torchrun mine.py"),
        ("note: mine.py is not pretrain_gpt_s2.py", "nothing wrong found")),
    "Megatron's windows": (Bad({"--s2-config": "window-size", "--window-size": "511,0", "--window-attn-skip-freq": "4"},
        ()), ("window 512", "nothing wrong found")),
    "a plan against a rule": (Bad({"--s2-config": "{tmp}/windows.yaml"}, ()),
        ("note: the windows of all 4 layers, one after the other, reach 64 of ", "nothing wrong found")),
    "a tokenizer of the hub": (Bad({"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "nobody/none"}, (),
        ("--vocab-size",)),
        ("note: --tokenizer-model=nobody/none is not a folder here, so it is a name of the Hugging Face hub, and it "
        "is not in this machine's cache: neither the name nor the vocabulary is checked", "nothing wrong found")),
    "help": (Bad({"--help": None}, ()), ("--s2-config YAML",)),
    **{f"taken: {name}": (Bad(changes, ()), ("nothing wrong found",)) for name, changes in TAKEN.items()},
    "a disk too small": (Bad({"--save": "{tmp}/save", "--save-interval": "10", "--vocab-size": "2000000000"}, ()),
        ("warning: --save={tmp}/save has ", " GB free, and one checkpoint takes about 3,0")),
}  # fmt: skip


def line(bad: Bad, tmp: Path) -> list[str]:
    flags = {flag: value for flag, value in {**GOOD, **bad.changes}.items() if flag not in bad.without}
    words = bad.runner.split()
    for flag, value in flags.items():
        words += [flag, *([] if value is None else value if isinstance(value, list) else [value])]
    return [word.replace("{tmp}", str(tmp)) for word in words]


@cache
def results(tmp: Path) -> dict[str, dict]:
    make_files(tmp)
    assert not BAD.keys() & FINE.keys()
    launches = BAD | {name: launch for name, (launch, _) in (FINE | SEVERAL).items()}
    (tmp / "cases.json").write_text(json.dumps([line(launch, tmp) for launch in launches.values()]))
    before = sorted(tmp.rglob("*"))
    target = tmp.parent / f"{tmp.name}.json"
    run_script(tmp, "cases", tmp / "cases.json", target)
    assert sorted(tmp.rglob("*")) == before, "a check wrote something"
    return dict(zip(launches, json.loads(target.read_text()), strict=True))


def run_script(folder: Path, *arguments) -> str:
    """What check_cases.py printed."""
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    return forks.run(SCRIPT, [*map(str, arguments)], environment, folder)


def outcomes(printed: str) -> dict[str, int]:
    """The line of check_cases.py, which warnings may stand behind."""
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{")))


@pytest.fixture(scope="session")
def checked(tmp_path_factory):
    require_gpt_model()
    tmp = tmp_path_factory.mktemp("check")
    return tmp, results(tmp)


# Launches of which Megatron speaks without naming a flag: it writes names with spaces, or counts in other units.
OTHER_WORDS = (
    "no steps of a batch", "late steps of a batch", "local attention", "Megatron's: cp_comm_type of two levels",
    "Megatron's: virtual stages without a pipeline",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_a_bad_launch_is_one_line(checked, name):
    tmp, found = checked
    result = found[name]
    assert violates(result) is None and result["status"] == 2, result
    text, at = result["err"], 0
    assert not result["out"] and text.count("error: ") == 1 + (name in TWICE), text
    if not BAD[name].words:
        flags = (*BAD[name].changes, *BAD[name].without)
        assert "Megatron refuses these flags: " in text, text
        named = any(flag[2:].replace("-", "_") in text.replace("-", "_") for flag in flags)
        assert named or "assert " in text or name in OTHER_WORDS, text
    for words in BAD[name].words:
        at = text.find(words.replace("{tmp}", str(tmp)), at)
        assert at >= 0, f"{words!r} is not in {text}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FINE)
def test_a_good_launch_passes(checked, name):
    tmp, found = checked
    assert violates(found[name]) is None and found[name]["status"] == 0, found[name]
    said = found[name]["err"] + found[name]["out"]  # notes are on stderr
    assert all(words.replace("{tmp}", str(tmp)) in said for words in FINE[name][1]), said


# What inspect refuses, too: all values of flags that it reads.
READ = (
    *(f"refused: {name}" for name in REFUSED_FLAGS),
    *(f"{name} not taken" for name in NUMBERS),
    *(f"{name} too {what}" for name in RANGES if flag_of(name) in CHECKED | FLAGS for what in ("small", "large")),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_inspect_refuses_it_in_the_same_words(checked, name, capsys):
    tmp, found = checked
    assert commands.main(["inspect", "--png", str(tmp / "drawn.png"), "--", *line(BAD[name], tmp)]) == 2
    printed = capsys.readouterr()
    said = found[name]["err"].removeprefix(WORKING).splitlines()
    assert printed.err.splitlines() == said[:1] and not printed.out and not (tmp / "drawn.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", TAKEN)
def test_inspect_takes_what_training_takes(checked, name, capsys):
    tmp, _ = checked
    assert commands.main(["inspect", "--json", "--", *line(FINE[f"taken: {name}"][0], tmp)]) == 0
    assert json.loads(capsys.readouterr().out)["no_forecast"] == []


# Bad launches with another mistake: a tracker that is cut.
TWICE = ("a step",)
# Launches with several mistakes: (changes, words of each error line)
SEVERAL = {
    "of every kind": (Bad({"--num-layrs": "4", "--hidden-size": "x", "--data-path": "{tmp}/none", "--s2-config":
        "{tmp}/wrong.yaml", "--save": "{tmp}/file/x", "--save-interval": "1"}, (),
        ("--num-layers", "--lr", "--mock-data")),
        ("--hidden-size: invalid int value: 'x'", "--num-layrs 4; did you mean --num-layers?",
        "--save={tmp}/file/x: {tmp}/file is a file", "--data-path={tmp}/none: .idx is missing",
        "wrong.yaml: specs.S.stride")),
    "missing": (Bad({}, (), ("--micro-batch-size", "--lr", "--eval-interval", "--num-layers")),
        ("--eval-interval is not given",)),
    "typos": (Bad({"--lrr": "1e-3", "--hiden-size": "64"}, (), ("--lr", "--hidden-size")),
        ("--lrr 1e-3 --hiden-size; did you mean --lr?", "--hiden-size 64; did you mean --hidden-size?")),
    "environment": (BAD["no connections"]._replace(without=("--eval-interval",)),
        ("--eval-interval is not given", "expected CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment")),
    "sparsity and data": (Bad(DATA | {"--data-path": "{tmp}/cut_data", "--s2-config": "{tmp}/none.yaml"}, (), MOCK),
        ("cut_data: .bin was cut", "none.yaml: ")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_every_mistake_has_its_line(checked, name):
    tmp, found = checked
    lines = found[name]["err"].removeprefix(WORKING).splitlines()
    assert found[name]["status"] == 2 and not found[name]["out"] and violates(found[name]) is None
    words = [word.replace("{tmp}", str(tmp)) for word in SEVERAL[name][1]]
    assert len(lines) == len(words) and all(line.startswith("error: ") for line in lines), lines
    assert all(any(word in line for line in lines) for word in words), lines


def test_every_refusal_of_flags_has_a_launch():
    assert {name.partition(",")[0] for name in REFUSED_FLAGS} == {refusal.name for refusal in REFUSALS}


def test_every_flag_has_a_bad_value():
    parser = argparse.ArgumentParser(add_help=False)
    add_s2_arguments(parser)
    flags = {action.option_strings[0]: action for action in parser._actions}
    assert {flag for flag, action in flags.items() if action.nargs != 0} == set(S2_FLAGS)


def test_every_mistake_has_a_launch_that_makes_it():
    assert set(MADE) == set(MISTAKES)


def test_weights_that_are_not_initialized_come_from_a_checkpoint(tmp_path):
    def taken(**given) -> bool:
        nothing = dict.fromkeys(("load", "pretrained_checkpoint", "ckpt_step", "non_persistent_ckpt_type"))
        args = argparse.Namespace(**{**nothing, "skip_train": False, "use_megatron_fsdp": False, **given})
        return not any(MISTAKES[name].made(args) for name in given if name in MISTAKES)

    write_checkpoint(tmp_path / "stored", 5, tracker=True)
    stored, empty = str(tmp_path / "stored"), str(tmp_path / "empty")
    for flag in ({"perform_initialization": False}, {"init_model_with_meta_device": True}):
        assert not taken(**flag) and not taken(**flag, load=empty)
        assert taken(**flag, load=stored) and taken(**flag, load=stored, ckpt_step=5)
        assert taken(**flag, pretrained_checkpoint=stored, load=empty)
        assert taken(**flag, load="msc://profile/folder"), "what lies there is not known"
        assert taken(**flag, load=empty, non_persistent_ckpt_type="local"), "nor what lies on the nodes"
        assert taken(**flag, skip_train=True)
        with pytest.raises(ValueError, match=r"--ckpt-step=6: iter_0000006 in .* does not exist"):
            taken(**flag, load=stored, ckpt_step=6)
    assert taken(init_model_with_meta_device=True, use_megatron_fsdp=True), "which initializes them"
    assert not taken(perform_initialization=False, use_megatron_fsdp=True)


@pytest.mark.slow
def test_nothing_else_than_success_or_one_error_line(tmp_path):
    """Flags of Megatron's own parser with any values, and any sparsity YAML."""
    require_gpt_model()
    seen = outcomes(run_script(tmp_path, "fuzz", 60))
    assert sum(seen.values()) >= 60


@pytest.mark.slow
def test_inspect_ends_as_well_as_check(tmp_path):
    """Any sparsity YAML and model, as flags and as a launch line."""
    seen = outcomes(run_script(tmp_path, "fuzz-inspect", 100))
    assert sum(seen.values()) >= 100


@pytest.mark.long
def test_nothing_else_than_success_or_one_error_line_at_length(tmp_path):
    run_script(tmp_path, "fuzz", 1500)


def command(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "s2_megatron", "check", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_refusal_is_recorded_when_asked_for(tmp_path):
    (tmp_path / "config.yaml").write_text("layers: X\n")
    bad = Bad({"--save": str(tmp_path / "save"), "--save-interval": "3"}, ())
    done = command("--record", "--", *line(bad, tmp_path))
    said = done.stderr.removeprefix(WORKING)
    assert done.returncode == 2 and said.startswith("error: ") and said.count("\n") == 1, done.stderr
    from s2_megatron.megatron.records.status import read_status

    found = read_status(tmp_path / "save")
    assert (found["state"], found["exit_status"], f"error: {found['line']}\n") == ("refused", 2, said)


@pytest.mark.slow
def test_what_cannot_start_on_this_machine_is_refused_where_it_is_to_start_here(tmp_path, monkeypatch):
    """A launcher asks that before torchrun; on a login node the line is for other machines."""
    require_gpt_model()
    make_files(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launch = line(Bad({}, (), ("--distributed-backend",)), tmp_path)
    done = command("--", *launch)
    assert done.returncode == 0 and "note: no GPU here, so this line starts on another machine" in done.stderr
    done = command("--here", "--", *launch)
    assert done.returncode == 2 and not done.stdout
    assert "error: --distributed-backend nccl" in done.stderr and "add --distributed-backend gloo" in done.stderr


def test_without_a_line():
    done = command()
    assert done.returncode == 2 and done.stderr.startswith("error: there is no launch line; expected one behind --")


@pytest.mark.slow
def test_a_downloaded_tokenizer_of_the_hub_is_built_without_the_network(tmp_path):
    """What the data's tokens are compared with is its vocabulary."""
    require_gpt_model()
    from examples.quickstart.dataset import Document, train_tokenizer

    make_files(tmp_path)
    cached = tmp_path / "home/hub/models--nobody--cached"
    text = (ROOT / "README.md").read_text()
    train_tokenizer([Document("README.md", text)], cached / "snapshots/0a1b", 300)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0a1b")
    tokenizer = {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "nobody/cached"}
    launch = Bad(DATA | tokenizer | {"--make-vocab-size-divisible-by": "1"}, (), ("--mock-data", "--vocab-size"))
    hub = ("HF_ENDPOINT=http://127.0.0.1:9", f"HF_HOME={tmp_path}/home")  # where nobody answers
    for complete in (False, True):
        done = command("--", *hub, *line(launch, tmp_path))
        assert (done.returncode, "note: --tokenizer" in done.stderr) == (0, not complete), done.stderr
        (cached / "snapshots/0a1b/config.json").write_text('{"model_type": "gpt2"}')
    done = command("--", *hub, *line(launch, tmp_path), "--data-path", f"{tmp_path}/other_words")
    assert done.returncode == 2 and "has the token 60000, and the vocabulary 300 tokens" in done.stderr, done.stderr
    done = command("--", *hub, *line(launch, tmp_path), "--s2-loss-from-token", "300")
    assert done.returncode == 2 and "=300: the vocabulary has no token above 299" in done.stderr, done.stderr


def test_the_shape_of_a_checkpoint_is_compared():
    from types import SimpleNamespace

    from s2_megatron.megatron.checkpoints.compare import SHAPE, StoredCheckpoint, compare_shapes

    shape = dict(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2,
        kv_channels=16, num_experts=None, moe_ffn_hidden_size=None, moe_shared_expert_intermediate_size=None,
        swiglu=True, normalization="RMSNorm", qk_layernorm=True, add_bias_linear=False, add_qkv_bias=False,
        position_embedding_type="rope", untie_embeddings_and_output_weights=True,
        hybrid_layer_pattern="*-*-")  # fmt: skip
    other = dict(num_layers=5, hidden_size=65, ffn_hidden_size=129, num_attention_heads=8, num_query_groups=4,
        kv_channels=32, num_experts=8, moe_ffn_hidden_size=96, moe_shared_expert_intermediate_size=48,
        swiglu=False, normalization="LayerNorm", qk_layernorm=False, add_bias_linear=True, add_qkv_bias=True,
        position_embedding_type="none", untie_embeddings_and_output_weights=False,
        hybrid_layer_pattern="*-*E")  # fmt: skip
    assert set(shape) == set(other) == set(SHAPE)
    rest = dict(group_query_attention=True, make_vocab_size_divisible_by=128, tensor_model_parallel_size=1)
    ours = SimpleNamespace(**shape, **rest, padded_vocab_size=1024)
    stored = SimpleNamespace(**shape, **rest, padded_vocab_size=1024)
    compare_shapes(ours, StoredCheckpoint("folder", stored, 7, False))
    for name, value in other.items():
        wrong = SimpleNamespace(**{**vars(stored), name: value})
        with pytest.raises(
            ValueError, match=re.escape(f"iteration 7 is of another model, with --{name.replace('_', '-')} {value}")
        ):
            compare_shapes(ours, StoredCheckpoint("folder", wrong, 7, False))
    latent = dict(q_lora_rank=None, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16)
    theirs, mine = (SimpleNamespace(**vars(of), **latent, multi_latent_attention=True) for of in (stored, ours))
    compare_shapes(mine, StoredCheckpoint("folder", theirs, 7, False))
    for pair, words in (((ours, theirs), "with --multi-latent"), ((mine, stored), "with no --multi-latent")):
        with pytest.raises(ValueError, match=words):
            compare_shapes(pair[0], StoredCheckpoint("folder", pair[1], 7, False))
    for name in latent:
        wrong = SimpleNamespace(**{**vars(theirs), name: 48})
        with pytest.raises(ValueError, match=f"with --{name.replace('_', '-')} 48, not {latent[name]};"):
            compare_shapes(mine, StoredCheckpoint("folder", wrong, 7, False))
    # The padding depends on the tensor-parallel ranks; more than that is another vocabulary.
    stored.tensor_model_parallel_size, stored.padded_vocab_size = 4, 1024 + 384
    compare_shapes(ours, StoredCheckpoint("folder", stored, 7, False))
    stored.padded_vocab_size = 1024 + 512
    with pytest.raises(ValueError, match=r"a vocabulary of 1536 \(padded\), not 1024"):
        compare_shapes(ours, StoredCheckpoint("folder", stored, 7, False))


def test_the_files_of_these_tests_are_checkpoints(tmp_path):
    """A checkpoint of write_checkpoint is complete; only its arguments are missing, which a case above names."""
    from s2_megatron.megatron.checkpoints.folder import find_problem

    assert find_problem(write_checkpoint(tmp_path, 5, SHAPES)) is None
