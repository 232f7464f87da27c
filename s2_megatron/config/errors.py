"""One ValueError for everything that is wrong with a YAML file.

A message has the file, the key with its line, what was found, what was expected and the nearest valid value:

    my.yaml: specs.S.local_tokens (line 9): got 1000; expected a multiple of block_size=64; nearest valid: 960 or 1024
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

KeyPath = tuple[str | int, ...]  # where a value stands: ("specs", "S", "ranges", 0, "stride")
SHOWN_PROBLEMS = 5  # of one file; the others are only counted
LONGEST = {"got": 300, "expected": 240, "fix": 200}  # characters of a message's parts


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
        for p in self.problems[:SHOWN_PROBLEMS]:
            place = key_text(p.path) + _line_text(p.path, lines or {})
            got, expected, fix = (printable(getattr(p, name), most) for name, most in LONGEST.items())
            texts.append(f"{place}: got {got}; expected {expected}; nearest valid: {fix}")
        if len(self.problems) > SHOWN_PROBLEMS:
            texts.append(f"and {len(self.problems) - SHOWN_PROBLEMS} more")
        joined = texts[0] if len(texts) == 1 else f"{len(self.problems)} problems" + "".join(f"\n  {t}" for t in texts)
        super().__init__(f"{printable(source, 1000)}: {joined}")


@dataclass(frozen=True)
class Source:
    """Where settings came from. lines: of the keys, in a file."""

    name: str = "<config>"
    folder: Path = Path()  # where relative paths in the settings start
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def error(self, *problems: Problem) -> ConfigError:
        """A ValueError about settings from here."""
        return ConfigError(self.name, problems, self.lines)


def printable(value, most: int = 60) -> str:
    """Text in one line of at most `most` characters: control characters escaped, the rest cut."""
    text = str(value)
    short = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: most + 1])
    return short if len(short) <= most else short[: most - 3] + "..."


def joined(names: Iterable[str], most: int = 12) -> str:
    """The first names, and how many more there are: "D, S, and 3 more"."""
    names = list(names)
    text = ", ".join(printable(name, 40) for name in names[:most])
    return text if len(names) <= most else f"{text}, and {len(names) - most} more"


def key_text(path: KeyPath) -> str:
    """("specs", "S", "ranges", 0, "stride") -> "specs.S.ranges[0].stride"; the empty path is the file as a whole."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{printable(part)}" if text else printable(part)
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
        return printable(repr(value[:61]))
    if isinstance(value, Mapping):
        return f"a mapping with the keys {joined(value)}" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"the list {printable(_item_text(value))}"
    return _item_text(value) if isinstance(value, int) else printable(value)


def _item_text(value, levels: int = 3) -> str:
    """A value inside of a list, as JSON; long and deep ones cut."""
    if isinstance(value, list | tuple):
        items = [_item_text(item, levels - 1) for item in value[:20]] if levels else ["..."] * bool(value)
        return f"[{', '.join(items)}{', ...' * (len(value) > 20)}]"
    if isinstance(value, Mapping):
        return "{...}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 100:
        return f"an integer of {value.bit_length()} bits"
    return json.dumps(value[:61]) if isinstance(value, str) else json.dumps(value, default=str)


def nearest_name(name, valid: Iterable[str]) -> str | None:
    """The valid name that resembles `name` most, or None when none does."""
    names, name = list(valid), str(name)[:80]
    exact = [candidate for candidate in names if candidate.lower() == name.lower()]
    return next(iter(exact or difflib.get_close_matches(name, names, n=1, cutoff=0.5)), None)


def nearest_multiples(value: int, unit: int) -> str:
    """The positive multiples of `unit` next to `value`: "960 or 1024"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"


def unknown_name(path: KeyPath, name, valid: Iterable[str], what: str) -> Problem:
    """The problem of a name that is not one of `valid`."""
    names = list(valid)
    near = nearest_name(name, names)
    return Problem(
        path,
        f"{shown(name)}, an unknown {what}",
        f"one of {joined(names)}",
        near or f"remove it, or use one of the {len(names)} above",
    )
