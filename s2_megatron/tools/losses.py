"""A model's loss on sequences of an indexed dataset, token by token, outside of Megatron's training loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

LOGITS_AT_ONCE = 4096  # rows that are in fp32 at a time: a vocabulary has 100,000 columns and more


def evenly_chosen(prefix: str | Path, documents: range, length: int, most: int) -> np.ndarray:
    """Sequences of these documents of an indexed dataset (PREFIX.idx and PREFIX.bin), one after the other and cut into
    whole sequences, of which at most `most` are chosen evenly; only those are read.

    length: tokens of a sequence. Returns int64 [sequences, length]. Raises ValueError for less than one sequence.
    """
    return with_starts(prefix, documents, length, most)[0]


def with_starts(prefix: str | Path, documents: range, length: int, most: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """The sequences of `evenly_chosen`, and for each where documents begin behind its first token, int64 [n]."""
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
    found, starts = np.empty((min(count, most), length), np.int64), []
    for row, which in zip(found, np.linspace(0, count - 1, len(found)).astype(int)):
        at, filled = int(which) * length, 0
        document = int(np.searchsorted(ends, at, side="right"))
        inside = ends[(ends > at) & (ends < at + length)] - at
        starts.append(np.unique(inside))  # documents without a token end where they begin
        while filled < length:
            start = at + filled - int(ends[document] - lengths[document])
            piece = data.get(documents.start + document, start, min(int(lengths[document]) - start, length - filled))
            row[filled : filled + len(piece)] = piece
            filled, document = filled + len(piece), document + 1
    return found, starts


def token_losses(
    model, sequences: np.ndarray, at_once: int = 1, starts: Sequence[np.ndarray] | None = None, inputs=None
):
    """The loss, in nats, of every token but the first of each sequence.

    model: a GPTModel in evaluation mode. sequences: int64 [n, length + 1]. at_once: sequences of a forward pass.
    starts: of each sequence, as of `with_starts`: its documents do not attend each other then, as with Megatron's
    --dataloader-inter-document-masking. inputs: of each sequence, by itself, what the decoder's first layer gets,
    [length, 1, hidden] on the model's device, in place of embeddings. Returns float32 [n, length] on the CPU.
    """
    import torch

    device = next(model.parameters()).device
    rows = []
    with torch.no_grad():
        step = at_once if starts is None and inputs is None else 1
        for start in range(0, len(sequences), step):
            ids = torch.from_numpy(sequences[start : start + step]).to(device)
            positions = torch.arange(ids.shape[1] - 1, device=device).expand(len(ids), -1)
            packed = None
            if starts is not None:
                positions, packed = _documents(positions, starts[start])
            # [b, length, vocabulary]
            given = dict(packed_seq_params=packed, decoder_input=None if inputs is None else inputs[start])
            found = model(ids[:, :-1].contiguous(), positions, None, **given)
            for row, logits in zip(ids, found):
                pieces = zip(logits.split(LOGITS_AT_ONCE), row[1:].split(LOGITS_AT_ONCE))
                losses = [torch.nn.functional.cross_entropy(own.float(), to, reduction="none") for own, to in pieces]
                rows.append(torch.cat(losses).cpu())
    return torch.stack(rows)


def _documents(positions, starts: np.ndarray):
    """(positions in the document, int64 [1, length], Megatron's PackedSeqParams) of a sequence whose documents begin
    at 0 and at `starts`. positions: those in the sequence."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    length = positions.shape[1]
    borders = np.array([0, *starts[starts < length], length])
    first = torch.from_numpy(np.repeat(borders[:-1], np.diff(borders))).to(positions.device)
    cu_seqlens = torch.from_numpy(borders).to(positions.device, torch.int32)
    longest = int(np.diff(borders).max())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return positions - first, packed
