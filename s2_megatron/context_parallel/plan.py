"""Which blocks travel between context-parallel ranks: fixed by the pattern, known to every rank before training starts.
NumPy only.

The sequence is cut into 2 * size equal chunks; rank r holds the chunks r and 2 * size - 1 - r (Megatron's zigzag
order). A rank needs a remote key block of a KV head when one of its query blocks attends it in at least one query head
of the group. n blocks of the whole sequence, G KV heads of the tensor-parallel rank; block indices are global unless
they are called slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import Pattern

COMM_TYPES = ("sparse", "all_gather", "a2a")


def comm_type_of(name: str) -> str:
    """What a flag's word stands for: Megatron spells one of the comm types of --cp-comm-type otherwise."""
    return "all_gather" if name == "allgather" else name


def check_comm_type(comm_type: str, num_kv_heads: int, size: int) -> None:
    """num_kv_heads: of one tensor-parallel rank. size: ranks.

    Raises ValueError for an unknown comm type, and for a2a with KV heads that cannot be divided evenly over the ranks.
    """
    if comm_type not in COMM_TYPES:
        raise ValueError(
            f"s2_cp_comm_type={comm_type!r}; expected one of {', '.join(COMM_TYPES)}; set --s2-cp-comm-type"
        )
    if comm_type == "a2a" and num_kv_heads % size:
        raise ValueError(
            f"s2_cp_comm_type='a2a' with {num_kv_heads} KV heads on a tensor-parallel rank and "
            f"context_parallel_size={size}; expected a multiple of {size}; use --s2-cp-comm-type sparse"
        )


def check_block_count(seq_length: int, size: int, block_size: int) -> int:
    """The number of blocks of a sequence. Raises ValueError when it cannot be cut into 2 * size chunks of whole
    blocks."""
    unit = 2 * size * block_size
    if seq_length % unit or not seq_length:
        below, above = seq_length // unit * unit, (seq_length // unit + 1) * unit
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"--seq-length {seq_length} with --context-parallel-size {size} and block_size {block_size}: expected a "
            f"multiple of 2 * context-parallel size * block_size = {unit}; use --seq-length {nearest}, or a smaller "
            "block_size"
        )
    return seq_length // block_size


def zigzag_chunks(rank: int, size: int) -> tuple[int, int]:
    """The two chunks of a rank, in the order in which it holds them."""
    return rank, 2 * size - 1 - rank


def zigzag_blocks(rank: int, size: int, n_blocks: int) -> np.ndarray:
    """The blocks of a rank in the order in which it holds them, which is ascending; int64[n / size]."""
    half = n_blocks // (2 * size)
    return np.concatenate([np.arange(chunk * half, (chunk + 1) * half) for chunk in zigzag_chunks(rank, size)])


def owners(size: int, n_blocks: int) -> np.ndarray:
    """The rank that holds each block, int64[n]."""
    chunk = np.arange(n_blocks) // (n_blocks // (2 * size))
    return np.minimum(chunk, 2 * size - 1 - chunk)


def needed_blocks(pattern: Pattern, size: int, n_blocks: int) -> np.ndarray:
    """bool[size, G, n]: whether a query block of the rank attends the key block in a query head of the KV head's group.

    The rank's own blocks are included. Range patterns take O(size * heads * ranges) strided assignments, masks
    O(nonzeros).
    """
    half = n_blocks // (2 * size)
    ratio = pattern.num_heads // pattern.num_kv_heads
    needed = np.zeros((size, pattern.num_kv_heads, n_blocks), dtype=bool)
    for rank in range(size):
        for chunk in zigzag_chunks(rank, size):
            first, end = chunk * half, (chunk + 1) * half
            for group in range(pattern.num_kv_heads):
                row = needed[rank, group]
                members = range(group * ratio, (group + 1) * ratio)
                if isinstance(pattern, BlockMaskPattern):
                    for table in {pattern.table_of(head) for head in members}:
                        indptr, indices = pattern.tables[table]
                        row[indices[indptr[first] : indptr[end]]] = True
                    continue
                for head in {pattern.heads[head] for head in members}:
                    row[: min(head.sink_blocks, end)] = True
                    for nearest, limit, stride in head.touched_bounds():
                        # Query blocks first .. end - 1 at distances nearest .. limit - 1: key blocks low .. high, of
                        # one residue.
                        low = 0 if limit is None else max(0, first - limit + 1)
                        high = end - 1 - nearest
                        row[low + (-(low + head.offset)) % stride : max(high + 1, 0) : stride] = True
    return needed


