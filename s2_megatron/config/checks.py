"""The checks behind the sparsity YAML: settings that must go together, and pydantic's findings as Problems."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

from pydantic import BaseModel, ValidationError

from s2_megatron.config.errors import Problem, nearest_multiples, nearest_name, printable, shown, unknown_name
from s2_megatron.config.schema import KINDS, RangeConfig, S2Config, SpecConfig
from s2_megatron.patterns.checks import LARGEST_SCALE, SMALLEST_SCALE

SPEC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def meaning_problems(config: S2Config) -> list[Problem]:
    """What types alone cannot say: how the settings go together."""
    problems, names = [], {"d": "D"}  # by their letters in lower case
    for name, spec in config.specs.items():
        other = names.setdefault(name.lower(), name)
        if name not in ("D", other):
            what = "the predefined dense spec D" if other == "D" else f"{printable(other)}"
            problems.append(
                Problem(
                    ("specs", name),
                    f"{shown(name)} beside {what}",
                    "names that differ in more than their case",
                    f"another name than {printable(name)}",
                )
            )
        if name == "D":
            problems.append(
                Problem(
                    ("specs", name),
                    "a spec named D",
                    "another name: D is predefined as dense",
                    "rename it, or remove it and use D in the plan",
                )
            )
        elif not SPEC_NAME.fullmatch(name):
            problems.append(
                Problem(
                    ("specs", name),
                    f"the spec name {shown(name)}",
                    "a letter, or a word of letters, digits and _",
                    "S",
                )
            )
        problems += _spec_problems(("specs", name), spec, config.block_size)
    known = list(dict.fromkeys(("D", *config.specs)))
    for key in ("layers", "mtp_layers"):
        plan = getattr(config, key)
        wrong = islice(dict.fromkeys(name for name in plan or () if name not in config.specs and name != "D"), 20)
        problems += [unknown_name((key,), name, known, f"spec in the plan {shown(plan)}") for name in wrong]
    return problems


def _spec_problems(path: tuple, spec: SpecConfig, block_size: int) -> list[Problem]:
    problems = []
    kinds = [key for key in KINDS if getattr(spec, key) is not None]
    one_of = f"exactly one of {', '.join(KINDS)}"
    if len(kinds) != 1:
        given = " and ".join(kinds) or ("stride without a window" if spec.stride is not None else "none of them")
        fix = f"remove {' and '.join(kinds[1:])}" if kinds else f"local_tokens: {16 * block_size}"
        problems.append(Problem(path, given, one_of, fix))
    elif spec.stride is not None and kinds[0] in ("ranges", "mask", "function"):
        fix = "put the stride into the ranges" if kinds == ["ranges"] else "remove it"
        problems.append(
            Problem(
                (*path, "stride"),
                f"{spec.stride} beside {kinds[0]}",
                "stride only beside window, local_tokens or local_blocks",
                fix,
            )
        )
    if kinds in (["mask"], ["function"]):
        for key in ("slide", "head_step", "base_offset", "layer_step", "dense_heads", "sink_tokens"):
            if key in spec.model_fields_set:
                problems.append(
                    Problem(
                        (*path, key),
                        f"{shown(getattr(spec, key))} beside {kinds[0]}",
                        f"{key} only beside ranges or a window; a {kinds[0]} says everything itself",
                        "remove it",
                    )
                )
    if spec.function is not None and not FUNCTION_NAME.fullmatch(spec.function):
        problems.append(
            Problem((*path, "function"), shown(spec.function), "module:function", "my_patterns:my_function")
        )
    if spec.local_tokens is not None:
        problems += _token_problems((*path, "local_tokens"), spec.local_tokens, block_size)
    return problems + _range_problems((*path, "ranges"), spec.ranges or [], block_size)


def _token_problems(path: tuple, tokens: int, block_size: int) -> list[Problem]:
    if tokens % block_size == 0:
        return []
    return [Problem(path, str(tokens), f"a multiple of block_size={block_size}", nearest_multiples(tokens, block_size))]


def _range_problems(path: tuple, ranges: list[RangeConfig], block_size: int) -> list[Problem]:
    problems, previous = [], 0
    if ranges and ranges[0].stride != 1:
        problems.append(
            Problem(
                (*path, 0, "stride"),
                str(ranges[0].stride),
                "1 in the first range, because a token must see its own block",
                "1",
            )
        )
    for index, item in enumerate(ranges):
        here = (*path, index)
        if item.end_tokens is not None and item.end_blocks is not None:
            problems.append(Problem(here, "end_tokens and end_blocks", "one of the two", "remove end_blocks"))
            continue
        if item.end_tokens is None and item.end_blocks is None:
            if index != len(ranges) - 1:
                problems.append(
                    Problem(
                        here,
                        "no end",
                        "end_tokens or end_blocks in every range but the last",
                        f"end_tokens: {(previous + 16) * block_size}",
                    )
                )
            continue
        key, unit = ("end_tokens", block_size) if item.end_blocks is None else ("end_blocks", 1)
        end = getattr(item, key)
        wrong = _token_problems((*here, key), end, unit)
        if not wrong and end <= previous * unit:
            wrong = [
                Problem(
                    (*here, key),
                    str(end),
                    f"more than the range before it, {previous * unit}",
                    str((previous + 1) * unit),
                )
            ]
        problems += wrong
        previous = max(previous, end // unit)
    return problems


_KINDS = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "finite_number": "a finite number",
}


def pydantic_problems(error: ValidationError, models: dict[int, type[BaseModel]]) -> list[Problem]:
    """pydantic's findings as Problems, with the nearest valid value. models: the model of the keys at each depth."""
    problems = []
    for item in error.errors(include_url=False):
        kind, path, value, context = item["type"], tuple(item["loc"]), item["input"], item.get("ctx", {})
        model = models.get(len(path))
        field = model.model_fields.get(path[-1]) if model else None
        example = (
            str(field.examples[0])
            if field is not None and field.examples
            else "{stride: 16}"
            if path[-2:-1] == ("ranges",)
            else "local_tokens: 1024"
        )
        if kind == "s2_value":
            problems.append(Problem(path, shown(value), context["expected"], context["fix"]))
        elif kind == "extra_forbidden":
            problems.append(unknown_name(path, path[-1], model.model_fields, "key"))
        elif kind == "missing":
            problems.append(Problem(path, "nothing", f"the key {path[-1]}", f"{path[-1]}: {example}"))
        elif kind == "literal_error":
            allowed = context["expected"].replace("'", "")
            problems.append(
                Problem(
                    path,
                    shown(value),
                    allowed,
                    _nearest_literal(value, re.findall(r"\w+", allowed.replace(" or ", " "))),
                )
            )
        elif kind == "less_than_equal":
            most = _yaml_text(context["le"])
            problems.append(Problem(path, shown(value), f"at most {most}", most))
        elif kind in ("too_long", "string_too_long"):
            most = context["max_length"]
            problems.append(Problem(path, shown(value), f"a length of at most {most}", "fewer of them"))
        elif kind in ("greater_than_equal", "greater_than"):
            least = _yaml_text(context["ge"]) if "ge" in context else None
            expected = f"more than {context['gt']:g}" if least is None else f"{least} or more"
            problems.append(Problem(path, shown(value), expected, _in_blocks(path, least) or example))
        else:
            expected = _KINDS.get(kind, item["msg"])
            problems.append(Problem(path, shown(value), expected, _in_blocks(path, _as_number(value, kind)) or example))
    return problems


