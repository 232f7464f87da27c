"""What a finished run says, on the screen and in summary.json, and what it must have reached."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from examples.quickstart.launch import MODEL

LAST_ITERATIONS = 20  # last_loss is their mean
LARGEST_LOSS_RATIO = 0.6
SMALLEST_BLOCKS = 16
LARGEST_WINDOW_SHARE = 0.25
LARGEST_DENSITY = 0.6


def s2_run_problems(sparsity) -> list[str]:
    """Why a sparsity would not be a real S2 run of this model: [] for the shipped config.

    sparsity: ResolvedSparsity. A pattern's window is its first range; a block mask has none and is judged by its
    density.
    """
    length = MODEL.seq_length
    s2_layers = [layer for layer in sparsity.layers if layer.kind == "s2"]
    problems = []
    if sparsity.n_blocks < SMALLEST_BLOCKS:
        problems.append(
            f"{sparsity.n_blocks} blocks a sequence, expected {SMALLEST_BLOCKS} or more; use a smaller block_size"
        )
    if 2 * len(s2_layers) < len(sparsity.layers):
        problems.append(
            f"{len(s2_layers)} of {len(sparsity.layers)} layers are S2, expected at least half; change the plan"
        )
    for pattern in dict.fromkeys(layer.pattern for layer in s2_layers):
        density = pattern.density(length)
        if density > LARGEST_DENSITY:
            problems.append(
                f"{pattern.describe()} attends {density:.1%} of the causal pairs, expected {LARGEST_DENSITY:.0%} at "
                "most; use a larger stride or a smaller window"
            )
        window = window_tokens(pattern)
        if window is not None and window > LARGEST_WINDOW_SHARE * length:
            problems.append(
                f"{pattern.describe()} has a window of {window} tokens, expected {LARGEST_WINDOW_SHARE * length:.0f} "
                "at most; use a smaller local_blocks"
            )
    return problems


def window_tokens(pattern) -> int | None:
    """The largest window of a range pattern's sparse heads in tokens; None for a block mask or where all heads are
    dense."""
    ends = [head.touched_ranges[0][0] for head in getattr(pattern, "heads", ()) if not head.is_dense]
    # A first range without an end is a window as long as the context.
    lengths = [MODEL.seq_length if end is None else end * pattern.block_size for end in ends]
    return max(lengths, default=None)


def s2_run_text(sparsity) -> str | None:
    """The quickstart's claim in one line; None for a dense model."""
    patterns = [layer.pattern for layer in sparsity.layers if layer.kind == "s2"]
    if not patterns:
        return None
    windows = [window for window in map(window_tokens, patterns) if window is not None]
    window = f"window {max(windows)} of {MODEL.seq_length} tokens, " if windows else ""
    density = max(pattern.density(MODEL.seq_length) for pattern in patterns)
    return (
        f"S2 run: {sparsity.n_blocks} blocks a sequence, {window}{len(patterns)} of {len(sparsity.layers)} layers S2, "
        f"each attending {density:.1%} of the causal pairs at most"
    )


def make_summary(records: dict[int, dict], evaluations: dict[str, dict], sparsity, **facts) -> dict:
    """The content of summary.json.

    records, evaluations: of `read_loss_log`. facts: what else the run knows, taken over as it is.
    Raises ValueError when an iteration or the last evaluation is missing from the log.
    """
    iterations = max(records)
    missing = sorted(set(range(1, iterations + 1)) - set(records))
    if missing:
        raise ValueError(
            f"the loss log lacks iterations {missing[:5]} of {iterations}; expected all; remove the run and train again"
        )
    name = f"iteration {iterations} on validation set"
    if name not in evaluations:
        raise ValueError(
            f"the loss log has no evaluation named {name!r}; expected one at the end of the run; see train.log"
        )
    losses = [records[iteration]["lm loss"] for iteration in range(1, iterations + 1)]
    last = losses[-LAST_ITERATIONS:]
    return {
        "first_loss": losses[0],
        "last_loss": sum(last) / len(last),
        "validation_loss": evaluations[name]["lm loss"],
        "iterations": iterations,
        "layers": dict(Counter(layer.kind for layer in sparsity.layers)),
        "density": sparsity.density(MODEL.seq_length),
        **facts,
    }


def read_json(path: Path) -> dict:
    """What write_atomically wrote. Raises ValueError for a file that holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as problem:
        raise ValueError(f"{path} is no JSON ({problem}); restore it, or move its folder away to start anew") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; restore it, or move its folder away to start anew")
    return content


def write_atomically(path: Path, content: dict) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
