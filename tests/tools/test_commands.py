"""The command s2-megatron: its subcommands, their help, and what bad input gets, and what long commands tell
meanwhile: lines without a terminal, a bar or a spinner in one."""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import s2_megatron
from s2_megatron.tools import commands, outputs, progress
from s2_megatron.tools.progress import duration

ROOT = Path(__file__).resolve().parents[2]
INSPECT = ["inspect", str(ROOT / "configs" / "quickstart.yaml"), "--num-layers", "4", "--num-attention-heads", "4"]
INSPECT += ["--seq-length", "512"]


def status(*arguments) -> int:
    try:
        return commands.main(list(arguments))
    except SystemExit as end:  # argparse ends the process for --help and for errors of its own
        return end.code


def test_help_names_every_command_and_imports_none():
    code = (
        "import sys; from s2_megatron.tools import commands\n"
        "try:\n    commands.main(['--help'])\nexcept SystemExit:\n"
        "    print(sorted(name for name in sys.modules if name.startswith('s2_megatron.') or name in "
        "('numpy', 'torch', 'yaml', 'rich')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    *help_text, imported = done.stdout.splitlines()
    for name, command in commands.COMMANDS.items():
        assert f" {name}" in "\n".join(help_text) and command.summary in " ".join("\n".join(help_text).split())
    light = ("printing", "tools", "tools.commands", "tools.streams")
    assert imported == str([f"s2_megatron.{name}" for name in light])


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_has_its_own_help(name, capsys):
    assert status(name, "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: s2-megatron {name} ")
    assert f"s2-megatron {name} " in shown.partition("\n\n")[2] or name in ("env-report", "schema")  # an example


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "the following arguments are required: COMMAND; see s2-megatron --help"),
        (["insepct"], "insepct is no command; did you mean inspect?; see s2-megatron --help"),
        (["xyzzy"], "xyzzy is no command; see s2-megatron --help"),
        (
            ["generate", "--load", "x", "--promt=a", "--prompt", "a"],
            "--promt=a; did you mean --prompt?; see s2-megatron",
        ),
        (["inspect"], "--num-layers, --num-attention-heads, --seq-length: not given; expected the sizes"),
        (["env-report", "--all"], "unrecognized arguments: --all; see s2-megatron env-report --help"),
        (
            ["check", "torchrun", "x.py", "--num-layers", "8"],
            "unrecognized arguments: torchrun x.py --num-layers 8; a training's launch line stands behind --; "
            "see s2-megatron check --help",
        ),
    ],
)
def test_bad_input_is_one_error_line(arguments, words, capsys):
    assert status(*arguments) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("error: ") and words in error and error.count("\n") == 1


def test_a_shell_completes_commands_and_options(tmp_path):
    """As argcomplete's function in bash asks: the line is in the environment, the answer goes to descriptor 8."""
    pytest.importorskip("argcomplete")
    for line, expected in (("s2-megatron in", {"inspect"}), ("s2-megatron generate --te", {"--temperature"})):
        words = dict(_ARGCOMPLETE="1", COMP_LINE=line, COMP_POINT=str(len(line)), _ARGCOMPLETE_IFS="\n")
        environment = os.environ | words | {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found")}
        subprocess.run([sys.executable, "-m", "s2_megatron"], cwd=ROOT, env=environment, check=True)
        assert {word.strip() for word in (tmp_path / "found").read_text().splitlines()} == expected


@pytest.mark.parametrize(
    "error, line",
    [
        (ValueError("a bad setting"), "a bad setting"),
        (ValueError("a.yaml: 2 problems\n  one\n  two"), "a.yaml: 2 problems\n  one\n  two"),
        (ValueError("--load a\nb\x1b[31m: no folder"), r"--load a\nb\x1b[31m: no folder"),
        (ValueError(f"--load {'x' * 5000}: no folder"), f"--load {'x' * 200}...{'x' * 49}: no folder"),
        (PermissionError(13, "Permission denied", "/a\nb"),
            r"/a\nb: Permission denied; expected a path that can be used; correct it"),
        (OSError(28, "No space left on device", "a.png"),
            "a.png: No space left on device; expected room for the output; free some, or write to another disk"),
        (RecursionError("maximum depth"), "an input is nested too deeply; expected what a command or Megatron wrote; "
            "correct the files"),
        (OverflowError("too big"), "a number is too large (too big); expected one of 64 bits; correct the options and "
            "the files"),
    ],
    ids=range(8),
)  # fmt: skip
def test_what_a_command_raises_is_one_error_line(error, line, monkeypatch, capsys):
    def run(args):
        raise error

    monkeypatch.setattr("s2_megatron.tools.env_report.run", run)
    assert status("env-report") == 2
    assert capsys.readouterr().err == f"error: {line}\n"


ENCODINGS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "C": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_terminal_without_unicode_gets_tables(name):
    environment = os.environ | ENCODINGS[name]
    command = [sys.executable, "-m", "s2_megatron", *INSPECT]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.isascii() and b"local 2 + stride 4" in done.stdout


def test_ctrl_c_is_one_line():
    """A command that Ctrl-C meets while it works."""
    code = (
        "import signal, sys, time; from s2_megatron.tools import commands, env_report\n"
        # A shell has SIGINT ignored by what it starts in the background, these tests for example.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "env_report.run = lambda args: (print('works', flush=True), time.sleep(600))\n"
        "sys.exit(commands.main(['env-report']))"
    )
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes)
    assert process.stdout.readline() == "works\n"
    process.send_signal(signal.SIGINT)
    try:
        assert (*process.communicate(timeout=60), process.returncode) == ("", "stopped\n", 130)
    finally:
        process.kill()


