"""Whether the tests of the studies have passed with the code and the data that are here.

    python -m studies.tests.passed            status 1 where they have not; .ci/run then runs `make test-studies`
    python -m studies.tests.passed --write    after they have passed; `make test-studies` does it

passed.txt beside this file is committed: a digest of studies/, and of the modules that it imports.
"""

import ast
import sys
from pathlib import Path

from tests.sources import ROOT, digest

COMMITTED = Path(__file__).with_name("passed.txt")
STUDIES = ROOT / "studies"
PACKAGES = ("s2_megatron.", "examples.")


def imported(file: Path) -> set[Path]:
    """The modules of PACKAGES that a Python file imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found = {ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith(PACKAGES)}
    return set(filter(Path.is_file, found))


def sources() -> set[Path]:
    """The code of the studies, their data, and what the code imports."""
    code = set(STUDIES.rglob("*.py"))
    return code.union(STUDIES.glob("results/*"), *map(imported, code))


def main(arguments: list[str]) -> int:
    now = digest(sources())
    if arguments == ["--write"]:
        COMMITTED.write_text(f"{now}\n")
        return 0
    if COMMITTED.exists() and COMMITTED.read_text() == f"{now}\n":
        print("studies: nothing has changed since their tests passed")
        return 0
    print("studies: their code, their data or what they import has changed since their tests passed")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
