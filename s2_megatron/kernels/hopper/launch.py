"""Launches of the Hopper kernels, and which calls they compute. The arguments are those of ops.call.Backend: views [B,
heads, rows, D], and an AttentionCall."""
from __future__ import annotations

import math
from functools import cache, cached_property

import torch
import triton

from s2_megatron.kernels.compile_options import OPTIONS
from s2_megatron.kernels.hopper.backward import s2_hopper_backward_kernel
from s2_megatron.kernels.hopper.d256.backward import s2_hopper_d256_backward_kernel
from s2_megatron.kernels.hopper.d256.forward import s2_hopper_d256_forward_kernel
from s2_megatron.kernels.hopper.d256.grad_query import s2_hopper_d256_grad_query_kernel
from s2_megatron.kernels.hopper.descriptors import BLOCK, MATRIX_FP32, Box, Launches, loadable, share_rows
from s2_megatron.kernels.hopper.forward import s2_hopper_forward_kernel
from s2_megatron.kernels.hopper.grad_query import s2_hopper_grad_query_kernel
from s2_megatron.kernels.hopper.repeats import Launched, RepeatedCall
from s2_megatron.kernels.hopper.rows import s2_scale_kernel
from s2_megatron.kernels.step_descriptor import MOST_MEMBERS, MOST_ROW_BLOCKS
from s2_megatron.kernels.tiles import hopper_block_dim, hopper_tiles_for
from s2_megatron.kernels.triton.launch import DELTA_ROWS
from s2_megatron.kernels.triton.packed_rows import s2_document_tiles_kernel
from s2_megatron.kernels.triton.query_kernels import s2_delta_kernel
from s2_megatron.printing import print_once

TILE = 2 * BLOCK  # rows of a tile, of two blocks
MOST_RANGES = 12  # for the marks of a tile
MOST_BLOCKS = MOST_ROW_BLOCKS  # of a step descriptor
PART_STEPS = 64  # a part of a column of dK and dV has a multiple of them: to hand its sums on takes as long as a few
MOST_PARTS = 64  # of a column
# From so many KV heads of the batch on columns are not divided; a length chooses no other variant of the kernel.
FEW_UNITS = 16
MOST_SUMS = 14 * 2**20  # bytes, of the columns in parts


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _needs_lists(layout, placement, initial) -> bool:
    """Whether the steps of a call come as lists, because they do not follow from a table of ranges."""
    return (placement is not None or initial is not None or not hasattr(layout, "ranges") or layout.ranges.shape[1] > MOST_RANGES
            or layout.block_size != BLOCK or not layout.pattern.is_kv_efficient)


def refusal(query, key, value, call, initial=None, more=None) -> str | None:
    """Why these kernels do not compute a call on a Hopper GPU, or None."""
    layout, packed, placement = call.layout, call.packed, call.placement
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"{query.dtype} is not a 16-bit type"
    if query.shape[3] > 256 or query.shape[3] % 8:
        return f"head dim {query.shape[3]} is not a multiple of 8 up to 256"
    if layout.block_size % BLOCK:
        return f"block_size={layout.block_size} is no multiple of {BLOCK}, whose tiles would need masks inside (docs/kernels.md)"
    if query.shape[1] // key.shape[1] > MOST_MEMBERS:
        return f"more than {MOST_MEMBERS} query heads share a KV head"
    listed = _needs_lists(layout, placement, initial)
    if listed and packed is not None:
        return (f"documents are packed, and the pattern is a block mask, has strides that do not divide each other, or "
                f"block_size={layout.block_size}")
    if placement is not None and placement.steps is None:
        return "keys or queries are placed by blocks without their pattern"
    if max(query.shape[2], 0 if listed else layout.largest_stride * BLOCK) >= MOST_BLOCKS * BLOCK:
        return f"the sequence or a stride has {MOST_BLOCKS} blocks or more"
    if share_rows(key) != share_rows(value):
        return "the heads of only one of key and value share their rows"
    if share_rows(query) or not all(loadable(tensor) for tensor in (query, key, value, *(more or ()))):
        return "query, key or value are not aligned to 16 bytes, or not contiguous in the head dim"
    return None


