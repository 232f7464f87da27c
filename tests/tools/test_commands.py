"""The command s2-megatron: its subcommands, their help, and what bad input gets."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import s2_megatron
from s2_megatron.tools import commands

ROOT = Path(__file__).resolve().parents[2]


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
    assert imported == "['s2_megatron.tools', 's2_megatron.tools.commands']"


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
        (["inspekt"], "invalid choice: 'inspekt' (choose from"),
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


@pytest.mark.parametrize("error", [ValueError("a bad setting"), PermissionError(13, "Permission denied", "/file")])
def test_what_a_command_raises_is_one_error_line(error, monkeypatch, capsys):
    def run(args):
        raise error

    monkeypatch.setattr("s2_megatron.tools.env_report.run", run)
    assert status("env-report") == 2
    assert capsys.readouterr().err == f"error: {error}\n"


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
    assert done.stderr == "error: unrecognized arguments: --wrong; see s2-megatron schema --help\n"


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
