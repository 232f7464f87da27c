"""From a checked config and a model's shape to one Pattern per layer."""

from __future__ import annotations

import importlib
import json
import zipfile

import numpy as np

from s2_megatron.config.errors import Problem, Source, nearest_name, shown
from s2_megatron.config.schema import S2Config, SpecConfig
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity, canonical_pattern
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import Pattern, make_range_pattern

NPZ_FORMAT = "an .npz with the integer arrays `indptr` ([n+1] or [P, n+1]) and `indices`"


def resolve_config(
    config: S2Config,
    source: Source,
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    seq_length: int,
    mtp_num_layers: int,
) -> ResolvedSparsity:
    """See SparsityConfig.resolve. source: where the masks' relative paths start, and what errors name."""
    for flag, value in (
        ("--num-layers", num_layers),
        ("--num-attention-heads", num_heads),
        ("--num-query-groups", num_kv_heads),
        ("--seq-length", seq_length),
    ):
        if value < 1:
            raise ValueError(f"{flag} {value}: expected 1 or more")
    if num_heads % num_kv_heads:
        near = [groups for groups in range(num_heads, 0, -1) if num_heads % groups == 0]
        best = min(near, key=lambda groups: abs(groups - num_kv_heads))
        raise ValueError(
            f"--num-attention-heads {num_heads} is not a multiple of --num-query-groups {num_kv_heads}: every KV head "
            f"needs the same number of query heads; nearest valid: --num-query-groups {best}"
        )
    plan = _tiled_plan(config, source, "layers", "--num-layers", num_layers)
    mtp_plan = _mtp_plan(config, source, mtp_num_layers)

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
            length = f"a sequence of {seq_length} tokens"
            notes.append(f"spec {name} attends everything in {length}: its window is no shorter or its strides are 1")
    return ResolvedSparsity(
        layers, mtp_layers, config.softmax_scale, config.block_size, num_heads, num_kv_heads, seq_length, tuple(notes)
    )


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
            f"a plan of {lengths} names, or {flag} {counts}",
        )
    )


def _mtp_plan(config: S2Config, source: Source, count: int) -> list[str]:
    if count == 0:
        return []
    if config.mtp_layers is None:
        names = ["D", *config.specs]
        raise source.error(
            Problem(
                ("mtp_layers",),
                f"nothing, and a model with --mtp-num-layers {count}",
                f"the plan of the multi-token-prediction layers, of {', '.join(names)}",
                " or ".join(f"mtp_layers: {n}" for n in names[:2]),
            )
        )
    return _tiled_plan(config, source, "mtp_layers", "--mtp-num-layers", count)


def _array_text(name: str, array: np.ndarray) -> str:
    return f"{name} {array.dtype}{list(array.shape)}"


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
        return make_range_pattern(
            **self.shape,
            ranges=spec.block_ranges(self.config.block_size),
            slide=spec.slide,
            head_step=spec.head_step,
            base_offset=spec.base_offset,
            layer_index=ordinal,
            layer_step=spec.layer_step,
            dense_heads=heads,
        )

    def _from_mask(self, name: str, spec: SpecConfig) -> Pattern:
        key = ("specs", name, "mask")
        file = self.source.folder / spec.mask
        if not file.is_file():
            near = (
                nearest_name(file.name, [path.name for path in file.parent.glob("*.npz")])
                if file.parent.is_dir()
                else None
            )
            raise self.source.error(
                Problem(
                    key,
                    f"{spec.mask!r}, but {file} does not exist",
                    "a file, relative to the YAML's folder",
                    near or "the path of an existing .npz",
                )
            )
        try:
            with np.load(file, allow_pickle=False) as arrays:
                indptr, indices = np.atleast_2d(arrays["indptr"]), arrays["indices"]
        except (ValueError, TypeError, KeyError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
            raise self.source.error(
                Problem(
                    key,
                    f"{file}, which cannot be read ({error})",
                    NPZ_FORMAT,
                    "numpy.savez(file, indptr=..., indices=...)",
                )
            ) from error
        heads, kv_heads = self.shape["num_heads"], self.shape["num_kv_heads"]
        if indptr.ndim != 2 or len(indptr) not in (1, kv_heads, heads):
            allowed = dict.fromkeys((1, kv_heads, heads))
            raise self.source.error(
                Problem(
                    key,
                    f"{file} with indptr of shape {list(indptr.shape)}",
                    f"[n+1] or [P, n+1], P being 1, --num-query-groups {kv_heads} or --num-attention-heads {heads}",
                    f"P = {min(allowed, key=lambda count: abs(count - len(indptr)))}",
                )
            )
        if indptr.dtype.kind not in "iu" or indices.ndim != 1 or int(indptr[:, -1].sum()) != len(indices):
            raise self.source.error(
                Problem(
                    key,
                    f"{file} with {_array_text('indptr', indptr)} and {_array_text('indices', indices)}",
                    f"{NPZ_FORMAT}, one index for each count in the last column of indptr",
                    "indices of all P heads one after the other, each indptr row from 0",
                )
            )
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
        pieces = np.split(indices, np.cumsum(indptr[:-1, -1]))
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
        except ModuleNotFoundError as error:
            raise self.source.error(
                Problem(
                    key,
                    f"{spec.function!r}, but there is no module {error.name!r}",
                    "module:function that Python can import",
                    "add the module's folder to PYTHONPATH",
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
                    f"{spec.function!r}, but {module_name} has no function {function_name}",
                    "a function f(head, query_block, key_blocks) -> bool[]",
                    f"{module_name}:{nearest_name(function_name, names) or (names or ['my_function'])[0]}",
                )
            )
        try:
            return BlockMaskPattern.from_function(
                **self.shape, num_blocks=-(-self.seq_length // self.config.block_size), function=function
            )
        except ValueError as error:
            raise self.source.error(
                Problem(
                    key,
                    f"{spec.function!r}: {error}",
                    "bool[query_block + 1], causal, with at least one true a row",
                    "correct the function",
                )
            ) from error
