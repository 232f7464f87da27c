"""Tile sizes of the portable kernels: a small table instead of autotuning, so that the first step starts at once."""
from __future__ import annotations

from functools import cache
from typing import NamedTuple


class Tile(NamedTuple):
    rows: int  # query rows of a tile or of a step
    columns: int  # key columns of a step or of a tile
    warps: int
    stages: int


# (padded head dim, 32-bit inputs) -> forward, dQ, dK and dV. Measured by benchmarks/tune.py, on an H200 at 32K tokens:
# the rows of 64, 128 and 256 with 16-bit inputs. That of 256: forward 4.637 ms, which was 6.43 with Tile(128, 32, 8,
# 2); the whole backward 39.8 ms before, 29.7 with this dQ alone, 37.0 with this dK/dV alone. The other rows (32, and
# all of 32-bit inputs) are guesses that fit into shared memory.
_TABLE = {
    (32, False): (Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
    (64, False): (Tile(64, 64, 4, 3), Tile(128, 32, 4, 3), Tile(64, 64, 4, 3)),
    (128, False): (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
    (256, False): (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    (32, True): (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
    (64, True): (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
    (128, True): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),
    (256, True): (Tile(32, 16, 8, 1), Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),
}
# Rows of cards with less shared memory a block than Hopper's 227 KB; compiled for them, not measured. 163 KB: compute
# capability 8.0.
_AMPERE_TABLE = {(256, False): (Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 4, 2))}
# 99 KB.
_SMALL_TABLE = {
    (128, False): (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 64, 4, 2)),
    (256, False): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),
    (256, True): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
HEADS_TOGETHER = 4  # heads whose tiles run side by side and share L2


def tiles_for(block_dim: int, wide: bool, block_size: int, tile_blocks: int, capability: tuple[int, int] = (9, 0)) -> tuple[Tile, Tile, Tile]:
    """(forward, dQ, dK and dV) tiles. tile_blocks: query blocks that may share a tile (1: a tile stays within a block).
    capability: the device's compute capability."""
    key = max(32, block_dim), wide
    small = capability in ((8, 6), (8, 7), (8, 9)) or capability[0] == 12
    own = _SMALL_TABLE if small else _AMPERE_TABLE if capability == (8, 0) else {}
    forward, grad_query, grad_key = own.get(key, _TABLE[key])
    most_rows = max(16, block_size * tile_blocks)
    forward, grad_query = (tile._replace(rows=min(tile.rows, most_rows)) for tile in (forward, grad_query))
    return forward, grad_query, grad_key._replace(columns=min(grad_key.columns, block_size))


class HopperTile(NamedTuple):
    """A kernel with a program per query tile."""

    # Key tiles on their way, 2 or more (packed documents wait for V before K goes back); key blocks for head dims above
    # 128.
    stages: int
    heads: int  # heads whose tiles run side by side and share L2
    persistent: bool = False  # a program per multiprocessor instead of one per tile
    pack: bool = False  # two query heads of a KV head in one tile instead of two query blocks
    value_stages: int = 0  # values on their way, for head dims above 128; below them as many as `stages`


class HopperColumn(NamedTuple):
    """The kernel with a program per key tile."""

    stages: int  # queries on their way
    grad_stages: int  # and gradients of the output
    ds_stages: int  # dS on its way to the warpgroup of dQ
    heads: int
    # dQ with dK and dV, in fp32 and without a fixed order of its sums, rather than in a kernel of its own.
    one_pass: bool


class HopperTiles(NamedTuple):
    forward: HopperTile
    grad_query: HopperTile
    backward: HopperColumn


def hopper_block_dim(head_dim: int) -> int:
    """What a head dim is padded to in the Hopper kernels."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


@cache
def hopper_tiles_for(block_dim: int, rows: int, keys: int) -> HopperTiles:
    """block_dim: 64, 128 or 256. rows: tokens of the queries. keys: of the sequence, whatever a call has of them; of
    all packed documents."""
    # Few heads at a time read their stripes from L2 instead of memory, which costs power; short sequences need many for
    # even work.
    query_tile = HopperTile(stages=4 if block_dim == 64 else 2, heads=32 if keys <= 16384 else 2, persistent=True, pack=True)
    column = HopperColumn(stages=2, grad_stages=2, ds_stages=2, heads=4 if rows <= 16384 else 2, one_pass=block_dim == 64)
    if block_dim == 256:
        return HopperTiles(query_tile._replace(value_stages=2), query_tile._replace(value_stages=1), column)
    return HopperTiles(query_tile, query_tile, column)
