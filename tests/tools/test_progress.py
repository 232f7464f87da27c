"""What long commands tell meanwhile: lines without a terminal, a bar or a spinner in one."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from s2_megatron.tools import progress
from s2_megatron.tools.progress import duration


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
