"""Complete checkpoints without a training: what Megatron writes with --ckpt-format torch_dist, of a few tensors."""

from __future__ import annotations

import warnings
from pathlib import Path

SHAPES = {"embedding.word_embeddings.weight": (32, 8), "decoder.final_layernorm.weight": (8,)}


def write_checkpoint(folder: Path, iteration: int, shapes: dict | None = None, *, tracker: bool = False) -> Path:
    """One iteration in a folder of checkpoints; its path. tracker: whether the tracker names it."""
    import torch
    from torch.distributed import checkpoint

    path = folder / f"iter_{iteration:07d}"
    state = {name: torch.zeros(shape) for name, shape in (SHAPES if shapes is None else shapes).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(state | {"common_state/shard_0_1": "state"}, checkpoint_id=path, no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    if tracker:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return path
