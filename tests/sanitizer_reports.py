"""What compute-sanitizer reported, compared with the committed list of explained reports.

    python tests/sanitizer_reports.py TOOL BACKEND LOG

Fails (exit code 1) on a report that sanitizer_explained.json does not explain for this tool and backend, and when the log does not end as a
complete run does: with the tool's summary and after "cases done".
"""

import json
import re
import sys
from pathlib import Path

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
    """Reports that no entry explains. An entry has tool, backend, report (a regular expression for the whole report) and why."""
    known = [re.compile(entry["report"], re.DOTALL) for entry in explained if (entry["tool"], entry["backend"]) == (tool, backend)]
    return [report for report in reports(log) if not any(pattern.search(report) for pattern in known)]


def complete(log: str) -> bool:
    return bool(re.search(r"^cases done: [1-9]", log, re.MULTILINE)) and "SUMMARY" in log


def main(tool: str, backend: str, path: str) -> int:
    log = Path(path).read_text(errors="replace")
    if not complete(log):
        print(f"{tool}, {backend}: the run did not end as it should\n{log[-3000:]}")
        return 1
    found = unexplained(log, tool, backend, json.loads(EXPLAINED.read_text()))
    for report in found[:20]:
        print(report, end="\n\n")
    print(f"{tool}, {backend}: {len(reports(log))} reports, {len(found)} of them not explained in {EXPLAINED.name}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