@pytest.mark.parametrize("picture", ["--png", "--context-png", "--exchange-png"])
def test_ctrl_c_leaves_no_half_written_picture(picture, tmp_path, monkeypatch, capsys):
    def interrupted(source, target):
        assert source.read_bytes() and target == tmp_path / "a.png" and not target.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(outputs.os, "replace", interrupted)
    assert status(*INSPECT, "--context-parallel-size", "2", picture, str(tmp_path / "a.png")) == 130
    assert capsys.readouterr().err == "stopped\n" and not list(tmp_path.iterdir())


PIPED = {
    "tables": (INSPECT, "| true", 141, ""),
    "one line": (INSPECT, "| head -1", 141, ""),
    "json": ([*INSPECT, "--json"], "| true", 141, ""),
    "buffered": (["schema"], "| true", 141, ""),
    "both": (INSPECT, "2>&1 | true", 141, ""),
    "no stdout": (INSPECT, ">&-", 0, ""),
    "no stdout, json": ([*INSPECT, "--json"], ">&-", 0, ""),
    "no stdin": (["check", "--", "-"], "<&-", 2, "error: launch line: "),
    "no stderr": (["inspect"], "2>&-", 2, ""),
    "full stderr": (["inspect"], "2> /dev/full", 2, ""),
    "full": (["schema"], "> /dev/full", 2, "error: No space left on device; expected room for the output; "),
    "full, help": (["--help"], "> /dev/full", 2, "error: No space left on device; expected room for the output; "),
}


@pytest.mark.parametrize("name", PIPED)
def test_streams_that_take_nothing(name):
    """The status of a command whose reader has gone, or whose streams are closed or full; a traceback never."""
    arguments, redirection, expected, error = PIPED[name]
    command = f"{shlex.join([sys.executable, '-m', 's2_megatron', *arguments])} {redirection}; exit ${{PIPESTATUS[0]}}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=environment)
    # A reader of one line may have read all of it before it goes.
    assert done.returncode in ((0, expected) if "head" in redirection else (expected,)), done.stderr
    assert done.stderr.count("\n") == bool(error) and done.stderr.startswith(error)
    assert redirection == "| head -1" or not done.stdout


