"""Test a trained model on the synthetic tasks: how often its answer is right, by depth, by residue, by hops.

    python -m studies.recall from-dense-recall8k --load runs/quality/starts/.../checkpoints --json recall.json

The residue is that of the key block with the value, modulo the stride: a head attends blocks of one residue beyond its
window, so a model that cannot pass on what the others hold fails at some residues and not at others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from studies.continuations import ALL
from studies.results import write_json
from studies.studies import Study
from studies.tasks import ANSWERS, TASKS, Sequence, held_out_sequence
from studies.trained import TOKENS_AT_ONCE, load_trained

BEYOND = "longer needle"  # beside TASKS
DEPTHS = 8  # equal parts of the context
LONGER, FEWER = 2, 4  # needles beyond the length of the training: in so many times as long, and so many times fewer


def held_out_sequences(study: Study, task: str) -> list[Sequence]:
    return [held_out_sequence(task, index, study.model.seq_length, study.tasks) for index in range(study.tasks.tests)]


def longer_sequences(study: Study) -> list[Sequence]:
    """Needles in sequences of LONGER times the model's length."""
    settings = replace(study.tasks, tests=max(1, study.tasks.tests // FEWER))
    length = LONGER * study.model.seq_length
    return [held_out_sequence("needle", index, length, settings) for index in range(settings.tests)]


def shares(groups: np.ndarray, right: np.ndarray, count: int) -> list[float | None]:
    """Share of right answers in each of `count` groups; None for an empty one."""
    total = np.bincount(groups, minlength=count)
    found = np.bincount(groups, weights=right, minlength=count)
    return [round(float(found[group] / total[group]), 4) if total[group] else None for group in range(count)]


def score(study: Study, sequences: list[Sequence], answers: list[np.ndarray], longer: int = 1) -> dict:
    """answers: of every sequence the ids that the model gave to its questions. longer: times the model's length."""
    questions = np.concatenate([sequence.questions for sequence in sequences])
    wanted = np.concatenate([sequence.answers for sequence in sequences])
    right = (np.concatenate(answers) == wanted).astype(float)
    value, hops = questions[:, 1], questions[:, 2]
    result = {
        "questions": len(right),
        "accuracy": round(float(right.mean()), 4),
        "by_depth": shares(value * DEPTHS // (longer * study.model.seq_length), right, DEPTHS),
        "by_residue": shares(value // study.block_size % study.stride, right, study.stride),
    }
    if hops.any():
        result["by_hops"] = shares(hops, right, int(hops.max()) + 1)
    return result


def batches(sequences: list[Sequence], length: int) -> Iterator[list[Sequence]]:
    size = max(1, TOKENS_AT_ONCE // length)
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]


def ask(model, sequences: list[Sequence], length: int, ids: range) -> list[np.ndarray]:
    """Of every sequence which of these ids the model holds for the likeliest at its questions, int64 [questions].
    length: tokens that the model reads of each."""
    import torch

    device, answers = next(model.parameters()).device, []
    with torch.no_grad():
        for batch in batches(sequences, length):
            tokens = torch.from_numpy(np.stack([each.ids[:length] for each in batch]).astype(np.int64)).to(device)
            positions = torch.arange(length, device=device).expand_as(tokens)
            logits = model(tokens, positions, None)  # [batch, length, vocabulary]
            for row, each in enumerate(batch):
                asked = torch.from_numpy(each.questions[:, 0]).to(device)
                best = logits[row, asked, ids.start : ids.stop].argmax(dim=-1)
                answers.append(best.cpu().numpy() + ids.start)
    return answers


def score_checkpoint(study: Study, checkpoints: Path) -> dict:
    """{task: score} of the newest checkpoint, and of needles beyond the training's length under BEYOND, where the GPU
    has memory for them. Raises ValueError where there is no checkpoint."""
    import torch

    model = load_trained(checkpoints)
    ids = range(ANSWERS[0], sum(ANSWERS))
    result = {}
    for task in TASKS:
        sequences = held_out_sequences(study, task)
        result[task] = score(study, sequences, ask(model, sequences, study.model.seq_length, ids))
    sequences, length = longer_sequences(study), LONGER * study.model.seq_length
    try:
        answers = ask(model, sequences, length, ids)
    except torch.OutOfMemoryError as error:
        print(f"{checkpoints}: no {BEYOND}, for the GPU has no memory for {length} tokens at once: {error}")
        return result
    return result | {BEYOND: score(study, sequences, answers, LONGER)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.recall", description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=[name for name, study in ALL.items() if study.tasks is not None])
    parser.add_argument("--load", type=Path, required=True, help="a run's folder of checkpoints")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parsed = parser.parse_args()
    try:
        write_json(parsed.json, score_checkpoint(ALL[parsed.study], parsed.load))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
