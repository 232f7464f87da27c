"""The sparsity YAML: which attention pattern every layer of a model has. Model flags do not belong here, they stay in
the launcher.

    block_size: 64
    layers: SSSD                # one letter a layer, tiled over the model; D is dense
    specs:
      S: {local_tokens: 1024, stride: 16}

These are the models alone: config/checks.py says how settings go together, config/load.py reads a file.
`s2-megatron schema --write` regenerates configs/s2.schema.json, with which editors check and complete such files.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from s2_megatron.config.errors import nearest_name, shown
from s2_megatron.patterns.checks import (
    LARGEST_END,
    LARGEST_SCALE,
    LARGEST_STRIDE,
    LARGEST_WINDOW,
    MOST_HEADS,
    MOST_SINK_TOKENS,
    MOST_TOKENS,
    SMALLEST_SCALE,
    Ranges,
)

MOST_PLAN = 4096  # names in a plan
MOST_SPECS = 256
MOST_RANGES = 64
MOST_LETTERS = 4096  # of a path or a function's name


def _wrong(expected: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError(
        "s2_value", "expected {expected}; nearest valid: {fix}", {"expected": expected, "fix": fix}
    )


def _check_plan(value: Any) -> str | tuple[str, ...]:
    expected = "a plan such as SSSD, or a list of spec names such as [D, S]"
    if isinstance(value, bool):
        raise _wrong(f"{expected} (YAML reads NO, ON, YES and OFF as booleans)", "the plan in quotes, e.g. 'NO'")
    if isinstance(value, str | list | tuple) and len(value) > MOST_PLAN:
        raise _wrong(f"at most {MOST_PLAN} names; a plan is tiled over the layers", "the part that repeats, e.g. SSSD")
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise _wrong(expected, "SSSD")


def _check_head_step(value: Any) -> str | int:
    return _check_step(value, ("auto", "paper"))


def _check_layer_step(value: Any) -> str | int:
    return _check_step(value, ("auto",))


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _check_step(value: Any, words: tuple[str, ...]) -> str | int:
    if (isinstance(value, str) and value in words) or _is_count(value, LARGEST_STRIDE):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        near = "0" if value < 0 else str(LARGEST_STRIDE)
    else:
        near = nearest_name(value, words) or words[0]
    raise _wrong(f"{', '.join(words)}, or a number of blocks, 0 or more, at most {LARGEST_STRIDE}", near)


def _check_window(value: Any) -> int | tuple[int, ...]:
    windows = value if isinstance(value, list | tuple) else [value]
    if 1 <= len(windows) <= MOST_HEADS and all(window and _is_count(window, LARGEST_WINDOW) for window in windows):
        return tuple(windows) if isinstance(value, list | tuple) else value
    raise _wrong(f"a number of tokens, 1 to {LARGEST_WINDOW}, or a list with one for each KV head", "1024")


def _check_dense_heads(value: Any) -> tuple[int, ...] | dict[str, int]:
    if _is_count(value, MOST_HEADS):
        return {"spread": value}
    if isinstance(value, list | tuple) and all(_is_count(item, MOST_HEADS - 1) for item in value):
        if len(set(value)) == len(value):
            return tuple(value)
        raise _wrong("a list that names each KV head once", shown(sorted(set(value))).removeprefix("the list "))
    if isinstance(value, dict) and len(value) == 1:
        ((kind, count),) = value.items()
        valid = _is_count(count, MOST_HEADS)
        if kind in ("last", "spread") and valid:
            return value
        near = nearest_name(kind, ("last", "spread")) or "spread"
        raise _wrong(
            f"{{last: n}} or {{spread: n}}, n being 0 or more, at most {MOST_HEADS}",
            f"{{{near}: {count if valid else 1}}}",
        )
    raise _wrong(
        f"a list of KV heads, a number of heads to spread (at most {MOST_HEADS}), {{last: n}} or {{spread: n}}",
        "{spread: 1}",
    )


_STEP = {"type": "integer", "minimum": 0, "maximum": LARGEST_STRIDE}
_HEAD = {"type": "integer", "minimum": 0, "maximum": MOST_HEADS - 1}
_HEADS = {"type": "integer", "minimum": 0, "maximum": MOST_HEADS}
Plan = Annotated[
    str | tuple[str, ...],
    PlainValidator(_check_plan),
    WithJsonSchema(
        {
            "oneOf": [
                {"type": "string", "pattern": "^[A-Za-z]+$", "maxLength": MOST_PLAN},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_PLAN},
            ]
        }
    ),
]
HeadStep = Annotated[
    str | int, PlainValidator(_check_head_step), WithJsonSchema({"oneOf": [{"enum": ["auto", "paper"]}, _STEP]})
]
LayerStep = Annotated[
    str | int, PlainValidator(_check_layer_step), WithJsonSchema({"oneOf": [{"enum": ["auto"]}, _STEP]})
]
DenseHeads = Annotated[
    tuple[int, ...] | dict[str, int],
    PlainValidator(_check_dense_heads),
    WithJsonSchema(
        {
            "oneOf": [
                {"type": "array", "items": _HEAD, "uniqueItems": True},
                _HEADS,
                *(
                    {"type": "object", "properties": {kind: _HEADS}, "required": [kind], "additionalProperties": False}
                    for kind in ("last", "spread")
                ),
            ]
        }
    ),
]
_WINDOW = {"type": "integer", "minimum": 1, "maximum": LARGEST_WINDOW}
Window = Annotated[
    int | tuple[int, ...],
    PlainValidator(_check_window),
    WithJsonSchema({"oneOf": [_WINDOW, {"type": "array", "items": _WINDOW, "minItems": 1, "maxItems": MOST_HEADS}]}),
]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Blocks = Annotated[int, Field(ge=1, le=LARGEST_END)]
Stride = Annotated[int, Field(ge=1, le=LARGEST_STRIDE)]


KINDS = ("window", "local_tokens", "local_blocks", "ranges", "mask", "function")  # of a spec: exactly one


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


class RangeConfig(_Strict):
    """Distances up to an end, with the stride at which key blocks are attended there."""

    end_tokens: Tokens | None = Field(None, examples=[1024])
    """Where the range ends, in tokens of distance; a multiple of block_size. The last range may leave it out: no
    limit."""
    end_blocks: Blocks | None = Field(None, examples=[16])
    """The same in blocks. Give one of the two."""
    stride: Stride = Field(examples=[16])
    """Of every `stride` key blocks one is attended, a different one per head. 1 keeps them all; the first range needs
    1."""


class SpecConfig(_Strict):
    """One kind of attention layer. Give exactly one of: window, local_tokens or local_blocks (these with or without
    stride), ranges, mask, function."""

    window: Window | None = Field(None, examples=[1024])
    """Sliding window in tokens, exactly: query i attends the keys i - window + 1 to i. Any number, or a list with one
    for each KV head."""
    local_tokens: Tokens | None = Field(None, examples=[1024])
    """The S2 paper's window of whole blocks, in tokens; a multiple of block_size. A query sees
    local_tokens - block_size + 1 to local_tokens keys of it."""
    local_blocks: Blocks | None = Field(None, examples=[16])
    """The same in blocks."""
    stride: Stride | None = Field(None, examples=[16])
    """Beyond the window, one block in `stride` is attended, a different one per head. Left out: the window alone. Such
    a block is attended as a whole, also where a window in tokens ends inside of it."""
    sink_tokens: int = Field(0, ge=0, le=MOST_SINK_TOKENS, examples=[4])
    """The first tokens of the sequence, or of each packed document, that every query attends, whatever the rest says:
    attention sinks. Not beside a mask or a function."""
    ranges: Annotated[list[RangeConfig], Field(min_length=1, max_length=MOST_RANGES)] | None = Field(
        None, examples=["[{end_tokens: 1024, stride: 1}, {stride: 16}]"]
    )
    """Several strides by distance: the ends grow, the first stride is 1."""
    mask: str | None = Field(None, examples=["mask.npz"], min_length=1, max_length=MOST_LETTERS)
    """An .npz file, relative to this YAML: `indptr` [n+1] or [P, n+1] and `indices`, compressed sparse rows of key
    blocks for P = 1, KV heads or query heads. The rows of the P heads stand one after the other in `indices`, each
    indptr counts from 0."""
    function: str | None = Field(None, examples=["my_patterns:my_function"], min_length=1, max_length=MOST_LETTERS)
    """module:function, called as f(head, query_block, key_blocks) -> bool[]; only with --s2-allow-python-patterns."""
    slide: Literal["kv", "query"] = Field("kv", examples=["kv"])
    """Whose number moves the offset: the KV head's (all query heads of a group then share their blocks: less memory
    and traffic) or the query head's."""
    head_step: HeadStep = Field("auto", examples=["auto"])
    """Blocks by which the offset grows from head to head. auto: max(1, last stride // heads that slide); paper: max(1,
    last stride // query heads)."""
    base_offset: int = Field(0, ge=-LARGEST_STRIDE, le=LARGEST_STRIDE, examples=[0])
    """Added to every offset."""
    layer_step: LayerStep = Field("auto", examples=["auto"])
    """Blocks by which the offset grows from one layer of this spec to the next. auto: 0 where one layer's heads cover
    the context, otherwise the step with which consecutive layers cover it soonest."""
    dense_heads: DenseHeads = Field((), examples=["{spread: 1}"])
    """KV heads that attend everything: a list of them, {last: n}, or {spread: n} (n alone means this): evenly over the
    heads, hence over tensor-parallel ranks."""

    def block_ranges(self, block_size: int) -> Ranges | None:
        """((end in blocks or None, stride), ...), beside a window in tokens what is attended beyond it; None for a mask
        or a function."""
        if self.ranges is not None:
            return tuple(
                (r.end_blocks if r.end_tokens is None else r.end_tokens // block_size, r.stride) for r in self.ranges
            )
        if self.window is not None:
            return () if self.stride is None else ((None, self.stride),)
        local = self.local_blocks if self.local_tokens is None else self.local_tokens // block_size
        if local is None:
            return None
        return ((local, 1),) if self.stride is None else ((local, 1), (None, self.stride))


class S2Config(_Strict):
    """Sparsity of a model's attention layers. The model itself (sizes, heads, sequence length) is given by Megatron's
    flags."""

    block_size: Literal[16, 32, 64, 128] = Field(64, examples=[64])
    """Tokens in a block, the unit of sparsity."""
    layers: Plan = Field(examples=["SSSD"])
    """The layer plan: one letter a layer, naming a spec; D is dense. Its length is the number of layers or divides it.
    Or a list of names."""
    mtp_layers: Plan | None = Field(None, examples=["D"])
    """The plan of the multi-token-prediction layers; needed when the model has them."""
    softmax_scale: Annotated[float, Field(ge=SMALLEST_SCALE, le=LARGEST_SCALE, allow_inf_nan=False)] | None = Field(
        None, examples=[0.125]
    )
    """What all attention scores of the model are multiplied with, dense layers included. Left out: 1/sqrt(head
    dim)."""
    specs: dict[str, SpecConfig] = Field(
        default_factory=dict, max_length=MOST_SPECS, examples=["{S: {local_tokens: 1024, stride: 16}}"]
    )
    """The named specs. A plan written as one word can only name specs of one letter."""


def json_schema() -> dict:
    """The JSON Schema of the YAML, for editors. configs/s2.schema.json is this."""
    schema = S2Config.model_json_schema()
    spec = schema["$defs"]["SpecConfig"]
    spec["oneOf"] = [{"required": [key]} for key in KINDS]
    for part in (schema, *schema["$defs"].values()):
        for entry in (part, *part["properties"].values()):
            # Editors would show the line breaks of this source.
            entry["description"] = " ".join(entry["description"].split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    return json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"
