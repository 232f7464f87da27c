"""The judgement of parallel_table.py, whose runs take longer than CI has."""

from __future__ import annotations

import pytest

from tests.megatron.parallel_table import ALONE, CP, LAYOUTS, SP, Table, line_of, make_row, without_s2


class Known(Table):
    """Losses that are given: S2's are `ours` beside one process, the dense model's `stock`, and other layouts' start at
    5. With more seeds the differences are those of the last one, and half of them before."""

    def __init__(self, ours, stock, engine, iterations=10, seeds=1):
        self.ours, self.stock, self.engine, self.iterations, self.seeds = ours, stock, engine, iterations, range(seeds)

    def request(self, layout, precision, sparse, seed):
        moved = 0 if layout.processes == 1 else self.ours if sparse else self.stock
        moved *= 1 if seed == self.seeds[-1] else 0.5
        losses = {step: 5.0 - moved * (step == 7) for step in range(3, 3 + self.iterations)}
        return type("Done", (), {"result": lambda self: losses})()


@pytest.mark.parametrize(
    "name, precision, engine, ours, verdict",
    [
        ("cp2", "fp32", False, 0.9e-5, "yes"),
        ("cp2", "fp32", True, 1.1e-5, "NO"),
        ("cp2", "fp32", False, float("nan"), "NO"),
        ("pp2_vpp2", "bf16", False, 1.9e-3, "yes"),
        ("pp2_vpp2", "bf16", False, 2.1e-3, "NO"),
        ("cp2", "bf16", True, 2.1e-3, "NO"),
        ("cp2", "bf16", False, 1e-9, "not judged"),  # no dense model under CP without Transformer Engine
        ("tp2_sp", "bf16", False, 1e-9, "not judged"),  # nor under SP
        ("cp2_a2a_packed", "bf16", True, 1e-9, "not judged"),
    ],
)
def test_verdict(name, precision, engine, ours, verdict):
    row = make_row(Known(ours, 1e-3, engine), name, precision, "gloo", [])
    assert row["verdict"] == verdict
    assert make_row(Known(ours, 1e-3, engine, seeds=3), name, precision, "gloo", []) == pytest.approx(row, nan_ok=True)
    assert line_of(row).startswith(f"| {name} | 2 | gloo | {precision} | {ours:.1e} |") and line_of(row).endswith(
        f" {verdict} |"
    )


def test_bounds_of_other_layouts_and_runs_that_stop():
    row = make_row(Known(1.5e-3, 0, False), "cp2", "bf16", "gloo", [2e-4, 1e-3])
    assert row["verdict"] == "yes" and " (2.0e-03) " in line_of(row)
    assert make_row(Known(0, 0, False, iterations=9), "cp2", "fp32", "gloo", [])["verdict"] == "FAILED"


def test_layouts():
    assert without_s2("--a 2 --s2-cp-comm-type all_gather sparse --b --s2-keep-attention-output").split() == [
        "--a",
        "2",
        "--b",
    ]
    for name, layout in LAYOUTS.items():
        assert layout.common in ALONE
        assert (CP in layout.flags) == ("cp" in name) and (SP in layout.flags) == ("sp_" in f"{name}_"), name
