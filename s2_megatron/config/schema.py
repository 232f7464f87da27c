"""The sparsity YAML: which attention pattern every layer of a model has. Model flags do not belong here, they stay in
the launcher.

    block_size: 64
    layers: DSSS                # one letter a layer, tiled over the model; D is dense
    specs:
      S: {local_tokens: 1024, stride: 16}

`python -m s2_megatron.config.schema --write-schema` regenerates configs/s2.schema.json, with which editors check and
complete such files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from s2_megatron.config.checks import (
    check_dense_heads,
    check_head_step,
    check_layer_step,
    check_plan,
    meaning_problems,
    pydantic_problems,
)
from s2_megatron.config.errors import ConfigError, Problem, read_yaml
from s2_megatron.config.resolve import resolve_config
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity, diff_sparsity, tensor_parallel_balance
from s2_megatron.patterns.ranges import Ranges

__all__ = [
    "ConfigError",
    "LayerSparsity",
    "RangeConfig",
    "ResolvedSparsity",
    "S2Config",
    "SpecConfig",
    "diff_sparsity",
    "json_schema",
    "load_config",
    "tensor_parallel_balance",
]

SCHEMA_FILE = Path(__file__).resolve().parents[2] / "configs" / "s2.schema.json"


_COUNT = {"type": "integer", "minimum": 0}
Plan = Annotated[
    str | tuple[str, ...],
    PlainValidator(check_plan),
    WithJsonSchema(
        {
            "oneOf": [
                {"type": "string", "pattern": "^[A-Za-z]+$"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ]
        }
    ),
]
HeadStep = Annotated[
    str | int, PlainValidator(check_head_step), WithJsonSchema({"oneOf": [{"enum": ["auto", "paper"]}, _COUNT]})
]
LayerStep = Annotated[
    str | int, PlainValidator(check_layer_step), WithJsonSchema({"oneOf": [{"enum": ["auto"]}, _COUNT]})
]
DenseHeads = Annotated[
    tuple[int, ...] | dict[str, int],
    PlainValidator(check_dense_heads),
    WithJsonSchema(
        {
            "oneOf": [
                {"type": "array", "items": _COUNT, "uniqueItems": True},
                _COUNT,
                *(
                    {"type": "object", "properties": {kind: _COUNT}, "required": [kind], "additionalProperties": False}
                    for kind in ("last", "spread")
                ),
            ]
        }
    ),
]
Positive = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


class RangeConfig(_Strict):
    """Distances up to an end, with the stride at which key blocks are kept there."""

    end_tokens: Positive | None = Field(None, examples=[1024])
    """Where the range ends, in tokens of distance; a multiple of block_size. The last range may leave it out: no
    limit."""
    end_blocks: Positive | None = Field(None, examples=[16])
    """The same in blocks. Give one of the two."""
    stride: Positive = Field(examples=[16])
    """Of every `stride` key blocks one is attended, a different one per head. 1 keeps them all; the first range needs
    1."""


class SpecConfig(_Strict):
    """One kind of attention layer. Give exactly one of: local_tokens or local_blocks (with or without stride), ranges,
    mask, function."""

    local_tokens: Positive | None = Field(None, examples=[1024])
    """Window in which every block is attended, in tokens; a multiple of block_size."""
    local_blocks: Positive | None = Field(None, examples=[16])
    """The same in blocks."""
    stride: Positive | None = Field(None, examples=[16])
    """Beyond the window, one block in `stride` is attended, a different one per head. Left out: the window alone."""
    ranges: Annotated[list[RangeConfig], Field(min_length=1)] | None = Field(
        None, examples=["[{end_tokens: 1024, stride: 1}, {stride: 16}]"]
    )
    """Several strides by distance: the ends grow, the first stride is 1."""
    mask: str | None = Field(None, examples=["mask.npz"], min_length=1)
    """An .npz file, relative to this YAML: `indptr` [n+1] or [P, n+1] and `indices`, compressed sparse rows of key
    blocks for P = 1, KV heads or query heads. The rows of the P heads stand one after the other in `indices`, each
    indptr counts from 0."""
    function: str | None = Field(None, examples=["my_patterns:my_function"], min_length=1)
    """module:function, called as f(head, query_block, key_blocks) -> bool[]; only with --s2-allow-python-patterns."""
    slide: Literal["kv", "query"] = Field("kv", examples=["kv"])
    """Whose number moves the offset: the KV head's (all query heads of a group then share their blocks: less memory
    and traffic) or the query head's."""
    head_step: HeadStep = Field("auto", examples=["auto"])
    """Blocks by which the offset grows from head to head. auto: max(1, last stride // heads that slide); paper: max(1,
    last stride // query heads)."""
    base_offset: int = Field(0, examples=[0])
    """Added to every offset."""
    layer_step: LayerStep = Field("auto", examples=["auto"])
    """Blocks by which the offset grows from one layer of this spec to the next. auto: 0 where one layer's heads cover
    the context, otherwise the step with which consecutive layers cover it soonest."""
    dense_heads: DenseHeads = Field((), examples=["{spread: 1}"])
    """KV heads that attend everything: a list of them, {last: n}, or {spread: n} (n alone means this): evenly over the
    heads, hence over tensor-parallel ranks."""

    def block_ranges(self, block_size: int) -> Ranges | None:
        """((end in blocks or None, stride), ...); None for a mask or a function."""
        if self.ranges is not None:
            return tuple(
                (r.end_blocks if r.end_tokens is None else r.end_tokens // block_size, r.stride) for r in self.ranges
            )
        local = self.local_blocks if self.local_tokens is None else self.local_tokens // block_size
        if local is None:
            return None
        return ((local, 1),) if self.stride is None else ((local, 1), (None, self.stride))


class S2Config(_Strict):
    """Sparsity of a model's attention layers. The model itself (sizes, heads, sequence length) is given by Megatron's
    flags."""

    block_size: Literal[16, 32, 64, 128] = Field(64, examples=[64])
    """Tokens in a block, the unit of sparsity."""
    layers: Plan = Field(examples=["DSSS"])
    """The layer plan: one letter a layer, naming a spec; D is dense. Its length is the number of layers or divides it.
    Or a list of names."""
    mtp_layers: Plan | None = Field(None, examples=["D"])
    """The plan of the multi-token-prediction layers; needed when the model has them."""
    softmax_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(None, examples=[0.125])
    """What all attention scores of the model are multiplied with, dense layers included. Left out: 1/sqrt(head
    dim)."""
    specs: dict[str, SpecConfig] = Field(default_factory=dict, examples=["{S: {local_tokens: 1024, stride: 16}}"])
    """The named specs. A plan written as one word can only name specs of one letter."""

    _source: str = PrivateAttr("<config>")
    _folder: Path = PrivateAttr(Path())
    _lines: dict = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check_meaning(self) -> S2Config:
        problems = meaning_problems(self)
        if problems:
            text = str(ConfigError("settings", problems))
            raise PydanticCustomError("s2_problems", "{text}", {"text": text, "problems": problems})
        return self

    @property
    def source(self) -> str:
        """The file that the config came from."""
        return self._source

    def error(self, *problems: Problem) -> ConfigError:
        """A ValueError about settings of this file."""
        return ConfigError(self._source, problems, self._lines)

    def resolve(
        self, *, num_layers: int, num_heads: int, num_kv_heads: int, seq_length: int, mtp_num_layers: int | None = None
    ) -> ResolvedSparsity:
        """The pattern of every layer of a model (heads and layers global, before any parallel slicing).

        Raises ValueError when the plan does not fit the layers, a mask or function cannot be used, or dense heads do
        not exist.
        """
        return resolve_config(
            self,
            self._folder,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            seq_length=seq_length,
            mtp_num_layers=mtp_num_layers or 0,
        )


def load_config(path: str | Path, *, allow_python_patterns: bool = False) -> S2Config:
    """Reads and checks a sparsity YAML.

    Raises one ValueError for everything that is wrong: file, key, got, expected, nearest valid. A spec with a
    `function` is refused unless allow_python_patterns (--s2-allow-python-patterns): a config from elsewhere must not
    choose what code runs.
    """
    source = str(path)
    data, lines = read_yaml(path)
    try:
        config = S2Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(
            source, pydantic_problems(error, {1: S2Config, 3: SpecConfig, 5: RangeConfig}), lines
        ) from error
    config._source, config._folder, config._lines = source, Path(path).parent, lines
    problems = [
        Problem(
            ("specs", name, "function"),
            f"{spec.function!r}, which runs Python code",
            "no Python pattern without permission",
            "add the flag --s2-allow-python-patterns, or save the pattern as an .npz and use `mask`",
        )
        for name, spec in config.specs.items()
        if spec.function is not None and not allow_python_patterns
    ]
    if problems:
        raise config.error(*problems)
    return config


def json_schema() -> dict:
    """The JSON Schema of the YAML, for editors. configs/s2.schema.json is this."""
    schema = S2Config.model_json_schema()
    spec = schema["$defs"]["SpecConfig"]
    spec["oneOf"] = [{"required": [key]} for key in ("local_tokens", "local_blocks", "ranges", "mask", "function")]
    for part in (schema, *schema["$defs"].values()):
        for entry in (part, *part["properties"].values()):
            # Editors would show the line breaks of this source.
            entry["description"] = " ".join(entry["description"].split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    return json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m s2_megatron.config.schema", description="The JSON Schema of the sparsity YAML."
    )
    parser.add_argument(
        "--write-schema",
        metavar="FILE",
        nargs="?",
        const=SCHEMA_FILE,
        type=Path,
        help="write it to FILE (default: configs/s2.schema.json of the checkout) instead of printing it",
    )
    target = parser.parse_args(arguments).write_schema
    if target is None:
        print(schema_text(), end="")
    elif not target.parent.is_dir():
        parser.error(
            f"--write-schema={target}: the folder {target.parent} does not exist; name a file in an existing folder"
        )
    else:
        target.write_text(schema_text())
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
