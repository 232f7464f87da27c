"""What commands print tables with, and how they write files: a file is the old one or the new one at every moment."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 140  # redirected output has no width of its own, and a table cut to 80 columns is hard to read


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # what rich has caught where it calls this; commands.main ends with it


def console() -> Console:
    """On standard output, as wide as the terminal, or WIDTH columns without a terminal."""
    return _Console(width=None if sys.stdout.isatty() else WIDTH)


def write_file(file: Path, content: bytes) -> None:
    """Write a file in one step, and the folders above it. An interruption leaves nothing behind. Raises OSError with
    the file's name."""
    file = Path(os.path.realpath(file))  # behind a link
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        os.replace(unfinished, file)
    except OSError as error:  # of a full disk Python's own has no name
        raise OSError(error.errno, error.strerror or str(error), str(file)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_figure(figure: Figure, file: Path, dpi: int) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format="png")
    write_file(file, picture.getvalue())
