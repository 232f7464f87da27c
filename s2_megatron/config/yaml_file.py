"""Strict and bounded reading of a YAML file: plain scalars, lists and mappings, and nothing that YAML 1.1 reads as
something else than it looks like."""

from __future__ import annotations

import os
import re
import stat
from itertools import islice
from pathlib import Path

import yaml

from s2_megatron.config.errors import ConfigError, KeyPath, Problem, joined, nearest_name, printable, shown

PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)
MOST_BYTES = 2**16
MOST_LEVELS = 20  # of nesting; a range's stride stands on level 6
MOST_VALUES = 2**15  # with every alias written out
MOST_DIGITS = 30
MOST_NEIGHBOURS = 500  # files of a folder that a name is compared with


class _BoundedLoader(yaml.SafeLoader):
    levels = 0

    def compose_node(self, parent, index):
        if self.levels == MOST_LEVELS:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, f"more than {MOST_LEVELS} levels of nesting", mark)
        self.levels += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.levels -= 1


def not_a_file(path: str | Path) -> str | None:
    """What stands at a path where a file is wanted, in words; None for a file."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "no such file"
    except (OSError, ValueError) as error:
        return f"a path that cannot be used ({getattr(error, 'strerror', None) or error})"
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "a device or pipe"


def neighbours(file: Path, pattern: str) -> list[str]:
    """Names of the files of the same folder that match a pattern, sorted."""
    try:
        return sorted(path.name for path in islice(file.parent.glob(pattern), MOST_NEIGHBOURS))
    except (OSError, ValueError):
        return []


def read_yaml(path: str | Path) -> tuple[dict, dict[KeyPath, int]]:
    """Reads one YAML document of plain scalars, lists and mappings.

    Returns (the mapping, the line of every key and list item). Raises ConfigError for a file that is missing, too
    large, not text, not YAML, not a mapping, has a key twice, a tag that would build an object, or a number or word
    that YAML 1.1 reads as another one (`010`, `1:30`, `yes`).
    """
    source, file = str(path) or "''", Path(path)
    found = not_a_file(path) if str(path).strip() else "an empty path (an unset variable?)"
    if found is not None:
        near = nearest_name(file.name, names := neighbours(file, "*.yaml"))
        others = f"one of {joined(names)}" if names else "a path that exists"
        raise ConfigError(source, [Problem((), found, "a YAML file", str(file.parent / near) if near else others)])
    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        problem = Problem((), f"a file that cannot be read ({error.strerror})", "a readable file", f"chmod u+r {file}")
        raise ConfigError(source, [problem]) from error
    if len(content) > MOST_BYTES:
        size = f"more than {MOST_BYTES:,} bytes"
        fix = "a plan that tiles, such as SSSD; a mask in an .npz"
        raise ConfigError(source, [Problem((), size, f"at most {MOST_BYTES:,} bytes of YAML", fix)])
    loader = None
    try:
        loader = _BoundedLoader(content)
        node = loader.get_single_node()
        lines, problems = _inspect_node(node)
        if problems:
            raise ConfigError(source, problems, lines)
        data = None if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        found = f"{error.reason} at position {error.position}"
        fix = "save the file as UTF-8 without control characters"
        raise ConfigError(source, [Problem((), printable(found), "text in UTF-8", fix)]) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        detail = getattr(error, "problem", None) or " ".join(str(error).split())
        fix = "correct that line; indent with spaces and quote text that holds ': ', '{' or '#'"
        raise ConfigError(source, [Problem((), f"{printable(detail)}{where}", "one YAML document", fix)]) from error
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:  # `!!int x`
        if isinstance(error, ConfigError):
            raise
        found = f"a value that is not of its tag ({printable(error)})"
        raise ConfigError(source, [Problem((), found, "values that fit their YAML tags", "remove the tags")]) from error
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(source, [Problem((), shown(data), "a mapping of settings", "layers: D")])
    return data, lines


def _inspect_node(root: yaml.Node | None) -> tuple[dict[KeyPath, int], list[Problem]]:
    """Lines of all keys, and the problems that are lost once the nodes are Python values: tags, duplicate keys, values
    that look like others, aliases that expand without end."""
    lines: dict[KeyPath, int] = {}
    problems: list[Problem] = []
    values: dict[int, int] = {}  # of a node, aliases written out; an alias leads to a node again: each is visited once
    open_nodes: set[int] = set()  # those that hold the present one

    def visit(node: yaml.Node, path: KeyPath) -> int:
        lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in open_nodes:
            problems.append(
                Problem(
                    path, "an alias (*name) inside the value that it names", "values that end", "write the value out"
                )
            )
            return 1
        if id(node) in values:
            return values[id(node)]
        open_nodes.add(id(node))
        count = 1
        if node.tag not in PLAIN_TAGS:
            tag = printable(node.tag.replace("tag:yaml.org,2002:", "!!"))
            problems.append(
                Problem(
                    path,
                    f"the YAML tag {tag}",
                    "plain text, numbers, lists and mappings: no tag builds an object here",
                    "remove the tag; a Python pattern is given as `function: module:function`",
                )
            )
        elif isinstance(node, yaml.ScalarNode):
            problems.extend(_surprises(node, path))
        elif isinstance(node, yaml.SequenceNode):
            count += sum(visit(item, (*path, index)) for index, item in enumerate(node.value))
        elif isinstance(node, yaml.MappingNode):
            first: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                kind = key.tag.replace("tag:yaml.org,2002:", "")
                if kind not in ("str", "merge") or not isinstance(key, yaml.ScalarNode):
                    text = printable(key.value) if isinstance(key, yaml.ScalarNode) else "..."
                    problems.append(
                        Problem(
                            path,
                            f"the key {text} on line {line}, which YAML reads as {printable(kind)}",
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
                count += visit(value, (*path, name))
        open_nodes.discard(id(node))
        values[id(node)] = count
        return count

    if root is not None and visit(root, ()) > MOST_VALUES and not problems:
        found = f"aliases (*name) that stand for more than {MOST_VALUES:,} values"
        problems.append(Problem((), found, f"at most {MOST_VALUES:,} values", "write the values out"))
    return lines, problems


def _surprises(node: yaml.ScalarNode, path: KeyPath) -> list[Problem]:
    """Numbers and words that YAML 1.1 reads as something else than they look like."""
    kind, text = node.tag.rpartition(":")[2], node.value
    if kind in ("int", "float") and ":" in text:
        found = f"{printable(text)}, which YAML 1.1 reads as a number to base 60"
        return [Problem(path, found, "a number without ':'", "the number in decimal, or text in quotes")]
    if kind == "int" and re.fullmatch(r"[-+]?0[0-7_]+", text):
        decimal = text.replace("_", "").lstrip("+-0") or "0"
        found = f"{printable(text)}, which YAML 1.1 reads as an octal number"
        return [Problem(path, found, "a number without leading zeros", printable(decimal))]
    if kind == "int" and len(text) > MOST_DIGITS:
        found = f"an integer of {len(text)} characters"
        return [Problem(path, found, f"an integer of at most {MOST_DIGITS} characters", "a smaller number")]
    if kind == "bool" and text.lower() not in ("true", "false") and path not in (("layers",), ("mtp_layers",)):
        boolean = "true" if text.lower() in ("yes", "on") else "false"
        found = f"{printable(text)}, which YAML 1.1 reads as {boolean} (boolean)"
        return [Problem(path, found, "no unquoted yes, no, on or off", f"'{printable(text)}' in quotes, or a number")]
    return []