def _in_blocks(path: tuple, number: str | None) -> str | None:
    """The number; None where it counts tokens and is no multiple of 64, the usual block."""
    whole = path[-1:] in (("local_tokens",), ("end_tokens",))
    return None if whole and number is not None and (int(number) < 1 or int(number) % 64) else number


def _nearest_literal(value: Any, allowed: list[str]) -> str:
    try:
        return min(allowed, key=lambda candidate: abs(int(candidate) - float(value)))
    except (TypeError, ValueError):
        return nearest_name(value, allowed) or allowed[0]


def _as_number(value: Any, kind: str) -> str | None:
    """The number that a text or a fraction was probably meant to be, as YAML 1.1 reads a number: with a point in front
    of an exponent, for 1e-05 is a text there. None where no number of this kind can stand."""
    if kind not in ("int_type", "float_type") or not isinstance(value, str | float):
        return None
    try:
        number = float(value)
        if kind == "int_type":
            return str(round(number))
    except (ValueError, OverflowError):
        return None
    # of softmax_scale, the one key for fractions
    return _yaml_text(number) if SMALLEST_SCALE <= number <= LARGEST_SCALE else None


def _yaml_text(number: float) -> str:
    """A number as YAML 1.1 reads it: with a point in front of an exponent."""
    text = repr(number)
    return text if "." in text else text.replace("e", ".0e")
