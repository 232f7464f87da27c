"""A launch line without a mistake that an error line has named, so that the check can look for the next one.

An error line says what to do: `unknown flag ...; did you mean FLAG?`, `...; add FLAG VALUE`, or it begins with the
settings that do not go together, which are left out then. Nothing else is understood, and nothing else is changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

RENAMED, ADDED, DROPPED = "renamed", "added", "dropped"
FLAG = re.compile(r"--[A-Za-z0-9][A-Za-z0-9_-]*")
# `add --num-layers 32`, not `add --save FOLDER`: what is to be thought of has capitals.
REMEDY = re.compile(r"; (?:[^;]*, or )?add (--[a-z0-9-]+)(?: ([^\s,;A-Z(]+))?(?=$|[,;])")
MEANT = re.compile(r"unknown flag [^:]*: (\S+).*; did you mean (--[a-z0-9-]+)\?$")


class Repaired(NamedTuple):
    """flags: of the line. touched: the flags that the repair is about. kind: RENAMED, ADDED, DROPPED, or empty where
    nothing was understood and the flags are as they were."""

    flags: tuple[str, ...]
    touched: frozenset[str]
    kind: str = ""


def named(text: str) -> set[str]:
    """The flags that a text names."""
    return {word.rstrip("-_") for word in FLAG.findall(text)}


def repaired(flags: Sequence[str], text: str) -> Repaired:
    """text: of an error line."""
    flags = tuple(flags)
    if found := MEANT.search(text):
        wrong, meant = found[1].partition("=")[0], found[2]
        words = tuple(re.sub(rf"^{re.escape(wrong)}(?==|$)", meant, word) for word in flags)
        return Repaired(words, frozenset((wrong, meant)), RENAMED)
    if (found := REMEDY.search(text)) and not _at(flags, found[1]):
        added = (found[1],) if found[2] is None else (found[1], found[2])
        return Repaired(flags + added, frozenset((*named(_settings(text)), found[1])), ADDED)
    settings = named(_settings(text))
    dropped = {at for flag in settings for at in _at(flags, flag)}
    left = tuple(word for at, word in enumerate(flags) if at not in dropped)
    return Repaired(left, frozenset(settings), DROPPED if dropped else "")


def _settings(text: str) -> str:
    """The beginning of an error line: the settings that are wrong."""
    return re.split(r": |; | is | are |, and ", text, maxsplit=1)[0] if text.startswith("--") else text.split("; ")[0]


def _at(flags: Sequence[str], flag: str) -> list[int]:
    """The places of a flag's words, and of the values behind them."""
    found: list[int] = []
    inside = False
    for at, word in enumerate(flags):
        if word.startswith("--"):
            inside = word.partition("=")[0] == flag
        if inside:
            found.append(at)
    return found