def _documents(packed, rows, per_document, tile):
    """(table of the tiles of packed documents, its length): `tile` tokens a tile, and room for per_document - 1 more a
    document."""
    documents = len(packed.cu_seqlens) - 1
    n_tiles = rows // tile + documents * per_document
    tiles = torch.empty(n_tiles, 4, dtype=torch.int32, device=packed.cu_seqlens.device)
    s2_document_tiles_kernel[(triton.cdiv(n_tiles, 256),)](packed.starts, packed.cu_seqlens, tiles, documents, n_tiles, per_document,
                                                           TILE=tile, TILES=256, **OPTIONS)
    return tiles, n_tiles


def _group(units: int, wanted: int) -> int:
    return next(size for size in range(min(wanted, units), 0, -1) if units % size == 0)


class Geometry:
    """What the kernels of one call share. Launches are cached with the layout, or the step lists, for every shape: a
    short call would wait for Python otherwise; those of packed documents change from batch to batch.

    kv_heads: (first, end) of those that a kernel with a program per query tile computes, or None. more: key and value
    of the placement's slots from own_slots on, or None.
    """

    def __init__(self, query, key, value, call, initial=None, kv_heads=None, more=None):
        layout, placement = call.layout, call.placement
        self.query, self.key, self.value = query, key, value
        self.more, self.own_rows = more, 0 if more is None else placement.own_slots * layout.block_size
        self.kv_heads = kv_heads
        self.layout, self.packed, self.scale = layout, call.packed, call.softmax_scale
        self.batch, self.heads, self.rows, self.head_dim = query.shape
        self.block_dim = hopper_block_dim(self.head_dim)
        self.single = self.block_dim == 256  # one key block a stage: the kernels of d256/
        self.tiles = hopper_tiles_for(self.block_dim, self.rows, self.rows if placement is None else placement.n_blocks * layout.block_size)
        self.steps = None
        if _needs_lists(layout, placement, initial):
            self.steps = layout.steps(triton.cdiv(key.shape[2], BLOCK)) if placement is None else placement.steps
        self.nothing = layout.tensors[0]  # stands for pointers that are not read
        self.launched = Launched(query.device)
        self.start = self.launched.start
        self._repeatable = self.packed is None and placement is None and initial is None

    def again(self, *given) -> RepeatedCall | None:
        """How to make all launches so far again. given: the tensors of the call, in the order in which they will be given
        then."""
        return self.launched.again(given, self.nothing) if self._repeatable else None

    def query_tiles(self, tile):
        """Launches of the kernels with a program per query tile."""
        return self._launches("query", tile, self._query_tiles)

    @cached_property
    def key_tiles(self) -> Launches:
        """Launches of the kernel with a program per key tile."""
        return self._launches("key", self.tiles.backward, self._key_tiles)

    def columns_in_parts(self) -> int:
        arguments = self.key_tiles.arguments
        return arguments["units"] * (arguments["n_split"] + arguments["n_sink"]) if arguments.get("SPLIT") else 0

    def key_counters(self) -> int:
        """How many counters the kernel with a program per key tile has: of the tiles that are taken, and flags of the
        halves of columns in parts."""
        return 1 + 2 * self.columns_in_parts()

    def delta_tiles(self):
        """Launches of the portable kernel that makes the row sums."""
        return self._launches("delta", None, self._delta_tiles)

    def scale_tiles(self):
        """Launches of the kernel that rounds an fp32 dQ."""
        return self._launches("scale", None, self._scale_tiles)

    def _scale_tiles(self, tile):
        return Launches(triton.cdiv(self.rows, 64) * self.batch * self.heads,
                        dict(n_rows=self.rows, n_heads=self.heads, ROWS=64, HEAD_DIM=self.head_dim, BLOCK_D=self.block_dim))

    def _delta_tiles(self, tile):
        return Launches(triton.cdiv(self.rows, DELTA_ROWS) * self.batch * self.heads,
                        dict(n_rows=self.rows, n_heads=self.heads, ROWS=DELTA_ROWS, HEAD_DIM=self.head_dim,
                             BLOCK_D=max(16, triton.next_power_of_2(self.head_dim))))

    def _launches(self, kind, tile, make):
        if self.packed is not None:
            launches = make(tile)
            launches.repeated = False  # its tables are this batch's
            return launches
        cache = (self.layout if self.steps is None else self.steps).cache
        entry = (kind, tile, self.query.shape, self.key.shape, share_rows(self.key), self.kv_heads, self.own_rows)
        if entry not in cache:
            cache[entry] = make(tile)
        return cache[entry]

    def _common(self, lists, **pointers):
        rows, tiles, steps = lists or (self.nothing,) * 3
        listed = self.steps is not None
        tokens = getattr(self.layout, "tokens", None)
        return dict(ranges_ptr=self.nothing, tokens_ptr=self.nothing if tokens is None else tokens, TOKENS=tokens is not None,
                    rows=self.rows, heads=self.heads, batches=self.batch, HEAD_DIM=self.head_dim,
                    N_RANGES=1 if listed else self.layout.ranges.shape[1], RATIO=self.heads // self.key.shape[1],
                    PACKED=self.packed is not None, LISTED=listed, KV_STEP=0 if share_rows(self.key) else 1, BLOCK_D=self.block_dim,
                    num_warps=4, list_rows_ptr=rows, list_tiles_ptr=tiles, list_steps_ptr=steps,
                    ORDERED=pointers["order_ptr"] is not None,
                    **{name: self.nothing if tensor is None else tensor for name, tensor in pointers.items()})

    def _query_tiles(self, tile):
        pack = int(tile.pack and self.layout.heads_pair)
        first, end = self.kv_heads or (0, self.key.shape[1])
        members = self.heads // self.key.shape[1] // (1 + pack)  # of a KV head, in tiles
        units = self.batch * (end - first) * members
        rows_of_tile = BLOCK if pack else TILE
        documents = order = lists = None
        if self.packed is None:
            n_tiles = triton.cdiv(self.rows, rows_of_tile)
        else:
            documents, n_tiles = _documents(self.packed, self.rows, 1, rows_of_tile)
        if self.steps is None:
            order = self.layout.head_order(1 + pack)
        else:
            lists = self.steps.query(bool(pack))
            if first > 0:
                # Copied, not computed there: it is cached, and must not be filled by a captured graph alone.
                order = torch.arange(first * members, end * members, dtype=torch.int32, device="cpu").to(self.query.device)
        programs = n_tiles * units
        # Tiles from lists are taken one after the other; tiles of ranges are dealt out, which is not for heads of
        # different work.
        persistent = tile.persistent and (order is None or lists is not None)
        grid = min(programs, _multiprocessors(self.query.device)) if persistent else programs
        return Launches(grid, dict(self._common(lists, order_ptr=order, documents_ptr=documents), n_tiles=n_tiles, n_programs=programs,
                                   PACK=pack, head_group=_group(units, tile.heads if persistent else 2), STAGES=tile.stages,
                                   own_rows=self.own_rows, MORE=self.more is not None,
                                   **(dict(V_STAGES=tile.value_stages) if self.single else {})))

    def _key_tiles(self, tile):
        units = self.batch * self.key.shape[1]
        n_long, n_rest, documents, order, distances, lists, fold = 1, 1, None, None, None, None, 0
        key_rows = self.key.shape[2]
        if self.steps is not None:
            *lists, n_long, n_rest = self.steps.key()
            # In the lists slot n_slots is none, whatever lies there.
            key_rows = min(key_rows, self.steps.n_slots * BLOCK)
        else:
            order, distances = self.layout.head_order(self.heads // self.key.shape[1]), self.layout.pair_distances
            if self.packed is None:
                n_long, n_rest = self.layout.key_columns(triton.cdiv(self.rows, BLOCK))
                fold = int(distances is None and self._folds())
                n_long = triton.cdiv(n_long, 2) if fold else n_long
        few = self.packed is None and not self.single and units < FEW_UNITS
        n_sink = self._sink_columns(units, few)
        n_split, part_steps, parts = self._parts(n_long, units, n_sink) if few and not fold else (0, 0, 1)
        sink_parts = 1
        if n_sink and few:
            visits = self.heads // self.key.shape[1] * triton.cdiv(self.rows, BLOCK)
            part_steps = part_steps or self._part_steps(visits, self._mean_steps())
            sink_parts = triton.cdiv(visits, part_steps)
        if n_split and self.steps is not None:
            n_long, n_rest = n_split, n_long + n_rest - n_split
        if self.packed is None:
            programs = (n_long + n_rest + n_split * (parts - 1) + n_sink * sink_parts) * units
        else:
            documents, n_tiles = _documents(self.packed, self.rows, 1 + self.layout.spare_columns, TILE)
            programs = n_tiles * units
        common = self._common(lists, order_ptr=order, documents_ptr=documents, distance_ptr=distances)
        return Launches(min(programs, _multiprocessors(self.query.device)), dict(
            common, n_long=n_long, n_rest=n_rest, n_programs=programs, units=units, key_rows=key_rows,
            head_group=_group(units, tile.heads), n_sink=n_sink, MIXED=distances is not None, Q_STAGES=tile.stages, GRAD_STAGES=tile.grad_stages,
            **({} if self.single else dict(fold=fold, n_split=n_split, part_steps=part_steps, sink_parts=sink_parts, SPLIT=few))))

    def _sink_columns(self, units, few):
        """How many columns of a unit are the sink's, which go first; 0 where they have their places among the others: in
        lists and documents, and where so many would have no room for the sums of their parts."""
        if self.steps is not None or self.packed is not None:
            return 0
        sink = min(self.rows, max(head.sink_tokens for head in self.layout.pattern.heads))
        n_sink = triton.cdiv(sink, TILE)
        return 0 if few and n_sink * self._bytes_in_parts(units) > MOST_SUMS else n_sink

    def _bytes_in_parts(self, units):
        """Of the sums of one column of each unit in parts."""
        return units * 2 * TILE * self.block_dim * 4

    def _part_steps(self, longest, mean):
        return PART_STEPS * max(1, math.ceil(max(longest / MOST_PARTS, mean / 4) / PART_STEPS))

    def _folds(self):
        """Whether a program takes two long columns of dK and dV: not where one would have more than its share of all
        steps, and not for head dims above 128, whose kernel goes through a tile's two blocks one after the other, so
        that programs are never at the same queries."""
        longest = self.heads // self.key.shape[1] * (triton.cdiv(self.rows, BLOCK) + 2)
        return not self.single and longest <= self._mean_steps()

    def _mean_steps(self):
        """Steps of dK and dV that a multiprocessor has, on average."""
        steps = self.batch * self.layout.pattern.attended_pairs(self.rows) / (2 * BLOCK * BLOCK)
        return steps / _multiprocessors(self.query.device)

    def _parts(self, n_long, units, n_sink):
        """(columns of a unit that are divided into parts, steps of a part, the most parts of a column). Not where
        columns are about as long as what a multiprocessor has to do; a quarter of that makes a part, for what is left
        at the end is shared out better."""
        if self.steps is None:
            n_blocks, ratio = triton.cdiv(self.rows, BLOCK), self.heads // self.key.shape[1]
            ends = [None if head.sink_tokens and not n_sink else head.touched_bounds()[-1][1] for head in self.layout.pattern.heads]
            runs = [n_blocks if end is None else min(n_blocks, end + self.layout.largest_stride)
                    for end in ends]  # of a pair of key blocks, which lie a stride apart
            longest = max(sum(runs[group : group + ratio]) for group in range(0, self.heads, ratio))
            mean = self._mean_steps()
        else:
            steps = self.steps.column_steps()
            longest, mean = int(steps.max()), self.batch * int(steps.sum()) / _multiprocessors(self.query.device)
        # No step at all: nothing is placed.
        part_steps = self._part_steps(longest, mean)
        parts = triton.cdiv(longest, part_steps)
        # A column that is divided has another one behind it in the lists, which says where it ends.
        if self.steps is not None:
            n_long = min(int((steps > part_steps).sum(1).max()), steps.shape[1] - 1)
        n_split = min(n_long, MOST_SUMS // self._bytes_in_parts(units) - n_sink)
        return (n_split, part_steps, parts) if n_split and longest > 1.25 * max(mean, PART_STEPS) else (0, 0, 1)

    def key_boxes(self):
        """(K, V), (K, V) of the further slots or None, in the boxes that the kernels with a program per query tile
        load."""
        columns = self.block_dim if self.single else 64
        boxes = [Box(tensor, columns) for tensor in (self.key, self.value, *(self.more or ()))]
        return boxes[:2], boxes[2:] or [None, None]

    def counter(self):
        """What a kernel with a program per query tile counts its tiles with."""
        return self.nothing if self.steps is None else self.launched.zero_counters(1)


def forward(query, key, value, out, lse, call, initial=None, kv_heads=None, more=None):
    """Writes out and lse. Returns how to do it again for (query, key, value, out, lse), or None."""
    geometry = Geometry(query, key, value, call, initial, kv_heads, more)
    initial_out, initial_lse = (out, lse) if initial is None else initial
    by_rows = out.dtype != query.dtype or not loadable(out)
    own, further = geometry.key_boxes()
    boxes = [Box(query, geometry.block_dim), *own, Box(query if by_rows else out, geometry.block_dim), *further]
    geometry.start(
        geometry.query_tiles(geometry.tiles.forward), s2_hopper_d256_forward_kernel if geometry.single else s2_hopper_forward_kernel, boxes,
        [out, lse, initial_out, initial_lse.contiguous(), geometry.counter()], dict(o=out, i=initial_out), scale=geometry.scale,
        CONTINUE=initial is not None, BY_ROWS=by_rows)
    return geometry.again(query, key, value, out, lse)


def backward(grad_out, grad_lse, query, key, value, out, lse, grad_query, grad_key, grad_value, call):
    """Writes the three gradients. Unless call.deterministic, dQ may be added up in fp32 in whatever order its parts
    come. Returns how to do it again for the same ten tensors, or None."""
    geometry = Geometry(query, key, value, call)
    one_pass = geometry.tiles.backward.one_pass and not call.deterministic
    given = grad_out, grad_lse, query, key, value, out, lse, grad_query, grad_key, grad_value
    grad_out = _loadable_gradient(grad_out)
    delta = geometry.launched.empty(*lse.shape)
    sums = geometry.launched.empty(*query.shape) if one_pass else None
    counters = geometry.launched.empty(geometry.key_counters(), dtype=torch.int32)
    _launch_delta(geometry, grad_out, grad_lse, out, lse, delta, sums, counters)
    _launch_dkdv(geometry, grad_out, lse, delta, grad_key, grad_value, counters, sums)
    if one_pass:
        geometry.start(geometry.scale_tiles(), s2_scale_kernel, [], [sums, grad_query], dict(o=grad_query), scale=geometry.scale)
    else:
        _launch_dq(geometry, grad_out, lse, delta, grad_query)
    return geometry.again(*given)


def backward_dkdv(grad_out, query, key, value, lse, delta, grad_key, grad_value, call, returned=None):
    """Writes dK and dV, with what `returned` adds to them."""
    geometry = Geometry(query, key, value, call)
    counters = geometry.launched.zero_counters(geometry.key_counters())
    _launch_dkdv(geometry, _loadable_gradient(grad_out), lse, delta, grad_key, grad_value, counters, returned=returned)


def backward_dq(grad_out, query, key, value, lse, delta, grad_query, call, initial=None, kv_heads=None, more=None):
    """Writes dQ."""
    _launch_dq(Geometry(query, key, value, call, initial, kv_heads, more), _loadable_gradient(grad_out), lse, delta, grad_query, initial)


def _loadable_gradient(grad_out):
    if loadable(grad_out) and not share_rows(grad_out):
        return grad_out
    print_once(f"S2 attention copies the gradient of its output, whose strides {grad_out.stride()} TMA cannot read")
    return grad_out.contiguous()


def _launch_delta(geometry, grad_out, grad_lse, out, lse, delta, clear, counters):
    """As portable.launch_delta, without Triton's look at the arguments; also zeros into `counters`."""
    log_grad = lse if grad_lse is None else grad_lse
    geometry.start(
        geometry.delta_tiles(), s2_delta_kernel, [], [out, grad_out, log_grad, lse, delta, delta if clear is None else clear, counters],
        dict(o=out, g=grad_out, l=log_grad), n_counters=len(counters), stride_od=out.stride(3), stride_gd=grad_out.stride(3),
        GRAD_LSE=grad_lse is not None, CLEAR=clear is not None, COUNTERS=True)


def _launch_dkdv(geometry, grad_out, lse, delta, grad_key, grad_value, counters, sums=None, returned=None):
    """counters: zeros, geometry.key_counters() of them. sums: fp32 zeros [B, H, rows, D], to which dQ / scale is added."""
    launches = geometry.key_tiles
    boxes = [Box(tensor, geometry.block_dim) for tensor in (geometry.query, geometry.key, geometry.value, grad_out)]
    joined = [share_rows(tensor) for tensor in (grad_key, grad_value)]
    by_rows = joined[0] != joined[1] or not all(tensor.dtype == geometry.key.dtype and loadable(tensor) for tensor in (grad_key, grad_value))
    grad_boxes = boxes[1:3] if by_rows else [Box(tensor, geometry.block_dim) for tensor in (grad_key, grad_value)]
    columns = geometry.columns_in_parts()
    pointers = [lse, delta, grad_key, grad_value, counters, *((lse, counters, counters) if returned is None else returned)]
    strided = dict(dk=grad_key, dv=grad_value)
    more = dict(scale=geometry.scale, BY_ROWS=by_rows, RETURNED=returned is not None, GRAD_STEP=0 if all(joined) else 1)
    if geometry.single:
        geometry.start(launches, s2_hopper_d256_backward_kernel, boxes + grad_boxes, pointers, strided, **more)
    else:
        part_sums = geometry.launched.empty(columns, 2, 2, BLOCK, geometry.block_dim) if columns else lse
        sums_box = boxes[0] if sums is None else Box(sums, 64, MATRIX_FP32)
        geometry.start(launches, s2_hopper_backward_kernel, [*boxes, *grad_boxes, sums_box], [*pointers, part_sums], strided, **more,
                       DQ=sums is not None, DS_STAGES=geometry.tiles.backward.ds_stages)


def _launch_dq(geometry, grad_out, lse, delta, grad_query, initial=None):
    by_rows = grad_query.dtype != geometry.query.dtype or not loadable(grad_query)
    start = grad_query if initial is None else initial
    own, further = geometry.key_boxes()
    boxes = [Box(geometry.query, geometry.block_dim), *own, Box(grad_out, geometry.block_dim), Box(geometry.query if by_rows else grad_query, geometry.block_dim),
             *further]
    geometry.start(
        geometry.query_tiles(geometry.tiles.grad_query), s2_hopper_d256_grad_query_kernel if geometry.single else s2_hopper_grad_query_kernel, boxes,
        [grad_query, lse, delta, start, geometry.counter()], dict(o=grad_query, i=start), scale=geometry.scale, CONTINUE=initial is not None, BY_ROWS=by_rows)
