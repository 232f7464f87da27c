"""A trained model, for the tests of it."""

from __future__ import annotations

from pathlib import Path

TOKENS_AT_ONCE = 65536


def load_trained(checkpoints: Path):
    """(the model, in bf16 on a GPU and in fp32 on a CPU; its device) of the newest checkpoint of a run, read by the
    project's own reader of Megatron checkpoints. Raises ValueError where there is none."""
    import torch

    from s2_megatron.megatron.checkpoint_folder import checkpoint_to_load
    from s2_megatron.tools.hf.checkpoint_model import load_model

    found = checkpoint_to_load(checkpoints)
    if found is None:
        raise ValueError(f"--load {checkpoints}: no checkpoint; expected that of a trained model; train it first")
    on_gpu = torch.cuda.is_available()  # before load_model, which makes it true on a CPU
    model = load_model(found.path, dtype=torch.bfloat16 if on_gpu else torch.float32).model
    return model, next(model.parameters()).device
