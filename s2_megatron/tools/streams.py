"""The error line that ends a command, and its end: for whatever terminal, pipe or disk is behind the streams."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys

# What bad input raises, as a rule. Anything else is a fault of ours, which a traceback shows.
BAD_INPUT = (ValueError, OSError, OverflowError, RecursionError, MemoryError)


def say_error(error: BaseException) -> None:
    """The error line. It may find no room, as on a full disk; the status is said all the same."""
    with contextlib.suppress(OSError):
        print(f"error: {error_text(error)}", file=sys.stderr, flush=True)


def error_text(error: BaseException) -> str:
    """What an error line says: a ValueError's own text, of others what failed, too."""
    if isinstance(error, OSError) and error.strerror is not None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = "" if error.filename is None else f"{one_line(error.filename)}: "
            return f"{where}{error.strerror}; expected room for the output; free some, or write to another disk"
        if error.filename is not None:
            return f"{one_line(error.filename)}: {error.strerror}; expected a path that can be used; correct it"
        return f"{error.strerror}; expected files and streams that can be used; see what the command reads and writes"
    if isinstance(error, UnicodeError):
        return f"an input is no UTF-8 ({error}); expected text in UTF-8; convert it, with iconv for example"
    if isinstance(error, RecursionError):
        return "an input is nested too deeply; expected what a command or Megatron wrote; correct the files"
    if isinstance(error, OverflowError):
        return f"a number is too large ({error}); expected one of 64 bits; correct the options and the files"
    if isinstance(error, MemoryError):
        return f"not enough memory ({error or 'refused'}); expected sizes that fit; give smaller ones"
    return one_line(error)


def one_line(text) -> str:
    """The text without control characters, which names of files may have, and with words of a page cut in their middle;
    only indented lines begin anew."""
    text = re.sub(r"\S{500,}", lambda word: f"{word[0][:200]}...{word[0][-50:]}", str(text))
    return "\n  ".join("".join(c if c.isprintable() else _escaped(c) for c in line) for line in text.split("\n  "))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def flush() -> None:
    """Writes the rest of standard output here: an error at the end of the process would be a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the end of the process flushes once more
        raise
