"""The preflight where people meet it: the launchers, the SLURM script, and a bare torchrun."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from s2_megatron.megatron import errors
from s2_megatron.megatron.preflight import start_up
from s2_megatron.megatron.records.status import read_status
from tests.megatron import forks
from tests.megatron.arguments import arguments
from tests.processes import python_path
from tests.slurm_stand_ins import cluster, submit

__all__ = ["cluster"]  # a fixture

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4")


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "Input/output error", "data.idx")])
def test_an_error_of_the_machine_is_no_refusal(tmp_path, monkeypatch, error):
    """The same start may succeed later, so that a job is queued again."""

    def check(args):
        raise error

    monkeypatch.setattr(start_up, "parse", lambda provider: None)
    monkeypatch.setattr(start_up, "check_before", check)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_s2.py", f"--save={tmp_path}"])
    with pytest.raises(type(error)), start_up.start_up(lambda parser: parser):
        pass
    found = read_status(tmp_path)
    assert found["state"] == "failed" and found["exit_status"] == 1 and type(error).__name__ in found["line"]


@pytest.mark.parametrize(("installed", "said"), [(False, True), (True, False)])
def test_a_missing_transformer_engine_is_said(monkeypatch, installed, said):
    """A login node need not have it, and Megatron asks for its version."""
    monkeypatch.setattr(errors, "find_spec", lambda name: object() if installed else None)
    text = errors.error_text(AssertionError("--qk-clip is only supported with TE >= 2.9.0."))
    assert text.startswith("Megatron refuses these flags: --qk-clip is only supported with TE >= 2.9.0. (Assert")
    assert ("or check where Transformer Engine is installed, which it is not here" in text) == said
    for other in ("--tensor-model-parallel-size", "Transformer Engine cross entropy loss fusion is disabled"):
        assert "is not here" not in errors.error_text(AssertionError(other))


@pytest.mark.parametrize(("found", "expected"), [("1", "8"), ("8", "1"), (None, "1")])
def test_connections_are_no_flag(monkeypatch, found, expected):
    """Megatron wants one for tensor and context parallelism, and more than one for FSDP."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if found is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", found)
    text = errors.error_text(AssertionError("FSDP always requires CUDA_DEVICE_MAX_CONNECTIONS value large than one"))
    assert text.startswith("Megatron refuses this environment: FSDP always")
    assert f"; expected CUDA_DEVICE_MAX_CONNECTIONS={expected} in the environment; export " in text


def raised(function, *arguments) -> str:
    try:
        function(*arguments)
    except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        return errors.error_text(error)
    raise AssertionError("it raised nothing")


def megatrons(tmp_path, lines: str):
    """A function `check` of Megatron's that has these lines."""
    file = tmp_path / "megatron" / "arguments.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("def check(args):\n" + "".join(f"    {line}\n" for line in lines.splitlines()))
    return defined(file, "megatron.training.arguments")


def defined(file: Path, module: str):
    """The function `check` of a file, as one of this module."""
    names = {"__name__": module}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names["check"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("assert args.lr > 0", "assert args.lr > 0, with --lr=-1.0 (AssertionError in arguments.py); expected"),
        ("assert (\n    args.lr > 0\n)", "assert ( args.lr > 0 ), with --lr=-1.0 (AssertionError"),
        ("assert args.lr > 0, 'a rate'", "a rate, with --lr=-1.0 (AssertionError in arguments.py)"),
        ("assert args.lr > 0, '--lr is a rate'", "--lr is a rate (AssertionError)"),
        ("args.world_size % args.tp_size", "integer modulo by zero: args.world_size % args.tp_size, with world_size=2, "
            "--tp-size=0 (ZeroDivisionError in arguments.py)"),
        ("raise RuntimeError('no data') from KeyError('a')", "no data; KeyError: 'a' (RuntimeError in arguments.py)"),
        ("int('x')", "invalid literal for int() with base 10: 'x' (ValueError in arguments.py)"),
    ],
)  # fmt: skip
def test_an_assertion_without_words_shows_its_flags(tmp_path, lines, said):
    args = SimpleNamespace(lr=-1.0, world_size=2, tp_size=0)
    text = raised(megatrons(tmp_path, lines), args)
    assert text.startswith(f"Megatron refuses these flags: {said}") and text.endswith("(--s2-traceback shows where)")


