"""What Megatron's printed output says of a run: times, rates, memory, loss, and the error of a run that failed."""

from __future__ import annotations

import re
from statistics import median

SKIPPED_STEPS = 2  # the first compiles, and the time of the second in Megatron's log is the mean of both

NUMBER = r"([-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|(?i:nan|inf)))"
STEP = re.compile(r"iteration +(\d+)/ *\d+ \| consumed samples.*? elapsed time per iteration \(ms\): ([\d.]+) \|(.*)")
DENSE_EQUIVALENT = re.compile(r"iteration +(\d+) \| dense-equivalent throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)")
MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \| allocated: ([\d.]+) \| max allocated: ([\d.]+)"
    r" \| reserved: [\d.]+ \| max reserved: ([\d.]+)"
)
KERNELS = re.compile(r"^S2 attention (?:backend|kernels): (\w+)", re.MULTILINE)
TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/.*(?:closing signal|failed \(exitcode)|ChildFailedError")
ERROR = re.compile(r"(?:^|[\s\]:])((?:[\w.]*(?:Error|Exception)|[\w.]+: error): .*)|^(error: .*)")


def _last_number(pattern: str, text: str) -> float | None:
    found = re.search(pattern + NUMBER, text)
    return float(found[1]) if found else None


def read_log(output: str, last_step: int) -> dict:
    """What Megatron printed of the steps up to last_step: {} before the third one, else step_ms (median) and steps_ms,
    tflops and dense_equivalent_tflops per GPU (medians), loss and grad_norm of the last step, peak_gib, resident_gib
    and reserved_gib of the fullest rank, kernels of S2."""
    steps = {int(number): (float(elapsed), rest) for number, elapsed, rest in STEP.findall(output)}
    measured = {number: step for number, step in steps.items() if SKIPPED_STEPS < number <= last_step}
    if not measured:
        return {}
    times = [elapsed for elapsed, _ in measured.values()]
    rates = [_last_number(r"throughput per GPU \(TFLOP/s/GPU\): ", rest) for _, rest in measured.values()]
    dense = [float(rate) for number, rate in DENSE_EQUIVALENT.findall(output) if int(number) in measured]
    last = measured[max(measured)][1]
    # Resident and largest of each rank, of its last report: they grow until the optimizer's state is there.
    ranks = {rank: [float(size) / 1024 for size in sizes] for rank, *sizes in MEMORY.findall(output)}
    resident, peak, reserved = max(ranks.values(), key=lambda sizes: sizes[1], default=(0.0, 0.0, 0.0))
    kernels = KERNELS.findall(output)
    return dict(
        step_ms=median(times),
        steps_ms=times,
        tflops=median([rate for rate in rates if rate is not None] or [0.0]),
        dense_equivalent_tflops=median(dense) if dense else None,
        loss=_last_number("lm loss: ", last),
        grad_norm=_last_number("grad norm: ", last),
        peak_gib=peak,
        resident_gib=resident,
        reserved_gib=reserved,
        kernels=kernels[-1] if kernels else None,
    )


def error_of(output: str) -> str:
    """The last error line of a failed run, without torchrun's; of a rank that ran out of memory, that line."""
    own = []
    for line in output.splitlines():
        if TORCHRUN_REPORT.search(line):
            break
        own.append(line.strip())
    errors = [found[1] or found[2] for line in own if (found := ERROR.search(line))]
    for error in errors:
        if "OutOfMemoryError" in error or "out of memory" in error:
            return f"out of memory: {error.partition(': ')[2]}"
    return next((line for line in reversed(errors or own) if line), "no output")
