"""The patterns of a `pattern.json` as FlexAttention masks. This file needs torch and NumPy only: `s2-megatron
export-pattern` writes a copy of it beside the pattern.

    pattern = load("FOLDER")
    mask = create_block_mask(pattern.mask_mod(layer), B=None, H=pattern.num_heads, Q_LEN=n, KV_LEN=n, device=device)
    out = flex_attention(query, key, value, block_mask=mask, scale=pattern.softmax_scale, enable_gqa=True)

H must be the number of query heads: heads attend different blocks, and with H=None all would get head 0's.
"""

import json
from pathlib import Path

import numpy as np
import torch


class SavedPattern:
    """content: pattern.json. masks: masks.npz, for patterns that are block masks."""

    def __init__(self, content: dict, masks: dict):
        self.content, self.masks = content, masks
        self.block_size, self.num_heads = content["block_size"], content["num_heads"]
        self.softmax_scale = content["softmax_scale"]

    def mask_mod(self, layer: int, device="cpu"):
        """mask_mod(b, h, q_idx, kv_idx) -> bool of a layer, for create_block_mask. The head is looked up per head."""
        index = self.content["layers"][layer]
        form, block = self.content["patterns"][index], self.block_size
        if form["kind"] == "dense":
            return lambda b, h, q, k: q >= k
        if form["kind"] == "block_mask":
            table = self._dense_table(index).to(device)
            of_head = torch.tensor(form["table_of_head"], device=device)
            return lambda b, h, q, k: (q >= k) & table[of_head[h], q // block, k // block]
        heads = form["heads"]
        longest = max(len(head["ranges"]) for head in heads)
        # [range][head]; a range that a head does not have is empty.
        starts, ends, strides = ([[0] * len(heads) for _ in range(longest)] for _ in range(3))
        for h, head in enumerate(heads):
            start = 0
            for r in range(longest):
                end, stride = head["ranges"][r] if r < len(head["ranges"]) else (start, 1)
                starts[r][h], ends[r][h], strides[r][h] = start, 2**30 if end is None else end, stride
                start = ends[r][h]
        starts, ends, strides = (torch.tensor(table, device=device) for table in (starts, ends, strides))
        offset = torch.tensor([head["offset"] for head in heads], device=device)
        window = torch.tensor([head["window"] or 0 for head in heads], device=device)
        sink = torch.tensor([head["sink_tokens"] for head in heads], device=device)

        def mask_mod(b, h, q, k):
            distance, key_block = q // block - k // block, k // block
            attended = (q - k < window[h]) | (k < sink[h])
            for r in range(longest):
                inside = (distance >= starts[r, h]) & (distance < ends[r, h])
                attended = attended | (inside & ((key_block + offset[h]) % strides[r, h] == 0))
            return attended & (q >= k)

        return mask_mod

    def _dense_table(self, index: int) -> torch.Tensor:
        indptr, indices = (self.masks[f"pattern{index}_{name}"] for name in ("indptr", "indices"))
        blocks = indptr.shape[1] - 1
        table, first = torch.zeros(len(indptr), blocks, blocks, dtype=torch.bool), 0
        for p, row in enumerate(indptr):
            keys = torch.from_numpy(indices[first : first + row[-1]].astype(np.int64))
            queries = torch.from_numpy(np.repeat(np.arange(blocks), np.diff(row)))
            table[p, queries, keys] = True
            first += row[-1]
        return table


def load(folder) -> SavedPattern:
    """What export-pattern wrote into a folder."""
    folder = Path(folder)
    masks = folder / "masks.npz"
    arrays = dict(np.load(masks, allow_pickle=False)) if masks.exists() else {}
    return SavedPattern(json.loads((folder / "pattern.json").read_text()), arrays)
