"""A trained model, for the tests of it, and the command of a test of a language model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from studies.continuations import ALL
from studies.corpus import Corpus
from studies.results import read_json, write_json
from studies.studies import Study

TOKENS_AT_ONCE = 65536


def model_dtype():
    """bf16 on a GPU, fp32 on a CPU. Before a model is loaded, which makes torch.cuda.is_available() true on a CPU."""
    import torch

    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def load_trained(checkpoints: Path):
    """The model of the newest checkpoint of a run, of model_dtype, read by the project's own reader of Megatron
    checkpoints. Raises ValueError where there is none."""
    from s2_megatron.megatron.checkpoints.folder import checkpoint_to_load
    from s2_megatron.tools.hf.checkpoint_model import load_model

    found = checkpoint_to_load(checkpoints)
    if found is None:
        raise ValueError(f"--load {checkpoints}: no checkpoint; expected that of a trained model; train it first")
    return load_model(found.path, dtype=model_dtype()).model


def text_test(module: str, about: str, score_checkpoint: Callable[[Study, Corpus, Path], dict]) -> None:
    """Run the command: score the checkpoints of a run on a corpus, write what was found."""
    parser = argparse.ArgumentParser(prog=f"python -m studies.{module}", description=about)
    parser.add_argument("study", choices=[name for name, study in ALL.items() if study.tasks is None])
    parser.add_argument("--data", type=Path, required=True, help="the folder of the corpus")
    parser.add_argument("--load", type=Path, required=True, help="a run's folder of checkpoints")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parsed = parser.parse_args()
    description = read_json(parsed.data / "corpus.json", None)
    if description is None:
        parser.error(f"--data {parsed.data}: no corpus.json; expected the folder of a prepared corpus")
    try:
        found = score_checkpoint(ALL[parsed.study], Corpus(parsed.data, description), parsed.load)
    except ValueError as error:
        parser.error(str(error))
    write_json(parsed.json, found)
