"""docs/troubleshooting.md has every error message: each one that the source raises is matched by a row.

A row starts with a message in a code span, in which `...` stands for anything: `` `head dim ...` `` matches every
message that begins so.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = [
    *(ROOT / "s2_megatron").rglob("*.py"),
    *(ROOT / "kernels").rglob("*.py"),
    *(ROOT / "examples").rglob("*.py"),
    ROOT / "pretrain_gpt_s2.py",
]
BUILTIN = {"ValueError", "RuntimeError"}
HOLE = "\0"  # a value in a message
# Which argument of other calls is a message, or its part that this page has: Problem(path, got, expected, fix),
# _wrong(expected, fix), ArgumentError(action, message), Mistake(made, message), found.append(message) of the refusals.
AT = {"Problem": 2, "_wrong": 0, "ArgumentError": 1, "Mistake": 1, "append": 0}
LEAST_LETTERS = 5  # that a message or a row has of its own; with fewer a row would match anything


class Message(NamedTuple):
    place: str  # file:line
    text: str  # with HOLE for values


def own_letters(text: str) -> str:
    return re.sub(r"[^a-zA-Z]|expected", "", text)


def assigned_texts(tree: ast.AST) -> dict[str, ast.expr]:
    """Names that a file gives to string constants."""
    constants = (
        node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    )
    return {node.targets[0].id: node.value for node in constants if isinstance(node.targets[0], ast.Name)}


def template(node: ast.expr, names: dict[str, ast.expr]) -> str | None:
    """The text of a string expression, with HOLE for what is only known at run time; None for no text at all."""
    node = names.get(node.id, node) if isinstance(node, ast.Name) else node
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = template(node.left, names), template(node.right, names)
        return None if left is None and right is None else (left or HOLE) + (right or HOLE)
    return None


def error_classes(tree: ast.AST) -> set[str]:
    """Exceptions that a file defines."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {node.name for node in classes if re.search(r"Error|Exception", " ".join(map(ast.unparse, node.bases)))}


@cache
def messages() -> tuple[Message, ...]:
    """What the source raises: messages of `SomeError("...")`, and the expectations of Problems about the YAML."""
    paths = [path for path in SOURCES if not path.is_relative_to(ROOT / "s2_megatron" / "kernels")]  # a symlink
    trees = {path: ast.parse(path.read_text()) for path in paths}
    raised = BUILTIN.union(*(error_classes(tree) for tree in trees.values()))
    found = []
    for path, tree in trees.items():
        names = assigned_texts(tree)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func).rpartition(".")[2]
            at = 0 if name in raised else AT.get(name)
            if name == "append" and "refusals" not in path.as_posix():
                continue
            if at is None or len(call.args) <= at:
                continue
            text = template(call.args[at], names)
            if text is not None and len(own_letters(text)) >= LEAST_LETTERS:
                found.append(Message(f"{path.relative_to(ROOT)}:{call.lineno}", text))
    return tuple(found)


@cache
def documented() -> tuple[str, ...]:
    """The first code span of every row of every table."""
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text().replace("\\|", "|"), flags=re.M)
    return tuple(rows)


def matches(row: str, text: str) -> bool:
    """Whether a row's message matches the beginning of a template. `...` matches anything, values included."""
    parts = re.split(r"(\.\.\.)", row.removesuffix("..."))
    pattern = "".join(".*" if part == "..." else re.escape(part) for part in parts)
    return re.match(pattern, text, flags=re.S) is not None


def test_every_message_has_a_row():
    missing = [message for message in messages() if not any(matches(row, message.text) for row in documented())]
    assert not [f"{place}: {text.replace(HOLE, '...')}" for place, text in missing]


def test_rows_are_not_too_general():
    short = [row for row in documented() if len(own_letters(row)) < LEAST_LETTERS]
    assert not set(short) - refusal_names() - set(shell_settings())


def test_every_row_is_a_message():
    unused = [row for row in documented() if not any(matches(row, message.text) for message in messages())]
    assert not sorted(set(unused) - refusal_names() - set(shell_settings()))


def refusal_names() -> set[str]:
    from s2_megatron.megatron.refusals import REFUSALS

    return {refusal.name for refusal in REFUSALS}


def test_every_refusal_has_a_row():
    assert not sorted(refusal_names() - set(documented()))


def shell_settings() -> list[str]:
    """The settings that the launchers' and the SLURM script's own errors begin with."""
    scripts = [ROOT / "slurm" / "pretrain.sbatch", *(ROOT / "examples").rglob("*.sh")]
    text = "".join(script.read_text() for script in scripts if script.name != "checks.sh")  # what they call
    found = re.findall(r"\bfail \"(?:\$?(\w+)=)", text) + re.findall(r"^ *require(?:_\w+)? (\w+)", text, flags=re.M)
    return sorted(set(found) - {"name"})


def test_every_setting_of_the_launchers_has_a_row():
    assert not [name for name in shell_settings() if name not in documented()]


@pytest.mark.parametrize(
    "row, text, expected",
    [
        ("head dim ...", f"head dim {HOLE}; expected at most {HOLE}", True),
        ("... has ... dimensions", f"{HOLE} has {HOLE} dimensions; tensor_format={HOLE}", True),
        ("head dim ...", f"query has dtype {HOLE}", False),
        ("key_slot has shape", f"key_slot has {HOLE} KV heads", False),
    ],
)
def test_matching(row, text, expected):
    assert matches(row, text) == expected


def test_the_source_is_searched():
    texts = [message.text for message in messages()]
    assert len(texts) > 100
    assert any(text.startswith("block_size=") for text in texts)
    assert any("a multiple of block_size=" in text for text in texts)
