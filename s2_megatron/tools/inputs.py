"""What commands read besides files of their own formats: texts of the command line and of the standard input, and
JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from s2_megatron.config.errors import printable

MOST_JSON_BYTES = 2**26


def argument_text(word: str, what: str) -> str:
    """A word of the command line as the UTF-8 text that was typed, whatever the locale is.

    what: the option, as the message begins. Raises ValueError for bytes that are no UTF-8.
    """
    try:
        word.encode()
    except UnicodeEncodeError:  # bytes that the locale's encoding does not have came as surrogates
        return _decoded(os.fsencode(word), what)
    return word


def standard_input(what: str, most: int) -> str:
    """The standard input as UTF-8 text, whatever the locale is.

    what: what it is read for, as the message begins. most: bytes. Raises ValueError for more of them, of which no more
    are read, and for bytes that are no UTF-8.
    """
    stream = getattr(sys.stdin, "buffer", None)
    content = sys.stdin.read(most + 1).encode() if stream is None else stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{what}: more than {most:,} bytes on the standard input; expected at most that; give less")
    return _decoded(content, what)


def _decoded(content: bytes, what: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what}: no UTF-8 (byte {error.start}: 0x{content[error.start]:02x}); expected text in UTF-8; convert it, "
            "with iconv for example"
        ) from error


def read_json_object(file: Path, where: str, expected: str) -> dict:
    """The object in a JSON file. where: what the message begins with; expected: what the user should name instead.

    Raises ValueError for a file that cannot be read, is too large, or holds anything else.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_JSON_BYTES + 1)
        if len(content) > MOST_JSON_BYTES:
            raise ValueError(f"more than {MOST_JSON_BYTES:,} bytes")
        found = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{where}: {file.name} cannot be read ({printable(reason, 200)}); expected {expected}; correct the path, "
            "or mend the file"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{where}: {file.name} holds {printable(repr(found))}; expected {expected}; correct the path, or mend the "
            "file"
        )
    return found
