"""The checkpoint, its validation sequences, and the loss of its weights under any plan."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np

from s2_megatron.config.errors import printable
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.preflight.datasets import DEFAULT_SPLIT, dataset_problem, split_shares
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.tools.losses import evenly_chosen, token_losses


def validation_sequences(prefix: str, split: str | None, trained: Namespace, length: int, count: int) -> np.ndarray:
    """int64 [count, length + 1] of the documents that Megatron validates with.

    split: --split; None for the training's. trained: the checkpoint's arguments. Raises ValueError for data that are
    not there, are too short, or are another tokenizer's.
    """
    from megatron.core.datasets import blended_megatron_dataset_config as megatron
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    problem = dataset_problem(prefix)
    if problem is not None:
        raise ValueError(
            f"--data-path {printable(prefix, 200)}: {problem}; expected an indexed dataset, PREFIX.idx and PREFIX.bin; "
            "correct the path"
        )
    split = split or trained.split or DEFAULT_SPLIT
    split_shares(split)
    documents = len(IndexedDataset(prefix))
    part = megatron.convert_split_vector_to_split_matrix(megatron.parse_and_normalize_split(split))[1]
    first, last = (0, 0) if part is None else (round(share * documents) for share in part)
    if first == last:
        raise ValueError(
            f"--split {printable(split)}: none of the {documents} documents of {printable(prefix, 200)} is for "
            "validation; expected one or more; use --split 90,10,0"
        )
    found = evenly_chosen(prefix, range(first, last), length + 1, count)
    if len(found) < count:
        raise ValueError(
            f"--sequences {count}: the documents for validation (--split {printable(split)}) have {len(found)} whole "
            f"sequences of {length} tokens; expected as many as are asked for; use --sequences {len(found)}"
        )
    if found.max() >= trained.padded_vocab_size:
        raise ValueError(
            f"--data-path {printable(prefix, 200)}: has the token {found.max()}; expected less than "
            f"{trained.padded_vocab_size}, the model's vocabulary; give data of the tokenizer that it was trained with"
        )
    return found


class Measured:
    """The checkpoint's weights, in bf16 on a GPU and in fp32 on a CPU, with S2-Attention in every layer.

    folder: of one iteration. sequences: int64 [n, length + 1]. Once a process, as load_model.
    """

    def __init__(self, folder: Path, sequences: np.ndarray):
        import torch

        from s2_megatron.megatron.core_attention import S2CoreAttention
        from s2_megatron.megatron.cuda_on_cpu import compute_device
        from s2_megatron.tools.hf.checkpoint_model import load_model

        self.device = compute_device().type
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.model = load_model(folder, dtype=dtype).model
        self.sequences = sequences
        cores = [module for module in self.model.modules() if isinstance(module, S2CoreAttention)]
        self.cores = sorted(cores, key=lambda core: core.layer_number)
        assert len(self.cores) == self.model.config.num_layers, "a layer without S2's core attention"

    def loss(self, sparsity: ResolvedSparsity) -> float:
        """The mean loss of a token, in nats, under a plan."""
        shape = (sparsity.block_size, sparsity.num_heads, sparsity.num_kv_heads)
        dense = RangePattern.dense(*shape)
        for core, layer in zip(self.cores, sparsity.layers, strict=True):
            core.use_pattern(dense if layer.pattern is None else layer.pattern)
        return float(token_losses(self.model, self.sequences).double().mean())
