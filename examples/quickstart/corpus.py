"""Real text that every machine has: the standard library of the running Python.

Two kinds of documents, sorted by name: the `.py` files of the standard library (their docstrings and comments included;
tests, site-packages and IDLE left out) and the docstrings of the modules that are written in C. The same Python build
always gives the same documents; another one gives others, which is why a run keeps the SHA-256 of each.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

# Tests repeat boilerplate, `site-packages` is not the standard library, `encodings` is tables of code points, `lib2to3`
# is Python 2.
EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "encodings",
    "lib2to3",
}


@dataclass(frozen=True)
class Document:
    """One text: `name` is `lib/<path>` or `docs/<module>`, `text` is never empty."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


def source_documents(folder: Path) -> list[Document]:
    """The UTF-8 `.py` files under `folder`, sorted by relative path."""
    documents = []
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        relative = path.relative_to(folder)
        if EXCLUDED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few encodings' own test data are written in them
        if text.strip():
            documents.append(Document(f"lib/{relative.as_posix()}", text))
    return documents


def c_module_names() -> list[str]:
    """The standard library's modules without Python source: built in, or compiled files in `lib-dynload`."""
    names = set(sys.builtin_module_names)
    dynload = Path(sysconfig.get_paths()["stdlib"]) / "lib-dynload"
    if dynload.is_dir():
        names |= {path.name.split(".")[0] for path in dynload.iterdir() if path.suffix == ".so"}
    return sorted(name for name in names & set(sys.stdlib_module_names) if "test" not in name)


def docstring_document(module_name: str) -> Document | None:
    """The docstrings of one module, its functions, its classes and their methods; None when it has none or is not
    there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(module_name)
    except ImportError:
        return None  # the file is there, what it links to (Tk, say) is not
    parts = []

    def add(name: str, thing) -> None:
        text = inspect.getdoc(thing)
        if text and text.strip():
            parts.append(f"{name}\n\n{text.strip()}\n")

    add(module_name, module)
    for name in sorted(vars(module)):
        thing = vars(module)[name]
        # A name defined elsewhere is documented there.
        if (
            not (inspect.isclass(thing) or inspect.isroutine(thing))
            or getattr(thing, "__module__", None) != module_name
        ):
            continue
        add(f"{module_name}.{name}", thing)
        if inspect.isclass(thing):
            for attribute in sorted(vars(thing)):
                if not attribute.startswith("_") and inspect.isroutine(vars(thing)[attribute]):
                    add(f"{module_name}.{name}.{attribute}", vars(thing)[attribute])
    return Document(f"docs/{module_name}", "\n".join(parts)) if parts else None


def collect_documents() -> list[Document]:
    """All documents of the running Python, sorted by name."""
    documents = source_documents(Path(sysconfig.get_paths()["stdlib"]))
    documents += filter(None, map(docstring_document, c_module_names()))
    return sorted(documents, key=lambda document: document.name)


def document_hashes(documents: list[Document]) -> dict[str, str]:
    """SHA-256 of every document's text, by name."""
    return {document.name: document.sha256 for document in documents}


def corpus_hash(hashes: dict[str, str]) -> str:
    """One SHA-256 for the whole corpus."""
    return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()