@pytest.mark.parametrize("option", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_full_stderr_ends_nothing(option):
    """A remark that finds no room is lost, and not the run."""
    code = (
        "import sys; from s2_megatron.printing import open_streams; open_streams(); "
        "print('lost', file=sys.stderr); print('also', end='', file=sys.stderr, flush=True); print('goes on')"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, *option, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True)
    assert (done.returncode, done.stdout) == (0, "goes on\n")


def test_an_error_is_said_though_the_reader_of_the_output_has_gone():
    code = (
        "import sys, time\n"
        "from s2_megatron.tools import commands\n"
        "def run(arguments):\n"
        "    print('a table'); time.sleep(1)\n"
        "    raise ValueError('a bad value')\n"
        "commands._run = run\n"
        "sys.exit(commands.main([]))\n"
    )
    command = f"{shlex.join([sys.executable, '-c', code])} | true; exit ${{PIPESTATUS[0]}}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (2, "error: a bad value\n")


def test_what_stands_behind_two_dashes_is_a_launch_line(monkeypatch):
    seen = []
    monkeypatch.setitem(
        commands.COMMANDS, "env-report", commands.COMMANDS["env-report"]._replace(takes_launch_line=True)
    )
    monkeypatch.setattr("s2_megatron.tools.env_report.run", lambda args: seen.append(args.launch_line))
    assert status("env-report") == 0 and status("env-report", "--", "torchrun", "x.py", "--", "--help") == 0
    assert seen == [None, ["torchrun", "x.py", "--", "--help"]]


def test_the_package_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "s2_megatron", "schema", "--wrong"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    meant = "did you mean --write?; see s2-megatron schema --help"
    assert done.stderr == f"error: unrecognized arguments: --wrong; {meant}\n"


@pytest.mark.parametrize("version", ["0.20.0+abc", importlib.metadata.version("megatron-core")], ids=["other", "equal"])
def test_the_megatron_that_is_imported_is_reported(tmp_path, version):
    (folder := tmp_path / "megatron" / "core").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "package_info.py").write_text(f"__version__ = '{version}'\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    command = [sys.executable, "-m", "s2_megatron", "env-report"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True).stdout
    assert f"{version} ({folder}; pip's: " in shown


def test_version(capsys):
    assert status("--version") == 0
    assert capsys.readouterr().out == f"s2-megatron {s2_megatron.__version__}\n"


@pytest.mark.parametrize("name", ["--png", "--output", "a run"])
def test_a_link_that_loops_is_one_error_line(name, tmp_path, capsys):
    (loop := tmp_path / "loop.png").symlink_to(loop)
    sizes = ["--num-layers", "4", "--num-attention-heads", "4"]
    line = {
        "--png": [*INSPECT, "--png", str(loop)],
        "--output": ["export-pattern", str(ROOT / "configs" / "quickstart.yaml"), *sizes, "--output", str(loop)],
        "a run": ["compare", str(loop), str(tmp_path)],
    }[name]
    assert status(*line) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "loop.png" in error
    words = {"--png": "Too many levels of symbolic links", "--output": "exists and is never overwritten", "a run": ""}
    assert words[name] in error


def test_a_picture_on_a_full_disk_is_named(tmp_path, monkeypatch, capsys):
    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert status(*INSPECT, "--png", str(tmp_path / "a.png")) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/a.png: No space left on device; expected room")
    assert not list(tmp_path.iterdir())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_where_there_is_no_terminal(monkeypatch, capsys):
    with progress.working("soon done"), progress.progress("x", 8) as tell:
        tell(2, "2 of 8")
    assert capsys.readouterr() == ("", ""), "what is done soon says nothing"
    monkeypatch.setattr(progress, "TOLD_SECONDS", 0.01)
    with progress.working("loading"):
        time.sleep(0.3)
    assert capsys.readouterr() == ("", "loading ...\n")
    with progress.progress("x", 8) as tell:
        for done in (0, 2):
            time.sleep(0.02)
            tell(done, f"{done} of 8")
    out, error = capsys.readouterr()
    assert not out and re.fullmatch(r"x: 0 of 8, 0 s\nx: 2 of 8, 0 s, about 0 s left\n", error)


@pytest.mark.parametrize("name", ["working", "progress"])
def test_a_terminal_is_left_as_it_was(name, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    if name == "working":
        with progress.working("loading"):
            time.sleep(0.2)
    else:
        with progress.progress("loading", 8) as tell:
            tell(2, "2 of 8")
            time.sleep(0.2)
    shown = terminal.getvalue()
    assert "loading" in shown and ("2 of 8" in shown or name == "working")
    assert shown.rstrip().endswith(("\x1b[2K", "\x1b[?25h")) and not capsys.readouterr().out


def test_durations():
    assert [duration(seconds) for seconds in (0.4, 99, 600, 9000)] == ["0 s", "99 s", "10 min", "2.5 h"]
