"""The checkpoint, its validation sequences, and the loss of its weights under any plan."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from s2_megatron.config.errors import printable
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.preflight.datasets import DEFAULT_SPLIT, dataset_problem, split_shares
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.tools.losses import token_losses, with_starts

if TYPE_CHECKING:
    import torch


class Sequences(NamedTuple):
    """What is measured on. tokens: int64 [n, length + 1]. counted: bool [n, length], the predictions that count; None:
    all. starts: of each sequence, where documents begin that do not attend the ones before; None: they do."""

    tokens: np.ndarray
    counted: np.ndarray | None = None
    starts: list[np.ndarray] | None = None

    def counted_from(self, position: int) -> Sequences:
        """These, with only the predictions from a position on counted, of those that count now. Raises ValueError where
        none is left."""
        if position == 0:
            return self
        counted = np.ones((len(self.tokens), self.tokens.shape[1] - 1), bool) if self.counted is None else self.counted
        late = counted & (np.arange(counted.shape[1]) >= position)
        if not late.any():
            raise ValueError(
                f"--loss-from-position {position}: no prediction from there on counts (of those that --eod-mask-loss "
                "leaves); expected one or more; use a smaller number"
            )
        return self._replace(counted=late)

    def sha256(self) -> str:
        parts = (self.tokens, *(() if self.counted is None else (self.counted,)), *(self.starts or ()))
        digest = hashlib.sha256(repr([part.shape for part in parts]).encode())
        for part in parts:
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()


def validation_sequences(
    prefix: str,
    split: str | None,
    trained: Namespace,
    length: int,
    count: int,
    *,
    eod_mask_loss: bool = False,
    apart: bool = False,
) -> Sequences:
    """`count` sequences of `length` tokens, and the token behind, of the documents that Megatron validates with.

    split: --split; None for the training's. trained: the checkpoint's arguments. eod_mask_loss: predictions from a
    document's last token do not count, as with Megatron's flag. apart: documents do not attend each other. Raises
    ValueError for data that are not there, are too short, or are another tokenizer's, and for documents that end with
    several tokens where such a token is asked for.
    """
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
    chosen = _to_validate_with(split, documents)
    if not chosen:
        fitting = next(each for each in ("90,10,0", "50,50,0") if _to_validate_with(each, documents))
        raise ValueError(
            f"--split {printable(split)}: none of the {documents} documents of {printable(prefix, 200)} is for "
            f"validation; expected one or more; use --split {fitting}"
        )
    found, starts = with_starts(prefix, chosen, length + 1, count)
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
    counted = None
    if eod_mask_loss:
        ends = np.unique([row[at - 1] for row, places in zip(found, starts) for at in places])
        if len(ends) > 1:
            raise ValueError(
                f"--eod-mask-loss: documents of {printable(prefix, 200)} end with the tokens {ends[:3].tolist()} and "
                "others; expected one that ends all of them; make the data with it, or leave the flag out"
            )
        counted = ~np.isin(found[:, :-1], ends)
    return Sequences(found, counted, starts if apart else None)


def _to_validate_with(split: str, documents: int) -> range:
    """The documents that Megatron takes for validation."""
    from megatron.core.datasets import blended_megatron_dataset_config as megatron

    part = megatron.convert_split_vector_to_split_matrix(megatron.parse_and_normalize_split(split))[1]
    return range(0) if part is None else range(*(round(share * documents) for share in part))


def precision() -> str:
    """That of a measurement on this machine: `bf16 on a GPU` or `fp32 on a CPU`."""
    from s2_megatron.megatron.host.cuda_on_cpu import compute_device

    return "fp32 on a CPU" if compute_device().type == "cpu" else "bf16 on a GPU"


class Measured:
    """The checkpoint's weights, in bf16 on a GPU and in fp32 on a CPU, with S2-Attention in every layer.

    Plans that are measured one after the other differ in few layers, candidates in one. What the layers before give is
    kept, for one place in the model: a hidden state a sequence, on the device.

    folder: of one iteration. Once a process, as load_model.
    """

    def __init__(self, folder: Path, sequences: Sequences):
        import torch

        from s2_megatron.megatron.host.cuda_on_cpu import compute_device
        from s2_megatron.megatron.model.core_attention import S2CoreAttention
        from s2_megatron.tools.hf.checkpoint_model import attention_layers, load_model

        dtype = torch.float32 if compute_device().type == "cpu" else torch.bfloat16
        self.model = load_model(folder, dtype=dtype).model
        self.sequences = sequences
        cores = [module for module in self.model.modules() if isinstance(module, S2CoreAttention)]
        self.cores = sorted(cores, key=lambda core: core.layer_number)
        assert len(self.cores) == attention_layers(self.model), "a layer without S2's core attention"
        self._layers = self.model.decoder.layers
        # Of each core, in which of the decoder's layers it is.
        self._places = [
            next(place for place, layer in enumerate(self._layers) if core in layer.modules()) for core in self.cores
        ]
        self._last: list[RangePattern] = []  # of the plan that was measured last
        self._before: list[RangePattern] = []  # of the layers before the place whose inputs are kept
        self._inputs: list[torch.Tensor] = []  # of each sequence, [length, 1, hidden]

    def shares(self, sparsity: ResolvedSparsity) -> list[float]:
        """What each sequence adds to the mean loss of a token that counts, in nats, under a plan."""
        import torch

        shape = (sparsity.block_size, sparsity.num_heads, sparsity.num_kv_heads)
        dense = RangePattern.dense(*shape)
        patterns = [dense if layer.pattern is None else layer.pattern for layer in sparsity.layers]
        for core, pattern in zip(self.cores, patterns, strict=True):
            core.use_pattern(pattern)
        losses = self._losses(patterns).double()
        counted = torch.ones_like(losses)
        if self.sequences.counted is not None:
            counted = torch.from_numpy(self.sequences.counted).double()
        return ((losses * counted).sum(1) / counted.sum()).tolist()

    def _losses(self, patterns: list[RangePattern]) -> torch.Tensor:
        """Of every token, from the layer on whose inputs are kept, if the layers before are those of the plan. Where it
        leaves the last plan, later, inputs are kept from now on."""
        import torch

        first = len(self._before) if self._inputs and patterns[: len(self._before)] == self._before else 0
        same = next((at for at, pair in enumerate(zip(patterns, self._last)) if pair[0] != pair[1]), 0)
        given, kept = self._inputs if first else None, []
        hooks = []
        if same > first:
            hook = partial(_keep_hidden, kept)
            hooks.append(self._layers[self._places[same]].register_forward_pre_hook(hook, with_kwargs=True))
        try:
            if first:
                self.model.decoder.layers = torch.nn.ModuleList(self._layers[self._places[first] :])
            return token_losses(self.model, self.sequences.tokens, starts=self.sequences.starts, inputs=given)
        finally:
            self.model.decoder.layers = self._layers
            for hook in hooks:
                hook.remove()
            if len(kept) == len(self.sequences.tokens):
                self._before, self._inputs = patterns[:same], kept
            self._last = patterns


def _keep_hidden(kept: list[torch.Tensor], layer, args, kwargs) -> None:
    kept.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
