"""From a checked config and a model's shape to one Pattern per layer."""

from __future__ import annotations

import importlib
import json

import numpy as np

from s2_megatron.config.errors import Problem, Source, nearest_name, printable, shown
from s2_megatron.config.mask_file import read_mask
from s2_megatron.config.schema import S2Config, SpecConfig
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity, canonical_pattern
from s2_megatron.config.yaml_file import neighbours, not_a_file
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import Pattern, make_range_pattern

NPZ_FORMAT = "an .npz with the integer arrays `indptr` ([n+1] or [P, n+1]) and `indices`"
MOST_LAYERS, MOST_HEADS, MOST_SEQ_LENGTH = 4096, 4096, 2**30
MOST_LAYER_HEADS = 2**18  # query heads of all layers together
MOST_FUNCTION_CALLS = 2**22  # of a Python pattern: one a head and query block


def resolve_config(
    config: S2Config,
    source: Source,
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    seq_length: int,
    mtp_num_layers: int,
    layers_flag: str = "--num-layers",
    mtp_flag: str = "--mtp-num-layers",
) -> ResolvedSparsity:
    """See SparsityConfig.resolve. source: where the masks' relative paths start, and what errors name."""
    for flag, value, least, most in (
        (layers_flag, num_layers, 1, MOST_LAYERS),
        ("--num-attention-heads", num_heads, 1, MOST_HEADS),
        ("--num-query-groups", num_kv_heads, 1, MOST_HEADS),
        ("--seq-length", seq_length, 1, MOST_SEQ_LENGTH),
        (mtp_flag, mtp_num_layers, 0, MOST_LAYERS),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{flag} {shown(value)}: expected an integer, {least} to {most}")
        if value < least:
            raise ValueError(f"{flag} {shown(value)}: expected {least} or more")
        if value > most:
            raise ValueError(f"{flag} {shown(value)}: expected at most {most}")
    if (num_layers + mtp_num_layers) * num_heads > MOST_LAYER_HEADS:
        raise ValueError(
            f"{layers_flag} {num_layers} with --num-attention-heads {num_heads}: expected at most {MOST_LAYER_HEADS} "
            "heads in all layers together; use fewer"
        )
    if num_heads % num_kv_heads:
        near = [groups for groups in range(num_heads, 0, -1) if num_heads % groups == 0]
        best = min(near, key=lambda groups: abs(groups - num_kv_heads))
        raise ValueError(
            f"--num-attention-heads {num_heads} is not a multiple of --num-query-groups {num_kv_heads}: every KV head "
            f"needs the same number of query heads; nearest valid: --num-query-groups {best}"
        )
    plan = _tiled_plan(config, source, "layers", layers_flag, num_layers)
    mtp_plan = _mtp_plan(config, source, mtp_flag, mtp_num_layers)

    for name in dict.fromkeys((*plan, *mtp_plan)):
        if name != "D":
            _check_strides(config, source, name, seq_length)
    built = _Patterns(config, source, num_heads, num_kv_heads, seq_length)
    layers = tuple(LayerSparsity(name, built.next_of(name)) for name in plan)
    # The ordinals run on into the multi-token-prediction layers, which follow the decoder's.
    mtp_layers = tuple(LayerSparsity(name, built.next_of(name)) for name in mtp_plan)

    notes = [
        f"specs.{name} is in no plan: unused"
        for name in config.specs
        if name not in (*plan, *(config.mtp_layers or ()))
    ]
    for name, pattern in {
        layer.spec: layer.pattern for layer in (*layers, *mtp_layers) if layer.pattern is not None
    }.items():
        if pattern.density(seq_length) == 1:
            notes.append(_dense_note(name, config.specs[name], config.block_size, seq_length))
    return ResolvedSparsity(
        layers, mtp_layers, config.softmax_scale, config.block_size, num_heads, num_kv_heads, seq_length, tuple(notes)
    )


def _check_strides(config: S2Config, source: Source, name: str, seq_length: int) -> None:
    """Refuses a stride that is longer than the sequence: most often it was meant in tokens."""
    spec, size = config.specs[name], config.block_size
    blocks = -(-seq_length // size)
    strides = [(("specs", name, "stride"), spec.stride)] if spec.stride is not None else []
    strides += [(("specs", name, "ranges", i, "stride"), item.stride) for i, item in enumerate(spec.ranges or ())]
    problems = []
    for path, stride in strides:
        if stride > blocks and stride > 1:
            meant = stride // size
            fix = (
                f"{meant}, if {stride} was meant in tokens: strides count blocks of {size} tokens"
                if stride % size == 0 and 1 < meant <= blocks
                else f"{blocks}, or a longer sequence"
            )
            got = f"{stride}, longer than the {blocks} blocks of --seq-length {seq_length}"
            problems.append(Problem(path, got, f"a stride in blocks, at most {blocks} in this sequence", fix))
    if problems:
        raise source.error(*problems)


def _dense_note(name: str, spec: SpecConfig, block_size: int, seq_length: int) -> str:
    text = f"spec {name} attends everything in a sequence of {seq_length} tokens: it is DENSE attention here"
    ranges = spec.block_ranges(block_size)
    if ranges is None:
        return f"{text}; its {'mask' if spec.mask is not None else 'function'} leaves out nothing"
    if spec.window is not None:
        shortest = spec.window if isinstance(spec.window, int) else min(spec.window)
        if shortest >= seq_length:
            return f"{text}; its window of {shortest} tokens is no shorter"
    elif ranges[0][0] is not None and ranges[0][0] * block_size >= seq_length:
        return f"{text}; its window of {ranges[0][0] * block_size} tokens is no shorter"
    end = ranges[-1][0] if ranges else 0
    if all(stride == 1 for _, stride in ranges) and (end is None or end * block_size >= seq_length):
        return f"{text}; its strides are 1"
    parts = "window, strides and sink together" if spec.sink_tokens else "strides"
    return f"{text}; all its heads are dense, or its {parts} leave out nothing"


def _tiled_plan(config: S2Config, source: Source, key: str, flag: str, count: int) -> list[str]:
    plan = list(getattr(config, key))
    if count % len(plan) == 0:
        return plan * (count // len(plan))
    divisors = [length for length in range(1, count + 1) if count % length == 0]
    below = max((length for length in divisors if length < len(plan)), default=None)
    above = min((length for length in divisors if length > len(plan)), default=None)
    lengths = " or ".join(str(length) for length in (below, above) if length)
    rounds = count // len(plan)
    counts = " or ".join(str(n * len(plan)) for n in (rounds, rounds + 1) if n)
    raise source.error(
        Problem(
            (key,),
            f"{shown(getattr(config, key))}, {len(plan)} names, for {flag} {count}",
            f"a plan whose length is {count} or divides it",
            f"a plan of {lengths} names, or {counts} of these layers"
            if flag.endswith(":")
            else f"a plan of {lengths} names, or {flag} {counts}",
        )
    )


def _mtp_plan(config: S2Config, source: Source, flag: str, count: int) -> list[str]:
    if count == 0:
        return []
    if config.mtp_layers is None:
        names = ["D", *config.specs]
        raise source.error(
            Problem(
                ("mtp_layers",),
                f"nothing, and a model with {flag} {count}",
                f"the plan of the multi-token-prediction layers, of {', '.join(names)}",
                " or ".join(f"mtp_layers: {n}" for n in names[:2]),
            )
        )
    return _tiled_plan(config, source, "mtp_layers", flag, count)


class _Patterns:
    """Builds the patterns of a model. Layers with the same attention get the same object, so that they can share their
    layout."""

    def __init__(self, config: S2Config, source: Source, num_heads: int, num_kv_heads: int, seq_length: int):
        self.config, self.source, self.seq_length = config, source, seq_length
        self.shape = {"block_size": config.block_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        self.ordinals: dict[str, int] = {}
        self.fixed: dict[str, Pattern] = {}  # masks and functions: one pattern for all layers of the spec
        self.shared: dict[str, Pattern] = {}

    def next_of(self, name: str) -> Pattern | None:
        """The pattern of the next layer of a spec; None for D."""
        if name == "D":
            return None
        ordinal = self.ordinals.get(name, 0)
        self.ordinals[name] = ordinal + 1
        spec = self.config.specs[name]
        if spec.block_ranges(self.config.block_size) is not None:
            pattern = self._from_ranges(name, spec, ordinal)
        else:
            if name not in self.fixed:
                self.fixed[name] = (
                    self._from_mask(name, spec) if spec.mask is not None else self._from_function(name, spec)
                )
            pattern = self.fixed[name]
        return self.shared.setdefault(json.dumps(canonical_pattern(pattern), sort_keys=True), pattern)

    def _from_ranges(self, name: str, spec: SpecConfig, ordinal: int) -> Pattern:
        kv_heads = self.shape["num_kv_heads"]
        heads = spec.dense_heads
        if isinstance(heads, dict):
            ((kind, count),) = heads.items()
            wrong, fix = count > kv_heads, f"{{{kind}: {kv_heads}}}"
        else:
            wrong, fix = any(head >= kv_heads for head in heads), str([head for head in heads if head < kv_heads])
        if wrong:
            raise self.source.error(
                Problem(
                    ("specs", name, "dense_heads"),
                    shown(heads) if not isinstance(heads, dict) else f"{{{kind}: {count}}}",
                    f"KV heads of a model with --num-query-groups {kv_heads}",
                    fix,
                )
            )
        if isinstance(spec.window, tuple) and len(spec.window) != kv_heads:
            raise self.source.error(
                Problem(
                    ("specs", name, "window"),
                    f"{len(spec.window)} windows",
                    f"one for each KV head of a model with --num-query-groups {kv_heads}, or one number for all",
                    str(max(spec.window)),
                )
            )
        return make_range_pattern(
            **self.shape,
            ranges=spec.block_ranges(self.config.block_size),
            slide=spec.slide,
            head_step=spec.head_step,
            base_offset=spec.base_offset,
            layer_index=ordinal,
            layer_step=spec.layer_step,
            dense_heads=heads,
            window=spec.window,
            sink_tokens=spec.sink_tokens,
        )

    def _from_mask(self, name: str, spec: SpecConfig) -> Pattern:
        key = ("specs", name, "mask")
        file = self.source.folder / spec.mask
        found = not_a_file(file)
        if found is not None:
            near = nearest_name(file.name, neighbours(file, "*.npz"))
            raise self.source.error(
                Problem(
                    key,
                    f"{shown(spec.mask)}, but {file} "
                    + ("does not exist" if found == "no such file" else f"is {found}"),
                    "a file, relative to the YAML's folder",
                    near or "the path of an existing .npz",
                )
            )
        heads, kv_heads = self.shape["num_heads"], self.shape["num_kv_heads"]
        try:
            indptr, indices = read_mask(file, tuple(dict.fromkeys((1, kv_heads, heads))))
        except ValueError as error:
            raise self.source.error(
                Problem(
                    key,
                    f"{printable(file, 120)}, which cannot be read: {error}",
                    f"{NPZ_FORMAT}, P being 1, --num-query-groups {kv_heads} or --num-attention-heads {heads}",
                    "numpy.savez(file, indptr=..., indices=...)",
                )
            ) from error
        blocks, needed = indptr.shape[1] - 1, -(-self.seq_length // self.config.block_size)
        if blocks < needed:
            size = self.config.block_size
            raise self.source.error(
                Problem(
                    key,
                    f"{file} with {blocks} query blocks of {size}",
                    f"{needed} or more for --seq-length {self.seq_length}",
                    f"--seq-length {blocks * size}, or a larger mask",
                )
            )
        pieces = np.split(indices, np.cumsum(indptr[:-1, -1].astype(np.int64)))
        try:
            return BlockMaskPattern.from_csr(self.shape["block_size"], heads, kv_heads, list(indptr), pieces)
        except ValueError as error:
            raise self.source.error(
                Problem(
                    key,
                    f"{file}: {error}",
                    "ascending key blocks, none after the query block, at least one a row",
                    "correct the file",
                )
            ) from error

    def _from_function(self, name: str, spec: SpecConfig) -> Pattern:
        key = ("specs", name, "function")
        module_name, _, function_name = spec.function.partition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # a module from elsewhere may raise anything
            missing = isinstance(error, ModuleNotFoundError)
            why = f"there is no module {error.name!r}" if missing else f"importing it raises {_named(error)}"
            raise self.source.error(
                Problem(
                    key,
                    f"{shown(spec.function)}, but {why}",
                    "module:function that Python can import",
                    "add the module's folder to PYTHONPATH" if missing else "correct the module",
                )
            ) from error
        function = getattr(module, function_name, None)
        if not callable(function):
            names = [
                candidate
                for candidate in vars(module)
                if callable(getattr(module, candidate)) and not candidate.startswith("_")
            ]
            raise self.source.error(
                Problem(
                    key,
                    f"{shown(spec.function)}, but {module_name} has no function {function_name}",
                    "a function f(head, query_block, key_blocks) -> bool[]",
                    f"{module_name}:{nearest_name(function_name, names) or (names or ['my_function'])[0]}",
                )
            )
        blocks = -(-self.seq_length // self.config.block_size)
        calls = blocks * self.shape["num_heads"]
        if calls > MOST_FUNCTION_CALLS:
            raise self.source.error(
                Problem(
                    key,
                    f"{calls:,} calls, one for each head and query block of --seq-length {self.seq_length}",
                    f"at most {MOST_FUNCTION_CALLS:,} calls of a Python pattern",
                    "save the pattern as an .npz and use `mask`",
                )
            )
        try:
            return BlockMaskPattern.from_function(**self.shape, num_blocks=blocks, function=function)
        except Exception as error:  # so may its function
            detail = str(error) if type(error) is ValueError else _named(error)
            raise self.source.error(
                Problem(
                    key,
                    f"{shown(spec.function)}: {detail}",
                    "bool[query_block + 1], causal, with at least one true a row",
                    "correct the function",
                )
            ) from error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {printable(error, 120)}"
