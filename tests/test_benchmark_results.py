"""The committed results: their verdicts are those of their rows, and what is written about them in README and docs is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.suites import verdicts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = {path.name: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))}


@pytest.mark.parametrize("name", [name for name, content in RESULTS.items() if "verdicts" in content])
def test_verdicts_follow_from_the_rows(name):
    content = RESULTS[name]
    assert content["verdicts"] == [verdict._asdict() | {"met": verdict.met} for verdict in verdicts(content["rows"], content["first_call"])]


def test_only_what_was_timed_in_turns_is_compared():
    """The case of group 128K is in group patterns, too, measured minutes later on a hotter card."""

    def row(group, case, entry, milliseconds):
        return dict(group=group, case=case, entry=entry, total_ms_samples=[milliseconds], tflops=1000 / milliseconds, extra_bytes=1, memory_limit=2)

    case = "128K 32/32 D128"
    rows = [row("128K", case, "S2", 50.0), row("128K", case, "S2 deterministic", 80.0), row("128K", case, "FA-2 dense", 1000.0)]
    rows += [row("patterns", case, "S2", 100.0), row("patterns", "128K 32/8 D128", "S2", 110.0)]
    for ordered in (rows, rows[::-1]):
        found = {verdict.text: verdict.value for verdict in verdicts(ordered)}
        assert found[f"{case}: times FlashAttention-2"] == 20.0
        assert found[f"{case}, deterministic: times FlashAttention-2"] == 12.5
        assert found[f"{case}: speed of deterministic over default"] == 50 / 80
        assert found["128K 32/8 D128: speed over 32/32"] == pytest.approx(100 / 110)
    apart = [row("128K", case, "S2", 50.0), row("other", case, "FA-2 dense", 1000.0)]
    assert [verdict.text.partition(",")[0] for verdict in verdicts(apart)] == ["memory limit over use"]