def rank_pairs(pattern: Pattern, size: int, n_blocks: int) -> np.ndarray:
    """(query, key) token pairs that each rank computes, summed over the query heads; int64[size]."""
    owner = owners(size, n_blocks)
    total = sum(weights * keys.sum() for weights, keys in pattern.row_terms(n_blocks))
    return np.bincount(owner, weights=total, minlength=size).astype(np.int64)


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """What one rank sends and receives in one layer, for K and V alike.

    A slot is one block of one KV head. Slots to send are ordered by the rank that receives them, then KV head, then
    block, and the receiver has them in the same order: from rank 0, from rank 1, ...
    """

    rank: int
    size: int
    block_size: int
    n_blocks: int
    num_kv_heads: int
    query_blocks: np.ndarray  # int64 [n / size]: the rank's own blocks, ascending
    local_slot: np.ndarray  # int32 [G, n]: where the rank holds a block of its own, -1 for the others
    remote_slot: np.ndarray  # int32 [G, n]: the received slot of a remote block, -1 when it is not needed or not remote
    send_heads: np.ndarray  # int64 [slots to send]: KV head
    send_blocks: np.ndarray  # int64 [slots to send]: position among the rank's own blocks
    counts: np.ndarray  # int64 [size, size]: slots from each rank to each

    @property
    def received_slots(self) -> int:
        """By this rank."""
        return self.needed_slots[self.rank]

    @property
    def sent_slots(self) -> tuple[int, ...]:
        """By every rank."""
        return tuple(self.counts.sum(1).tolist())

    @property
    def needed_slots(self) -> tuple[int, ...]:
        """Received by every rank."""
        return tuple(self.counts.sum(0).tolist())

    def slot_bytes(self, head_dim: int, itemsize: int, batch: int = 1) -> int:
        """Bytes of one slot, K and V together."""
        return 2 * self.block_size * head_dim * itemsize * batch

    @property
    def all_gather_slots(self) -> int:
        """Slots that a rank would receive if it gathered everything: what the plan is compared with."""
        return self.num_kv_heads * (self.n_blocks - self.n_blocks // self.size)


@lru_cache(maxsize=256)
def make_plan(pattern: Pattern, rank: int, size: int, n_blocks: int) -> ExchangePlan:
    """The plan of one rank. pattern: of this tensor-parallel rank's heads, with global offsets. n_blocks: see
    check_block_count.

    Every rank computes it alone: no communication, memory O(size * G * n).
    """
    if n_blocks % (2 * size):
        raise ValueError(f"n_blocks={n_blocks} cannot be cut into 2 * {size} chunks; expected a multiple of {2 * size}")
    if isinstance(pattern, BlockMaskPattern):
        pattern.check_length(n_blocks * pattern.block_size)
    owner, own = owners(size, n_blocks), zigzag_blocks(rank, size, n_blocks)
    needed = needed_blocks(pattern, size, n_blocks)
    remote = needed & (owner != np.arange(size)[:, None])[:, None, :]
    groups = pattern.num_kv_heads

    local_slot = np.full((groups, n_blocks), -1, dtype=np.int32)
    local_slot[:, own] = np.arange(len(own))
    heads, blocks = np.nonzero(remote[rank])
    order = np.argsort(owner[blocks], kind="stable")
    remote_slot = np.full((groups, n_blocks), -1, dtype=np.int32)
    remote_slot[heads[order], blocks[order]] = np.arange(len(order))
    wanted = [np.nonzero(remote[peer][:, own]) for peer in range(size)]
    return ExchangePlan(
        rank=rank,
        size=size,
        block_size=pattern.block_size,
        n_blocks=n_blocks,
        num_kv_heads=groups,
        query_blocks=own,
        local_slot=local_slot,
        remote_slot=remote_slot,
        send_heads=np.concatenate([head for head, _ in wanted]),
        send_blocks=np.concatenate([block for _, block in wanted]),
        counts=np.stack([np.bincount(owner[np.nonzero(mask)[1]], minlength=size) for mask in remote], axis=1),
    )


def block_pairs(pattern: Pattern, query_blocks: np.ndarray, held: np.ndarray) -> np.ndarray:
    """How many (query, key) pairs of blocks every query head attends, int64[H]. held: bool[n], the key blocks that
    count."""
    found: dict = {}
    counts = np.zeros(pattern.num_heads, dtype=np.int64)
    for head in range(pattern.num_heads):
        name = pattern.table_of(head) if isinstance(pattern, BlockMaskPattern) else pattern.heads[head]
        if name not in found:
            found[name] = _pairs_of_head(pattern, name, query_blocks, held)
        counts[head] = found[name]
    return counts


def _pairs_of_head(pattern, name, query_blocks, held) -> int:
    if isinstance(pattern, BlockMaskPattern):
        indptr, indices = pattern.tables[name]
        before = np.append(0, np.cumsum(held[indices[: indptr[len(held)]]]))
        return int((before[indptr[query_blocks + 1]] - before[indptr[query_blocks]]).sum())
    sink = np.minimum(name.sink_blocks, query_blocks + 1)
    total = int(np.append(0, np.cumsum(held))[sink].sum())
    for nearest, limit, stride in name.touched_bounds():
        before = np.append(0, np.cumsum(held & ((np.arange(len(held)) + name.offset) % stride == 0)))
        high = np.maximum(query_blocks - nearest + 1, sink)
        low = sink if limit is None else np.clip(query_blocks - limit + 1, sink, high)
        total += int((before[high] - before[low]).sum())
    return total


ATTENTION_RATE = 600e12  # FLOP a second of the kernels on a Hopper GPU


@lru_cache(maxsize=256)
def heads_beside(pattern: Pattern, plan: ExchangePlan, head_dim: int, itemsize: int, products: int, rate: float) -> int:
    """How many KV heads, the first ones, attend the rank's own keys while the blocks travel: as many as that takes,
    at least one.

    products: matmuls of a tile, 2 in the forward. rate: bytes a second that a rank receives. An estimate from bytes and
    FLOPs, the same in every run: the order of sums depends on it.
    """
    held = np.zeros(plan.n_blocks, dtype=bool)
    held[plan.query_blocks] = True
    pairs = block_pairs(pattern, plan.query_blocks, held).reshape(plan.num_kv_heads, -1).sum(1)
    seconds = np.cumsum(pairs) * (plan.block_size**2 * products * 2 * head_dim / ATTENTION_RATE)
    exchange = plan.received_slots * plan.slot_bytes(head_dim, itemsize) / rate
    return min(int(np.searchsorted(seconds, exchange)) + 1, plan.num_kv_heads)


@dataclass(frozen=True)
class LayerCosts:
    """What a layer costs the ranks of context parallelism, for one sequence. Lists have one entry per rank."""

    sent_forward: tuple[int, ...]  # bytes
    sent_backward: tuple[int, ...]  # bytes
    pairs: tuple[int, ...]  # (query, key) token pairs

    @property
    def balance(self) -> float:
        """Largest over mean work: 1.0 is perfect, 1.1 means that 10 % of the time is waiting."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs)


def layer_costs(
    pattern: Pattern,
    size: int,
    seq_length: int,
    comm_type: str,
    *,
    head_dim: int,
    itemsize: int,
    keep_received: bool = False,
) -> LayerCosts:
    """The costs of a layer on `size` ranks. pattern: of one tensor-parallel rank's heads. head_dim, itemsize: of q, k
    and v.

    Forward: K and V, for a2a q and out too. Backward: K and V once more unless keep_received, and their gradients (of
    an all-gather in fp32). Raises ValueError for a comm_type that is none of COMM_TYPES.
    """
    if comm_type == "a2a":
        # A rank holds seq_length / size rows and sends the heads of all other ranks.
        rows_sent = seq_length // size * (size - 1) // size
        one_way = rows_sent * 2 * (pattern.num_heads + pattern.num_kv_heads) * head_dim * itemsize
        pairs = tuple(pattern.tensor_parallel_slice(rank, size).attended_pairs(seq_length) for rank in range(size))
        return LayerCosts((one_way,) * size, (one_way,) * size, pairs)
    n_blocks = check_block_count(seq_length, size, pattern.block_size)
    pairs = tuple(rank_pairs(pattern, size, n_blocks).tolist())
    plan = make_plan(pattern, 0, size, n_blocks)
    slot = plan.slot_bytes(head_dim, itemsize)
    if comm_type == "all_gather":
        forward = (slot * plan.all_gather_slots,) * size
        gradients = 2 * pattern.block_size * head_dim * max(itemsize, 4) * plan.all_gather_slots
        return LayerCosts(forward, tuple(gradients + (0 if keep_received else sent) for sent in forward), pairs)
    if comm_type != "sparse":
        raise ValueError(f"comm_type={comm_type!r}; expected one of {', '.join(COMM_TYPES)}")
    forward = tuple(slot * count for count in plan.sent_slots)
    returned = (slot * count for count in plan.needed_slots)
    return LayerCosts(
        forward, tuple(back + (0 if keep_received else sent) for sent, back in zip(forward, returned)), pairs
    )
