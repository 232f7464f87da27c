"""Before any training of a public model: is it the one that was published, and does it copy from far back?

    python -m studies.gates smollm2-8k --runs runs/quality

Status 1 where a gate is shut: the loss of a text, computed as the arms will be trained and tested, is more than
LOSS_TOLERANCE from that of transformers in fp32 on the CPU; or at a distance of half of the context or less fewer than
COPIED of the copied tokens are predicted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from s2_megatron.tools.losses import token_losses
from studies.continuations import ALL
from studies.continued import make_corpora
from studies.copies import validation_sequences
from studies.passages import score
from studies.results import imported_weights
from studies.run import DEFAULT_RUNS
from studies.trained import load_trained

LOSS_TOLERANCE = 0.005  # a share; bf16's own error is a tenth of it
COPIED = 0.8  # the weights of 4 bits copied 0.89 of what stood 512 tokens before, eight texts of 1,024 tokens on a CPU
TOKENS = 512  # of the text that both compute
TEXTS = 16


def published_loss(folder: Path, text: np.ndarray) -> float:
    """Of a Hugging Face folder, by transformers, fp32, on the CPU. text: int64 [n]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(text)[None]
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


def problems(own: float, published: float, copied: dict[str, float], length: int) -> list[str]:
    """What shuts a gate. copied: {distance: share}."""
    found = []
    if abs(own / published - 1) > LOSS_TOLERANCE:
        found.append(f"the loss is {own:.4f}, transformers' {published:.4f}; expected within {LOSS_TOLERANCE:.1%}")
    for distance, share in copied.items():
        if int(distance) <= length // 2 and share < COPIED:
            found.append(f"of what stood {distance} tokens before {share:.0%} is copied; expected {COPIED:.0%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.gates", description=__doc__.splitlines()[0])
    public = [name for name, study in ALL.items() if study.start and study.start.study.imported]
    parser.add_argument("study", choices=public)
    parser.add_argument("--runs", type=Path, default=DEFAULT_RUNS)
    parsed = parser.parse_args()
    study = ALL[parsed.study]
    heal = study.start.study
    try:
        megatron = imported_weights(heal, parsed.runs.resolve())
        model = load_trained(megatron)  # first: without a GPU Megatron may not be imported before
        corpus, *_ = make_corpora(study, study.tokens, parsed.runs, print)
        texts = validation_sequences(heal, corpus, TEXTS)
    except ValueError as error:
        parser.error(str(error))
    short = texts[:1, : min(TOKENS, heal.model.seq_length)]
    published = published_loss(megatron.parent / "hf", short[0])
    own = float(token_losses(model, short).double().mean())
    found = score(model, heal, texts)
    print(f"loss of {short.shape[1]} tokens: {own:.4f}, transformers' {published:.4f}; of {len(texts)} texts of "
          f"{heal.model.seq_length}: {found['loss']:.4f}; copied: {found['copied']}")  # fmt: skip
    shut = problems(own, published, found["copied"], heal.model.seq_length)
    print("\n".join(f"shut: {each}" for each in shut) or "both gates are open")
    sys.exit(1 if shut else 0)


if __name__ == "__main__":
    main()