def test_a_fault_of_this_package_is_not_the_flags(tmp_path, monkeypatch):
    """The innermost of this package and Megatron counts, also where a library that it called has raised."""

    def own(args, call=lambda: torch.ones(2) @ torch.ones(3)):
        call()

    monkeypatch.setattr(errors, "OWN", "tests")
    text = raised(megatrons(tmp_path, "args(None)"), own)
    assert text.startswith("s2_megatron failed in test_preflight.py:") and ": RuntimeError: " in text, text
    assert text.endswith("; report what --s2-traceback shows") and "flags" not in text
    text = raised(own, SimpleNamespace(), lambda: megatrons(tmp_path, "assert args")(0))
    assert text.startswith("Megatron refuses these flags: assert args")


@pytest.mark.parametrize("module", ["s2_megatron.config.load", "s2_megatron.megatron.settings"])
def test_whose_error_it_is_no_path_says(tmp_path, module):
    """The package may be imported through a link, and all that is installed may stand in a folder `megatron`."""
    file = tmp_path / "megatron" / "link.py"
    file.parent.mkdir()
    file.write_text("def check(call):\n    call()\n    raise ValueError('refused by this package')\n")
    refusing = defined(file, module)
    assert raised(refusing, lambda: None) == "refused by this package"
    library = tmp_path / "megatron" / "lib.py"
    library.write_text("def check():\n    raise RuntimeError('shapes')\n")
    text = raised(refusing, defined(library, "torch.nn"))
    assert text.startswith("s2_megatron failed in link.py:2: RuntimeError: shapes; expected to train"), text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True), (OSError(errno.ESTALE, "stale"), True), (ConnectionResetError(), True),
        (RuntimeError("NCCL error: unhandled system error"), True),
        (RuntimeError("rank 1: context-parallel exchange failed; rank 0 has not answered"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), True),
        (RuntimeError("CUDA error: an illegal memory access"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (FileNotFoundError(errno.ENOENT, "none"), False), (RuntimeError("a shape"), False), (ValueError("NCCL"), False),
    ],
)  # fmt: skip
def test_what_the_next_start_may_do_without_is_the_machines(error, expected):
    assert errors.is_of_the_machine(error) is expected


def launcher(tmp_path, *flags, **settings) -> subprocess.CompletedProcess:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHON": sys.executable,
        "MOCK_DATA": "1",
        "TRANSFORMER_IMPL": "local",
        "OUTPUT": str(tmp_path / "a run"),
        "OMP_NUM_THREADS": "1",
        **settings,
    }
    script = ["bash", str(ROOT / "examples" / "pretrain_1p3b.sh"), *flags]
    return subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)


def test_a_dry_run_checks_and_prints(tmp_path):
    done = launcher(tmp_path, DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert "Attention of 24 layers" in done.stderr and "nothing wrong found: 8 processes" in done.stderr
    command = done.stdout.splitlines()
    assert command[:2] == ["env", "CUDA_DEVICE_MAX_CONNECTIONS=1"]
    assert command[2:5] == [sys.executable, "-m", "torch.distributed.run"] and "--s2-config" in command
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


def commands_with_mock_data() -> list[str]:
    """Those that the launchers' headers and docs/launch.md show."""
    texts = [path.read_text().replace("\n#", "\n") for path in sorted((ROOT / "examples").glob("pretrain_*.sh"))]
    texts.append((ROOT / "docs" / "launch.md").read_text())
    lines = [line.strip() for text in texts for line in text.replace("\\\n", " ").splitlines()]
    return [
        line
        for line in lines
        if re.match(r"[A-Z_0-9]+=\S+ .*examples/pretrain_\w+\.sh", line) and "MOCK_DATA=1" in line
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_with_mock_data())
def test_a_command_that_is_shown_passes_the_check(command, tmp_path):
    settings = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "TRANSFORMER_IMPL": "transformer_engine"}
    settings |= {"OUTPUT": str(tmp_path / "run"), "OMP_NUM_THREADS": "1", "DRY_RUN": "1"}
    done = subprocess.run(["bash", "-c", command], env=settings, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "nothing wrong found" in done.stderr, done.stderr


def test_the_shown_commands_are_found():
    assert len(commands_with_mock_data()) >= 5


def test_a_launcher_starts_nothing_after_a_mistake(tmp_path):
    done = launcher(tmp_path, "--seq-length", "0")
    assert done.returncode == 2 and not done.stdout
    expected = "--seq-length=0: expected 1 to "
    assert done.stderr.splitlines()[-1].startswith(f"error: {expected}") and done.stderr.count("error:") == 1
    found = read_status(tmp_path / "a run" / "checkpoints")
    assert found["state"] == "refused" and found["line"].startswith(expected)
    assert [path.name for path in (tmp_path / "a run").iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("DRY_RUN", "true", "0 or 1"),
        ("MOCK_DATA", "yes", "0 or 1"),
        ("DATA_PATH", "/none", "none beside MOCK_DATA=1, which trains on random tokens; unset one of them"),
        ("PREFLIGHT", "off", "0 or 1"),
        ("NNODES", "two", "1 to 65536 nodes"),
        ("NNODES", "0", "1 to 65536 nodes"),
        ("NNODES", "65537", "1 to 65536 nodes"),
        ("NODE_RANK", "1", "a number below NNODES=1; number the nodes from 0, or correct NNODES"),
        ("NODE_RANK", "-1", "a number below NNODES=1; number the nodes from 0, or correct NNODES"),
        ("NODE_RANK", "first", "a number below NNODES=1; number the nodes from 0, or correct NNODES"),
        ("MASTER_PORT", "port", "1024 to 65535, or leave it out"),
        ("MASTER_PORT", "1023", "1024 to 65535, or leave it out"),
        ("MASTER_PORT", "65536", "1024 to 65535, or leave it out"),
        ("GPUS_PER_NODE", "0", "a number, 1 or more, or gpu for all"),
    ],
)
def test_a_setting_that_is_none_starts_nothing(tmp_path, name, value, expected):
    done = launcher(tmp_path, PYTHON="/bin/false", **{name: value})
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"error: pretrain_1p3b.sh: {name}={value}; expected {expected}\n"


