"""What one decoding step of a cache must give, in fp64, and random steps."""

import torch

from s2_megatron.huggingface.decode_kernel import Kept


def random_kept(heads, kept: int, sizes, dtype, device="cpu", by_query_head: int = 1, generator=None) -> Kept:
    """A group of KV heads [K] of two rows with room behind S tokens, of which a third is attended, but none of a row's
    last head's and nothing in the second half of the first head's. sizes: (D, V)."""
    shape = (2, len(heads))
    keys, values = (torch.randn(*shape, kept + 8, size, generator=generator) for size in sizes)
    shown = torch.rand(*shape, by_query_head, kept, generator=generator) < 0.3
    shown[:, 0, :, kept // 2 :] = False
    shown[1, -1] = False
    place = torch.stack([torch.randint(kept // 2, (2, 1), generator=generator) for _ in range(3)], -1)
    keys, values = keys.to(dtype).to(device), values.to(dtype).to(device)
    return Kept(keys, values, shown.to(device), place.to(device), torch.tensor(heads, device=device))


def expected_step(query, key, value, groups: list[Kept], scale: float, offset=None):
    """(out [B, H, 1, V], LSE [B, H, 1]) in fp64 of a step that writes key and value first. A row without a key has out
    0, and -inf or the offset for its LSE."""
    query, key, value = (tensor.double().cpu() for tensor in (query, key, value))
    (batch, heads), ratio = query.shape[:2], query.shape[1] // key.shape[1]
    out, lse = torch.zeros(batch, heads, 1, value.shape[3]).double(), torch.zeros(batch, heads, 1).double()
    for group in groups:
        for index, kv_head in enumerate(group.heads.tolist()):
            for row in range(batch):
                keys, values = (store[row, index].double().cpu() for store in (group.keys, group.values))
                places = group.place.cpu().expand(batch, len(group.heads), -1)[row, index]
                keys[places], values[places] = key[row, kv_head, 0], value[row, kv_head, 0]
                shown = group.shown.cpu().expand(batch, len(group.heads), ratio, -1)[row, index]
                for head, seen in zip(range(kv_head * ratio, (kv_head + 1) * ratio), shown):
                    scores = (keys[: len(seen)] @ query[row, head, 0] * scale)[seen]
                    extra = scores.new_empty(0) if offset is None else offset[head].double().cpu()[None]
                    lse[row, head] = torch.cat([scores, extra]).logsumexp(0)
                    if seen.any():
                        out[row, head] = (scores - lse[row, head]).exp() @ values[: len(seen)][seen]
    return out, lse
