"""A digest of sources: what takes a quarter of an hour to test is tested again when the digest changes."""

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def code_of(text: str) -> str:
    """A Python source without comments, docstrings and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def digest(files) -> str:
    """SHA-256 of the code in these files, of all bytes of those that are no Python, and of their paths in the
    repository."""
    found = hashlib.sha256()
    for file in sorted(files):
        content = code_of(file.read_text()).encode() if file.suffix == ".py" else file.read_bytes()
        found.update(f"{file.relative_to(ROOT)}\n".encode() + content + b"\n")
    return found.hexdigest()
