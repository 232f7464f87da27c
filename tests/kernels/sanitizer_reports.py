"""What compute-sanitizer reported, compared with the committed list of explained reports.

    python tests/kernels/sanitizer_reports.py TOOL BACKEND LOG

Fails (exit code 1) on a report that sanitizer_explained.json does not explain for this tool and backend, and when the
log does not end as a complete run does: with the tool's summary and after "cases done".
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

PRINT_LIMIT = 1_000_000  # what sanitize.sh gives racecheck: with so many reports some may be missing
EXPLAINED = Path(__file__).with_name("sanitizer_explained.json")
FRAME = re.compile(r"^COMPUTE-SANITIZER|SUMMARY|^Target application returned")


def reports(log: str) -> list[str]:
    """The reports of a log: paragraphs of lines that begin with "=========", without the tool's own frame."""
    paragraphs, current = [], []
    for line in [*log.splitlines(), ""]:
        text = line[9:].rstrip() if line.startswith("=========") else ""
        starts = bool(text) and not text.startswith("  ")  # continuation lines are indented deeper than the first one
        if current and (not text or starts):
            paragraphs.append("\n".join(current))
            current = []
        if text:
            current.append(text.strip())
    return [paragraph for paragraph in paragraphs if not FRAME.search(paragraph)]


def unexplained(log: str, tool: str, backend: str, explained: list[dict]) -> list[str]:
    """Reports that no entry explains. An entry has tool, backend, report (a regular expression for the whole report)
    and why."""
    known = [
        re.compile(entry["report"], re.DOTALL)
        for entry in explained
        if (entry["tool"], entry["backend"]) == (tool, backend)
    ]
    return [report for report in reports(log) if not any(pattern.search(report) for pattern in known)]


def kind_of(report: str) -> str:
    """A report without what differs between equal ones: addresses, blocks, values, the lane of a thread."""
    lines = [line for line in report.splitlines() if not line.startswith("Current Value")]
    text = re.sub(r"__shared__ 0x[0-9a-f]+ in block \(\d+,\d+,\d+\)", "__shared__", "\n".join(lines))
    return re.sub(r"Thread \((\d+),0,0\)", lambda match: f"Thread of warp {int(match[1]) // 32}", text)


def complete(log: str) -> bool:
    return bool(re.search(r"^cases done: [1-9]", log, re.MULTILINE)) and "SUMMARY" in log


def main(tool: str, backend: str, path: str) -> int:
    log = Path(path).read_text(errors="replace")
    if not complete(log):
        print(f"{tool}, {backend}: the run did not end as it should\n{log[-3000:]}")
        return 1
    found = unexplained(log, tool, backend, json.loads(EXPLAINED.read_text()))
    for report, count in Counter(map(kind_of, found)).most_common(20):
        print(f"{count} x {report}", end="\n\n")
    total = len(reports(log))
    print(f"{tool}, {backend}: {total} reports, {len(found)} of them not explained in {EXPLAINED.name}")
    if total >= PRINT_LIMIT:
        print(
            f"{tool}, {backend}: the tool prints {PRINT_LIMIT} reports at most, and may have left out others; give it "
            "fewer cases (--only)"
        )
        return 1
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
