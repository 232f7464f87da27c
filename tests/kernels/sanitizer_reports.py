"""What compute-sanitizer reported, compared with the committed list of explained reports.

check_kernels.py runs the tool. A report that sanitizer_explained.json does not explain for its tool and backend is a
failure, and so is a log that does not end as a complete run does: with the tool's summary and after "cases done".
"""

import re
from pathlib import Path

PRINT_LIMIT = 1_000_000  # what check_kernels.py gives racecheck: with so many reports some may be missing
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


def unexplained(reports: list[str], tool: str, backend: str, explained: list[dict]) -> list[str]:
    """Those that no entry explains. An entry has tool, backend, report (a regular expression for the whole report)
    and why."""
    known = [
        re.compile(entry["report"], re.DOTALL)
        for entry in explained
        if (entry["tool"], entry["backend"]) == (tool, backend)
    ]
    return [report for report in reports if not any(pattern.search(report) for pattern in known)]


def kind_of(report: str) -> str:
    """A report without what differs between equal ones: addresses, blocks, values, the lane of a thread."""
    lines = [line for line in report.splitlines() if not line.startswith("Current Value")]
    text = re.sub(r"__shared__ 0x[0-9a-f]+ in block \(\d+,\d+,\d+\)", "__shared__", "\n".join(lines))
    return re.sub(r"Thread \((\d+),0,0\)", lambda match: f"Thread of warp {int(match[1]) // 32}", text)


def complete(log: str) -> bool:
    return bool(re.search(r"^cases done: [1-9]", log, re.MULTILINE)) and "SUMMARY" in log
