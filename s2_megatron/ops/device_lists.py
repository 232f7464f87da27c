"""What kernels read of a placement, on a device: the steps of the Hopper kernels, the runs of the portable ones.

H query heads, R ranges of distance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from s2_megatron.ops.key_steps import column_steps, key_lists
from s2_megatron.ops.lasting import on_device
from s2_megatron.ops.query_steps import query_lists
from s2_megatron.patterns.checks import shown
from s2_megatron.patterns.ranges import Pattern, RangePattern


def check_device(device) -> torch.device:
    """A device or its name. Raises ValueError for a name that torch does not know."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={shown(device)}; expected a device of torch; use e.g. 'cuda' or 'cpu'") from error


STEP_BLOCK = 64  # tokens of a block in the steps of the Hopper kernels


def parts_of_block(block_size: int) -> int:
    """How many blocks of the step lists a block of a pattern is. 1 where the Hopper kernels do not compute it: lists
    know no tokens."""
    return 1 if block_size % STEP_BLOCK else block_size // STEP_BLOCK


class DeviceSteps:
    """The step lists of a pattern (query_steps.py, key_steps.py) as int32 tensors on a device, made when a kernel first
    asks for them.

    query_blocks, key_slot (or None), n_blocks, n_slots: as of a Placement, NumPy, in parts_of_block parts each.
    """

    def __init__(self, pattern: Pattern, query_blocks, key_slot, n_blocks: int, n_slots: int, device):
        self.pattern, self.n_slots, self._split = pattern, n_slots, parts_of_block(pattern.block_size)
        self._place, self._device = (query_blocks, key_slot, n_blocks), device
        self.cache = {}  # of launches
        self._made = {}

    def query(self, pack: bool) -> list[torch.Tensor]:
        """[rows, tiles, steps] of QueryLists."""
        if pack not in self._made:
            self._made[pack] = on_device(self._device, *query_lists(self.pattern, *self._place, pack, self._split))
        return self._made[pack]

    def key(self) -> list:
        """[rows, columns, steps] of KeyLists, columns that are long, other columns. The steps end with one too many,
        which is not used."""
        if "key" not in self._made:
            lists = key_lists(self.pattern, *self._place, self.n_slots, self._split)
            tensors = on_device(self._device, lists.rows, lists.columns, np.append(lists.steps, np.int32(0)))
            self._made["key"] = [*tensors, lists.n_long, lists.columns.shape[1] - lists.n_long]
            self._made["column steps"] = column_steps(lists)
        return self._made["key"]

    def column_steps(self) -> np.ndarray:
        """int [KV heads, columns]: so many steps has every column of `key`, none where it only pads."""
        self.key()
        return self._made["column steps"]


class KeyRuns(NamedTuple):
    """The placed key blocks of a range pattern as lists without gaps, so that a kernel's loops over a run of blocks
    meet no absent one.

    The candidates of a range of a query head are the blocks k with (k + offset) % stride == 0, in order; prefix counts
    the present ones before each candidate, slots lists theirs. Query heads that share both share the lists.
    """

    index: torch.Tensor  # int32 [H, R, 2]: where the prefix and the slots of a range begin
    prefix: torch.Tensor  # int32
    slots: torch.Tensor  # int32

    @classmethod
    def make(cls, pattern: RangePattern, key_slot: np.ndarray, device="cpu") -> KeyRuns:
        """key_slot: int [KV heads, n_blocks], -1 when absent. Memory O(heads * n_blocks / stride)."""
        ratio = pattern.num_heads // pattern.num_kv_heads
        first_row: dict[bytes, int] = {}
        row_of = [
            first_row.setdefault(row.tobytes(), number) for number, row in enumerate(key_slot)
        ]  # np.unique would sort
        known: dict[tuple[int, int, int], tuple[int, int]] = {}
        prefixes, slots, sizes = [], [], [0, 0]
        index = np.zeros((pattern.num_heads, max(len(head.bounds()) for head in pattern.heads), 2), dtype=np.int32)
        for number, head in enumerate(pattern.heads):
            for position, (_, _, stride) in enumerate(head.bounds()):
                key = (row_of[number // ratio], stride, head.offset % stride)
                if key not in known:
                    candidates = key_slot[key[0], -head.offset % stride :: stride]
                    present = candidates >= 0
                    known[key] = tuple(sizes)
                    prefixes.append(np.concatenate([[0], np.cumsum(present)]))
                    slots.append(candidates[present])
                    sizes = [sizes[0] + len(prefixes[-1]), sizes[1] + len(slots[-1])]
                index[number, position] = known[key]
        slots.append(np.zeros(1))  # never empty: a kernel takes its address
        return cls(*on_device(device, index, np.concatenate(prefixes), np.concatenate(slots)))
