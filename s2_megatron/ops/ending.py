"""Queries that are the end of a longer sequence, as in a decoding step: padded to whole blocks for the kernels."""

from __future__ import annotations

from functools import lru_cache

import torch

from s2_megatron.ops.call import FORMATS, AttentionCall
from s2_megatron.ops.layout import Placement


@lru_cache(maxsize=256)
def _placement_of_end(first_block: int, n_blocks: int, device: torch.device) -> Placement:
    """The last query blocks of a sequence, from first_block on; cached, for every layer of every decoding step of a
    block asks for the same."""
    return Placement.make(range(first_block, n_blocks), n_blocks, device=device)


class Ending:
    """A query that is the end of a longer sequence (static inference), padded to whole blocks. rows: the dimension of
    its rows."""

    def __init__(self, query, key, call: AttentionCall):
        self.rows = FORMATS[call.tensor_format][2]
        self.length, block = query.shape[self.rows], call.layout.block_size
        start = key.shape[self.rows] - self.length
        n_blocks = -(-key.shape[self.rows] // block)
        self.before, self.padded_length = start % block, (n_blocks - start // block) * block
        self.call = call._replace(placement=_placement_of_end(start // block, n_blocks, query.device))

    def pad(self, tensor, rows: int):
        shape = list(tensor.shape)
        shape[rows] = self.padded_length
        padded = tensor.new_zeros(shape)
        padded.narrow(rows, self.before, self.length).copy_(tensor)
        return padded

    def cut(self, tensor, rows: int):
        return tensor.narrow(rows, self.before, self.length).clone(memory_format=torch.contiguous_format)


def is_ending(query, key, call) -> bool:
    rows = FORMATS[call.tensor_format][2]
    return call.placement is None and call.packed is None and query.shape[rows] < key.shape[rows]
