"""Strict reading of a YAML file, and one ValueError for everything that is wrong with it.

A message has the file, the key with its line, what was found, what was expected and the nearest valid value:

    my.yaml: specs.S.local_tokens (line 9): got 1000; expected a multiple of block_size=64; nearest valid: 960 or 1024
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

KeyPath = tuple[str | int, ...]  # where a value stands: ("specs", "S", "ranges", 0, "stride")
PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `fix` is the nearest valid value, or what to do."""

    path: KeyPath
    got: str
    expected: str
    fix: str


class ConfigError(ValueError):
    """Everything that is wrong with one config file. `problems` holds the parts, str() the whole text."""

    def __init__(self, source: str, problems: Iterable[Problem], lines: Mapping[KeyPath, int] | None = None):
        self.source, self.problems = source, tuple(problems)
        texts = []
        for p in self.problems:
            place = key_text(p.path) + _line_text(p.path, lines or {})
            texts.append(f"{place}: got {p.got}; expected {p.expected}; nearest valid: {p.fix}")
        joined = texts[0] if len(texts) == 1 else f"{len(texts)} problems" + "".join(f"\n  {text}" for text in texts)
        super().__init__(f"{source}: {joined}")


@dataclass(frozen=True)
class Source:
    """Where settings came from. lines: of the keys, in a file."""

    name: str = "<config>"
    folder: Path = Path()  # where relative paths in the settings start
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def error(self, *problems: Problem) -> ConfigError:
        """A ValueError about settings from here."""
        return ConfigError(self.name, problems, self.lines)


def key_text(path: KeyPath) -> str:
    """("specs", "S", "ranges", 0, "stride") -> "specs.S.ranges[0].stride"; the empty path is the file as a whole."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "the file"


def _line_text(path: KeyPath, lines: Mapping[KeyPath, int]) -> str:
    # A key that is missing has no line of its own: the mapping that should hold it does.
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return f" (line {lines[path[:length]]})"
    return ""


def shown(value) -> str:
    """A value as its YAML text and kind, short enough for one line: `true (boolean)`, `'64' (text)`, `1000`."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (boolean)"
    if isinstance(value, str):
        return f"{value!r}"
    if isinstance(value, Mapping):
        return "a mapping with the keys " + ", ".join(map(str, value)) if value else "an empty mapping"
    if isinstance(value, list | tuple):
        text = json.dumps(list(value), default=str)
        return f"the list {text if len(text) <= 60 else text[:57] + '...'}"
    return str(value)


def nearest_name(name, valid: Iterable[str]) -> str | None:
    """The valid name that resembles `name` most, or None when none does."""
    names = list(valid)
    exact = [candidate for candidate in names if candidate.lower() == str(name).lower()]
    return next(iter(exact or difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)), None)


def nearest_multiples(value: int, unit: int) -> str:
    """The positive multiples of `unit` next to `value`: "960 or 1024"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"


def unknown_name(path: KeyPath, name, valid: Iterable[str], what: str) -> Problem:
    """The problem of a name that is none of `valid`."""
    names = list(valid)
    near = nearest_name(name, names)
    return Problem(
        path,
        f"{shown(name)}, an unknown {what}",
        "one of " + ", ".join(names),
        near or f"remove it, or use one of the {len(names)} above",
    )


def read_yaml(path: str | Path) -> tuple[dict, dict[KeyPath, int]]:
    """Reads one YAML document of plain scalars, lists and mappings.

    Returns (the mapping, the line of every key and list item). Raises ConfigError for a file that is missing, not
    YAML, not a mapping, has a key twice, or has a tag that would build an object.
    """
    source, file = str(path), Path(path)
    if not file.is_file():
        neighbours = sorted(p.name for p in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        near = nearest_name(file.name, neighbours)
        where = (
            f"{file.parent / near}"
            if near
            else f"one of {', '.join(neighbours)}"
            if neighbours
            else "a path that exists"
        )
        raise ConfigError(source, [Problem((), "a folder" if file.is_dir() else "no such file", "a YAML file", where)])
    loader = None
    try:
        loader = yaml.SafeLoader(file.read_bytes())
        node = loader.get_single_node()
        lines, problems = _inspect_node(node)
        if problems:
            raise ConfigError(source, problems, lines)
        data = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        detail = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(
            source,
            [
                Problem(
                    (),
                    f"{detail}{where}",
                    "one YAML document",
                    "correct that line; indent with spaces and quote text that holds ': ', '{' or '#'",
                )
            ],
        ) from error
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(source, [Problem((), shown(data), "a mapping of settings", "layers: D")])
    return data, lines


def _inspect_node(root: yaml.Node | None) -> tuple[dict[KeyPath, int], list[Problem]]:
    """Lines of all keys, and the problems that are lost once the nodes are Python values: tags and duplicate keys."""
    lines: dict[KeyPath, int] = {}
    problems: list[Problem] = []
    seen: set[int] = set()  # an alias leads to a node again: each is visited once
    open_nodes: set[int] = set()  # those that hold the present one

    def visit(node: yaml.Node, path: KeyPath) -> None:
        lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in open_nodes:
            problems.append(
                Problem(
                    path, "an alias (*name) inside the value that it names", "values that end", "write the value out"
                )
            )
        if id(node) in seen:
            return
        seen.add(id(node))
        open_nodes.add(id(node))
        if node.tag not in PLAIN_TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            problems.append(
                Problem(
                    path,
                    f"the YAML tag {tag}",
                    "plain text, numbers, lists and mappings: no tag builds an object here",
                    "remove the tag; a Python pattern is given as `function: module:function`",
                )
            )
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                visit(item, (*path, index))
        elif isinstance(node, yaml.MappingNode):
            first: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                kind = key.tag.replace("tag:yaml.org,2002:", "")
                if kind not in ("str", "merge"):
                    text = key.value if isinstance(key, yaml.ScalarNode) else "..."
                    problems.append(
                        Problem(
                            path,
                            f"the key {text} on line {line}, which YAML reads as {kind}",
                            "a name as the key",
                            f"put it in quotes: '{text}'",
                        )
                    )
                    continue
                name = key.value
                if name in first:
                    problems.append(
                        Problem(
                            (*path, name),
                            f"the key twice, on the lines {first[name]} and {line}",
                            "each key once",
                            f"remove line {first[name]} or line {line}",
                        )
                    )
                first.setdefault(name, line)
                lines.setdefault((*path, name), line)
                visit(value, (*path, name))
        open_nodes.discard(id(node))

    if root is not None:
        visit(root, ())
    return lines, problems
