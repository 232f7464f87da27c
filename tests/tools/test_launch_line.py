"""Every way to write a launch line, and what is none."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2_megatron.tools.launch_line import (
    TORCHRUN_SHORT,
    TORCHRUN_SWITCHES,
    TORCHRUN_VALUES,
    LaunchLine,
    launch_words,
    parse_launch_line,
)

FLAGS = ("--num-layers", "4", "--data-path", "30", "a b")
LINES = {
    "torchrun": ("torchrun --nproc-per-node 8 pretrain_gpt_s2.py", 1, 8),
    "its other spelling": ("torchrun --nproc_per_node=8 --nnodes=2 --standalone pretrain_gpt_s2.py", 2, 8),
    "an elastic job": ("torchrun --nnodes 2:4 --nproc-per-node 8 pretrain_gpt_s2.py", 4, 8),
    "short options": ("torchrun -r 3 -t 3 --nproc-per-node 2 pretrain_gpt_s2.py", 1, 2),
    "counted devices": ("torchrun --nproc-per-node gpu pretrain_gpt_s2.py", 1, None),
    "the module": ("/venv/bin/python3.12 -u -X dev -m torch.distributed.run --nnodes 2 pretrain_gpt_s2.py", 2, 1),
    "one process": ("python pretrain_gpt_s2.py", 1, 1),
    "the script itself": ("./pretrain_gpt_s2.py", 1, 1),
    "a world of its own": ("RANK=3 WORLD_SIZE=16 python pretrain_gpt_s2.py", 1, 16),
    "assignments": ("A=1 B='x y' torchrun --nproc-per-node 8 pretrain_gpt_s2.py", 1, 8),
    "env": ("env -u C A=1 torchrun --nproc-per-node 8 pretrain_gpt_s2.py", 1, 8),
    "torchrun's variables": ("PET_NNODES=3 PET_NPROC_PER_NODE=2 torchrun pretrain_gpt_s2.py", 3, 2),
    "srun": ("srun --nodes 4 --ntasks-per-node=1 -K torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt_s2.py", 4, 8),
    "srun's tasks": ("srun -N4 --ntasks-per-node=8 python -u pretrain_gpt_s2.py", 1, 32),
    "srun -n": ("srun -n 16 --export=ALL env A=1 python pretrain_gpt_s2.py", 1, 16),
    "mpirun": ("mpirun -np 8 -x PATH python pretrain_gpt_s2.py", 1, 8),
    "a line of exports before it": ("export A=1\ntorchrun --nproc-per-node 8 pretrain_gpt_s2.py", 1, 8),
    "words in front": ("exec nice -n 5 nohup torchrun --nproc-per-node 8 pretrain_gpt_s2.py", 1, 8),
}


@pytest.mark.parametrize("case", LINES)
def test_every_form(case):
    text, nodes, processes = LINES[case]
    found = parse_launch_line([*shlex.split(text), *FLAGS])
    assert found.flags == FLAGS and found.script.endswith("pretrain_gpt_s2.py")
    assert (found.nodes, found.processes_per_node) == (nodes, processes)
    quoted = parse_launch_line([f"{text} \\\n  {shlex.join(FLAGS)}"])
    assert quoted == found


def test_what_the_line_sets():
    found = parse_launch_line(["A=1", "env", "B=2", "torchrun", "x.py", "--flag", "C=3"])
    assert found.environment == {"A": "1", "B": "2"} and found.flags == ("--flag", "C=3")
    assert parse_launch_line(FLAGS) == LaunchLine(FLAGS)


@pytest.mark.parametrize("text", ["torchrun\na.py\n--split\n99,1,0\n", "torchrun a.py \\\n  --split 99,1,0\n"])
def test_a_line_from_the_standard_input(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    line = parse_launch_line(launch_words(["-"]))
    assert line.script == "a.py" and line.flags == ("--split", "99,1,0")
    assert launch_words(["python", "-"]) == ["python", "-"]


def test_world_size():
    found = parse_launch_line(["torchrun", "--nnodes", "2", "--nproc-per-node", "gpu", "x.py"])
    assert found.world_size(8) == 16
    with pytest.raises(ValueError, match="give --nproc-per-node 8"):
        found.world_size(0)


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "there is none; expected torchrun or python"),
        ("ls -l", "'ls -l' is no training command"),
        ("bash examples/pretrain_7b.sh", "is a shell script; expected the command that it starts; give that command"),
        ("examples/pretrain_7b.sh --train-iters 5", "is a shell script"),
        ("srun --nodes 4 hostname", "starts no training"),
        ("python -c 'print()'", "names no script"),
        ("python", "names no script"),
        ("python -m pip install", "the module torch.distributed.run"),
        ("torchrun --nproc-per-node 0 x.py", "--nproc-per-node='0'; expected a number of processes"),
        ("torchrun --nproc-per-node 1e9 x.py", "expected a number of processes"),
        ("torchrun --nnodes '' x.py", "--nnodes=''"),
        ("torchrun --module x", "without --module"),
        ("torchrun --wrong 3 x.py", "unrecognized arguments: --wrong; expected torchrun's options"),
        ("torchrun", "the following arguments are required: script"),
        ("WORLD_SIZE=many python x.py", "WORLD_SIZE='many'"),
        ("torchrun 'x.py", "close its quotes"),
    ],
)
def test_what_is_no_launch_line(line, words):
    arguments = [line] if "'x.py" in line else shlex.split(line)
    with pytest.raises(ValueError) as caught:
        parse_launch_line(arguments)
    assert words in str(caught.value) and "\n" not in str(caught.value)


WORDS = ["torchrun", "python", "srun", "env", "-m", "-n", "A=1", "x.py", "--nnodes", "-N4", "=", "-", ""]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(WORDS) | st.text()))
def test_whatever_stands_there_is_one_line(words):
    caught = None
    try:
        parse_launch_line(words)
    except ValueError as error:
        caught = str(error)
    assert caught is None or (caught.startswith("launch line: ") and "\n" not in caught and len(caught) < 1000)


def test_options_are_those_of_torchrun():
    from torch.distributed.run import get_args_parser

    values, switches = set(), set()
    for action in get_args_parser()._actions:
        if action.dest not in ("help", "print_completion") and action.option_strings:
            name = next(text for text in action.option_strings if text.startswith("--"))
            (switches if action.nargs == 0 else values).add(name)
            short = [text for text in action.option_strings if not text.startswith("--")]
            assert short == [TORCHRUN_SHORT[name]] if short else name not in TORCHRUN_SHORT
    assert values <= set(TORCHRUN_VALUES) and switches <= set(TORCHRUN_SWITCHES)


def test_it_needs_the_standard_library_only():
    code = "import sys, s2_megatron.tools.launch_line; print({'numpy', 'torch', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
