"""The JSON Schema that editors use is the one of the present config, and it describes it."""

import json
import re
from pathlib import Path

import pytest
import yaml

from s2_megatron.config import schema as config
from s2_megatron.config.load import SparsityConfig
from s2_megatron.config.schema import RangeConfig, S2Config, SpecConfig, json_schema
from s2_megatron.tools import commands
from s2_megatron.tools import schema as schema_tool

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "configs" / "s2.schema.json"
REFRESH = "run: s2-megatron schema --write"


def test_committed_schema_is_current():
    assert json.loads(COMMITTED.read_text()) == json_schema(), REFRESH
    assert COMMITTED.read_text() == config.schema_text(), REFRESH


@pytest.mark.parametrize("model", [S2Config, SpecConfig, RangeConfig])
def test_schema_documents_every_key_and_no_other(model):
    schema = json_schema()
    part = schema if model is S2Config else schema["$defs"][model.__name__]
    assert set(part["properties"]) == set(model.model_fields)
    assert part["additionalProperties"] is False
    for name, entry in part["properties"].items():
        assert len(entry["description"]) > 10, name
        assert "\n" not in entry["description"], "editors show the line breaks of the source"


def matches(value, schema, root):
    """A JSON Schema validator for the words that the schema uses, so that the test needs no package."""
    if "$ref" in schema:
        return matches(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    known = {
        "title", "description", "default", "examples", "$schema", "$defs", "type", "properties", "required", "items",
        "enum", "const", "additionalProperties", "anyOf", "oneOf", "minimum", "exclusiveMinimum", "minItems",
        "minLength", "uniqueItems", "pattern", "maximum", "maxLength", "maxItems", "maxProperties",
    }  # fmt: skip
    assert set(schema) <= known
    types = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}
    if "type" in schema and (not isinstance(value, types[schema["type"]]) or isinstance(value, bool)):
        return False
    checks = [
        "enum" not in schema or value in schema["enum"],
        "const" not in schema or value == schema["const"],
        "anyOf" not in schema or any(matches(value, option, root) for option in schema["anyOf"]),
        "oneOf" not in schema or sum(matches(value, option, root) for option in schema["oneOf"]) == 1,
    ]
    if isinstance(value, int | float):
        checks += [value <= schema.get("maximum", value)]
        checks += [value >= schema.get("minimum", value), value > schema.get("exclusiveMinimum", value - 1)]
    if isinstance(value, str | list | dict):
        word = {str: "maxLength", list: "maxItems", dict: "maxProperties"}[type(value)]
        checks += [len(value) <= schema.get(word, len(value))]
    if isinstance(value, str):
        checks += [len(value) >= schema.get("minLength", 0), re.search(schema.get("pattern", ""), value) is not None]
    if isinstance(value, list):
        checks += [len(value) >= schema.get("minItems", 0)]
        checks += [matches(item, schema.get("items", {}), root) for item in value]
        checks += [not schema.get("uniqueItems") or len({str(item) for item in value}) == len(value)]
    if isinstance(value, dict):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        checks += [name in value for name in schema.get("required", ())]
        for name, item in value.items():
            part = properties.get(name, rest)
            checks.append(part is not False and matches(item, part, root))
    return all(checks)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_satisfy_it(path):
    schema = json_schema()
    assert matches(yaml.safe_load(path.read_text()), schema, schema)


@pytest.mark.parametrize("text", [
    "layers: D\nblok: 1", "block_size: 64", "layers: 5", "layers: D\nblock_size: 60", "layers: S\nspecs: {S: {}}",
    "layers: S\nspecs: {S: {local_blocks: 1, mask: a.npz}}", "layers: S\nspecs: {S: {local_blocks: 0}}",
    "layers: S\nspecs: {S: {local_blocks: 1, slide: q}}",
    "layers: S\nspecs: {S: {local_blocks: 1, dense_heads: {first: 1}}}",
    "layers: S\nspecs: {S: {local_blocks: 1, stride: 16777217}}",
    "layers: S\nspecs: {S: {local_blocks: 1, base_offset: -16777217}}",
    f"layers: {'S' * 4097}\nspecs: {{S: {{local_blocks: 1}}}}",
    f"layers: [{'S,' * 4097}]\nspecs: {{S: {{local_blocks: 1}}}}",
    "layers: S\nspecs: {S: {local_blocks: 1, head_step: papr}}", "layers: S\nspecs: {S: {ranges: [{end_blocks: 1}]}}",
])  # fmt: skip
def test_it_refuses_what_the_config_refuses(text):
    schema, data = json_schema(), yaml.safe_load(text)
    assert not matches(data, schema, schema)
    with pytest.raises(ValueError):
        SparsityConfig.from_data(data)


@pytest.mark.parametrize("text", [
    "layers: [D, wide]\nspecs: {wide: {local_blocks: 1}}", "layers: D\nmtp_layers: D\nsoftmax_scale: 1",
    "layers: S\nspecs: {S: {local_blocks: 1, stride: 2, head_step: 3, layer_step: 0, dense_heads: 2, base_offset: -1}}",
    "layers: S\nspecs: {S: {ranges: [{end_blocks: 1, stride: 1}, {stride: 4}], dense_heads: [0], head_step: paper}}",
])  # fmt: skip
def test_it_accepts_what_the_config_accepts(text):
    schema, data = json_schema(), yaml.safe_load(text)
    SparsityConfig.from_data(data)
    assert matches(data, schema, schema)


def test_the_command_prints_it_and_writes_what_a_checkout_has_of_it(tmp_path, capsys, monkeypatch):
    assert commands.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    monkeypatch.setattr(schema_tool, "CHECKOUT", tmp_path)
    assert commands.main(["schema", "--write"]) == 2
    assert "run it from a checkout of this project" in capsys.readouterr().err
    for folder in ("configs", "docs"):
        (tmp_path / folder).mkdir()
    assert commands.main(["schema", "--write"]) == 0
    for name in ("configs/s2.schema.json", "docs/configuration.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), REFRESH