def test_the_last_of_several_nodes(tmp_path):
    nodes = dict(NNODES="4", MASTER_ADDR="first", DRY_RUN="1", PREFLIGHT="0", MASTER_PORT="65535")
    done = launcher(tmp_path, NODE_RANK="3", **nodes)
    assert "--nnodes 4 --node-rank 3 --master-addr first --master-port 65535" in " ".join(done.stdout.split())
    done = launcher(tmp_path, NODE_RANK="4", **nodes)
    assert done.returncode == 2 and "NODE_RANK=4; expected a number below NNODES=4; number" in done.stderr


@pytest.mark.slow
def test_a_dry_run_of_a_job_checks_once(cluster):
    done = submit(cluster, "examples/pretrain_1p3b.sh", "--lr", "x", DRY_RUN="1", PREFLIGHT="1")
    assert done.returncode == 2 and not done.stdout
    *before, error = done.stderr.splitlines()
    assert error.startswith("error: --lr: invalid float value: 'x'")
    assert before in ([], ["checking the launch line ..."])  # said where it takes long


@pytest.mark.slow
@pytest.mark.parametrize("traceback", [False, True])
def test_under_a_bare_torchrun_the_first_rank_says_it(tmp_path, traceback):
    """In front of torchrun's own report, and at its end, without Megatron's list of arguments; other ranks say
    nothing."""
    flags = arguments({"--eval-interval": "10", "--num-workers": "0", "--save": str(tmp_path), "--save-interval": "0"})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "pretrain_gpt_s2.py"), *flags, *["--s2-traceback"] * traceback]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1 and "--- arguments ---" not in output
    own = output.partition("torch/distributed/elastic")[0]
    if traceback:
        assert "Traceback (most recent call last)" in own and "ValueError: --save-interval=0: expected 1" in own
        assert done.stderr.splitlines()[-2].startswith("  traceback : ValueError: --save-interval=0: expected 1")
        return
    line = "error: --save-interval=0: expected 1 to 1000000000000; use --save-interval 1, or leave it out\n"
    assert own.count(line) == 1 and output.count("error: --save") == 2 and "Traceback" not in own
    assert done.stderr.splitlines()[-2] == f"  traceback : {line.rstrip()}"  # below it a border alone
    assert read_status(tmp_path)["state"] == "refused"


@pytest.mark.parametrize(("flags", "status"), [
    pytest.param(("--help",), 0, marks=pytest.mark.slow), (("--train-iters", "abc"), 2),
])  # fmt: skip
def test_the_script_shows_its_help_and_not_its_usage(tmp_path, flags, status):
    """Megatron's own parser fails at its help and prints 700 lines of usage with an error; ours has to come first."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt_s2.py"), *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == status and "Traceback" not in done.stderr
    assert ("--s2-config YAML" in done.stdout) == (status == 0) and "usage:" not in done.stderr
    if status:
        line = "error: --train-iters: invalid int value: 'abc'; expected what pretrain_gpt_s2.py --help says"
        assert done.stderr.splitlines()[-1] == line


def test_megatron_goes_through_a_schedule_before_the_training(tmp_path):
    """What Megatron refuses, some of it in the middle of a training, is refused before it."""
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    forks.run(ROOT / "tests" / "megatron" / "scripts" / "schedules.py", [], environment, tmp_path)
