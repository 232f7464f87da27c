"""docs/configuration.md, written from the schema of the sparsity YAML: `s2-megatron schema --write`."""

from __future__ import annotations

import json
import textwrap

from s2_megatron.config.schema import json_schema

_HEAD = """\
# Configuration

Which keys does a sparsity YAML have, what may they be, and what do they mean?

This page is generated from the schema: `s2-megatron schema --write`. What the patterns look like:
[patterns.md](patterns.md).

A YAML holds the sparsity only; the model's sizes stay in the launcher. The first line lets an editor check and complete
the file:

```yaml
# yaml-language-server: $schema=s2.schema.json
block_size: 64
layers: SSSD              # three layers of the spec S, then a dense one, tiled over the model
specs:
  S:
    local_tokens: 1024    # a window of 16 blocks
    stride: 16            # beyond it one block in 16, another one in each head
```

A mistake is one error with file, key, line, what came, what was expected and the nearest valid value.
`s2-megatron inspect` shows what a YAML means for a model.
"""

_PARTS = (
    ("The file", None, ""),
    (
        "A spec",
        "SpecConfig",
        "Under `specs`, by name. Give exactly one of {one_of}; `stride` may stand beside the first three. The keys "
        "from `slide` on belong to windows and ranges; a mask or a function says everything itself.",
    ),
    (
        "A range",
        "RangeConfig",
        "An entry of the list `ranges` of a spec. Give `end_tokens` or `end_blocks`; the last range may have neither.",
    ),
)

_WORDS = {"integer": "a whole number", "number": "a number", "string": "text"}
_LISTED = {None: "ranges", "string": "names", "integer": "whole numbers"}  # None: items that are models of their own


def _kind(schema: dict) -> str:
    """What a value may be, in words. schema: of one key."""
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = dict.fromkeys(_kind(part) for part in schema[key] if part.get("type") != "null")
            return " or ".join(kinds)
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema:
        return "a mapping"
    kind = schema.get("type")
    if kind == "array":
        return f"a list of {_LISTED[schema.get('items', {}).get('type')]}"
    if kind == "object":
        names = schema.get("properties")
        return " or ".join(f"`{{{name}: n}}`" for name in names) if names else "a mapping from names to specs"
    least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if least is not None and most is not None:
        return f"{_WORDS[kind]}, {least} to {most}"
    if kind in ("integer", "number") and least is not None:
        return f"{_WORDS[kind]}, {'more than 0' if 'exclusiveMinimum' in schema else f'{least} or more'}"
    return _WORDS[kind]


def _default(name: str, schema: dict, required: list[str]) -> str:
    if name in required:
        return "required"
    value = schema.get("default")
    if value is None or value in ([], {}):
        return "-"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def configuration_page() -> str:
    """The text of docs/configuration.md. Every key of the schema has a row: key, allowed values, default, an example
    and its docstring."""
    schema = json_schema()
    text = [_HEAD]
    for title, name, intro in _PARTS:
        part = schema if name is None else schema["$defs"][name]
        one_of = ", ".join(f"`{key}`" for alternative in part.get("oneOf", ()) for key in alternative["required"])
        text.append(f"## {title}\n")
        if intro:
            text.append(textwrap.fill(intro.format(one_of=one_of), 120, break_on_hyphens=False) + "\n")
        text += ["| key | may be | default | example | meaning |", "|---|---|---|---|---|"]
        for key, entry in part["properties"].items():
            example = entry.get("examples", ["-"])[0]
            row = (
                f"`{key}`",
                _kind(entry),
                _default(key, entry, part.get("required", [])),
                f"`{example}`",
                entry["description"],
            )
            text.append("| " + " | ".join(map(_cell, row)) + " |")
        text.append("")
    return "\n".join(text)
