"""Whether the code of the studies and of their tests is what `make test-studies` last passed with.

python -m studies.tested            # status 0 where it is, else 1
python -m studies.tested --write    # it passed now; `make test-studies` does it at its end
"""

import sys
from pathlib import Path

from tests.sources import ROOT, digest

PASSED = Path(__file__).with_name("tested.txt")


def main(arguments: list[str]) -> int:
    now = digest((ROOT / "studies").rglob("*.py"))
    if arguments == ["--write"]:
        PASSED.write_text(now + "\n")
    return int(not PASSED.exists() or PASSED.read_text().strip() != now)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
