"""The committed list of what the kernels need when they are compiled (compiled.json beside this file), and whether it
was measured of the kernels that are here.

{"3.8": {"sources": digest, "found": {name of an entry: what compile_kernels.py measured}}, ...}, by version of Triton.
Compiling all takes a quarter of an hour on two cores; while the digest stands, the tests read the list instead.
"""

import json
from pathlib import Path

from tests.sources import ROOT, digest

COMMITTED = Path(__file__).with_name("compiled.json")
# The kernels, what decides how they are launched, and what compiles them and reads the result.
SOURCES = (
    "s2_megatron/kernels/**/*.py",
    "s2_megatron/ops/*.py",
    "s2_megatron/patterns/*.py",
    "s2_megatron/context_parallel/exchange.py",
    "benchmarks/cases.py",
    "tests/kernels/compile_kernels.py",
    "tests/kernels/record_launches.py",
    "tests/kernels/shared_memory.py",
)


def sources() -> str:
    """A digest of the code that a list depends on."""
    return digest(file for pattern in SOURCES for file in ROOT.glob(pattern))


def read() -> dict[str, dict]:
    return json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}


def measured(release: str) -> dict[str, dict] | None:
    """What the kernels need with this Triton ("3.8"), or None where the list was measured of other code."""
    listed = read().get(release)
    return listed["found"] if listed and listed["sources"] == sources() else None


def write(release: str, found: dict[str, dict]):
    """A line for each entry, so that a change is a change of its line."""
    known = read() | {release: {"sources": sources(), "found": found}}
    by_version = sorted(known.items(), key=lambda item: [int(part) for part in item[0].split(".")])
    blocks = []
    for name, listed in by_version:
        lines = ",\n".join(f'    "{entry}": {json.dumps(needs)}' for entry, needs in sorted(listed["found"].items()))
        blocks.append(f'  "{name}": {{\n   "sources": "{listed["sources"]}",\n   "found": {{\n{lines}\n   }}\n  }}')
    COMMITTED.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
