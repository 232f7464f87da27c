"""A model's loss on sequences of an indexed dataset, token by token, outside of Megatron's training loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LOGITS_AT_ONCE = 4096  # rows that are in fp32 at a time: a vocabulary has 100,000 columns and more


def evenly_chosen(prefix: str | Path, documents: range, length: int, most: int) -> np.ndarray:
    """Sequences of these documents of an indexed dataset (PREFIX.idx and PREFIX.bin), one after the other and cut into
    whole sequences, of which at most `most` are chosen evenly; only those are read.

    length: tokens of a sequence. Returns int64 [sequences, length]. Raises ValueError for less than one sequence.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    lengths = np.asarray(data.sequence_lengths)[documents.start : documents.stop].astype(np.int64)
    ends = np.cumsum(lengths)
    tokens = int(ends[-1]) if len(ends) else 0
    count = tokens // length
    if count == 0:
        raise ValueError(
            f"{prefix}: {tokens} tokens to validate with; expected {length} or more, a sequence and the token behind "
            "it; use data with more text, or give its validation part more of it"
        )
    found = np.empty((min(count, most), length), np.int64)
    for row, which in zip(found, np.linspace(0, count - 1, len(found)).astype(int)):
        at, filled = int(which) * length, 0
        document = int(np.searchsorted(ends, at, side="right"))
        while filled < length:
            start = at + filled - int(ends[document] - lengths[document])
            piece = data.get(documents.start + document, start, min(int(lengths[document]) - start, length - filled))
            row[filled : filled + len(piece)] = piece
            filled, document = filled + len(piece), document + 1
    return found


def token_losses(model, sequences: np.ndarray, at_once: int = 1):
    """The loss, in nats, of every token but the first of each sequence.

    model: a GPTModel in evaluation mode. sequences: int64 [n, length + 1]. at_once: sequences of a forward pass.
    Returns float32 [n, length] on the CPU.
    """
    import torch

    device = next(model.parameters()).device
    rows = []
    with torch.no_grad():
        for start in range(0, len(sequences), at_once):
            ids = torch.from_numpy(sequences[start : start + at_once]).to(device)
            positions = torch.arange(ids.shape[1] - 1, device=device).expand(len(ids), -1)
            for row, logits in zip(ids, model(ids[:, :-1].contiguous(), positions, None)):  # [length, vocabulary]
                pieces = zip(logits.split(LOGITS_AT_ONCE), row[1:].split(LOGITS_AT_ONCE))
                losses = [torch.nn.functional.cross_entropy(own.float(), to, reduction="none") for own, to in pieces]
                rows.append(torch.cat(losses).cpu())
    return torch.stack(rows)
