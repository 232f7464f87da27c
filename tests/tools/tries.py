"""What an impatient user tries: every option of every command with values that are none, every input file as something
else, every stream closed, full or in another encoding.

The cases are drawn from the commands' own parsers and from the files that their good lines read, so that a new option
and a new file are tried without a line here; a new command has to be given a good line in LINES.
"""

from __future__ import annotations

import argparse
import json
import re
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from s2_megatron.megatron.errors import FAULT

# Values of an option. {loop}: a link to itself. {full}: a disk without room. {work}: an empty folder.
VALUES = {
    "empty": "", "blank": " ", "zero": "0", "huge": str(10**12), "beyond 64 bits": "9" * 30, "negative": "-1",
    "beyond -64 bits": "-" + "9" * 30, "NaN": "nan", "infinite": "inf", "minus infinity": "-inf", "overflow": "1e999",
    "tiny": "1e-320", "no UTF-8": "\udcff\udcfe", "two lines": "a\nb\x1b[31m", "long": "x" * 5000,
    "a loop": "{loop}", "a loop in a path": "{loop}/x", "a folder": "{work}", "a missing path": "{work}/none/x",
    "a path below a file": "{work}/file/x", "a full disk": "{full}/x", "a device": "/dev/full", "a list": "[1, 2]",
}  # fmt: skip
# For options that want a file name with their own suffix, the paths once more.
PATHS = ("{loop}{}", "{loop}/x{}", "{work}/none/x{}", "{full}/x{}", "{work}/file/x{}", "{work}/no\udcff{}")

# What an input file becomes.
CONTENTS = {
    "empty": lambda old: b"",
    "a list": lambda old: b"[1, 2]\n",
    "an object": lambda old: b"{}\n",
    "a number": lambda old: b"1\n",
    "null": lambda old: b"null\n",
    "cut": lambda old: old[: len(old) // 2],
    "a byte less": lambda old: old[:-1],
    "no UTF-8": lambda old: b"\xff\xfe" + old,
    "nested": lambda old: b"[" * 50_000,
    "zeros": lambda old: bytes(len(old)),
    "other values": lambda old: re.sub(rb"\b\d+\b", b"9" * 30, old),
    "words": lambda old: re.sub(rb"\b\d+\b", b'"x"', old),
}
KINDS = (*CONTENTS, "missing", "a folder", "a loop")

STREAMS = (
    "ascii", "C locale", "latin-1", "closed stdin", "closed stdout", "closed stderr", "full stdout", "full stderr",
    "megabytes of stdin", "stdin that is no UTF-8", "empty stdin",
)  # fmt: skip
SIZES = "--num-layers 4 --num-attention-heads 4 --num-query-groups 2 --seq-length 256"
LAUNCH = """
    torchrun pretrain_gpt_s2.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
    --micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --no-persist-layer-norm
    --no-rope-fusion --no-gradient-accumulation-fusion --distributed-backend gloo --num-workers 0
    --no-create-attention-mask-in-dataloader --train-iters 10 --lr 1e-4 --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model {in}/hf --data-path {in}/text --split 50,50,0 --eval-interval 10 --eval-iters 1
    --s2-config {in}/config.yaml --save {out}/save --save-interval 5 --s2-loss-log {out}/losses.jsonl
"""


class Line(NamedTuple):
    """A command line that ends with status 0. words: {in} is the folder of its inputs, {out} of its outputs. inputs:
    names in the lab. every: whether all options of its parser are tried with it, or only those that it has. stdin:
    what it reads. values: how many for each option, where not all."""

    tool: str
    words: str
    inputs: tuple[str, ...] = ()
    every: bool = True
    stdin: str = ""
    values: int = 0


LINES = {
    "inspect": Line("inspect", f"{{in}}/config.yaml {SIZES} --hidden-size 64 --vocab-size 97", ("config.yaml",)),
    "inspect, drawn": Line(
        "inspect",
        f"{{in}}/mask.yaml {SIZES} --context-parallel-size 2 --json --png {{out}}/p.png --context-png {{out}}/c.png "
        "--exchange-png {out}/e.png --layers 1 --blocks 4",
        ("mask.yaml", "mask.npz"),
        every=False,
    ),
    "inspect, a launch line": Line("inspect", f"-- {LAUNCH}", ("config.yaml", "hf"), every=False),
    "inspect, from stdin": Line(
        "inspect", "{in}/config.yaml -- -", ("config.yaml",), every=False, stdin=" ".join(LAUNCH.split())
    ),
    # Megatron's options are hundreds; those of S2-Attention have all values in the line of pretrain.
    "check": Line("check", f"--record -- {LAUNCH}", ("config.yaml", "hf", "text.bin", "text.idx"), values=1),
    "compare": Line("compare", "dense={in}/a.jsonl s2={in}/b.jsonl --json", ("a.jsonl", "b.jsonl")),
    "compare, drawn": Line(
        "compare", "dense={in}/a.jsonl s2={in}/b.jsonl --html {out}/c.html --png {out}/c.png", ("a.jsonl", "b.jsonl"),
        every=False,
    ),
    "choose-dense": Line(
        "choose-dense",
        "--load {in}/dense --s2-config {in}/config.yaml --beside {in}/config.yaml --data-path {in}/text "
        "--split 50,50,0 --sequences 1 --seq-length 64 --write {out}/chosen.yaml --json {out}/measured.json --heads 1",
        ("dense", "config.yaml", "text.bin", "text.idx"),
    ),
    "make-dataset": Line(
        "make-dataset", "--tokenizer {in}/hf --workers 1 --output {out}/data {in}/text.jsonl", ("hf", "text.jsonl")
    ),
    "env-report": Line("env-report", ""),
    "schema": Line("schema", ""),
    "export-pattern": Line(
        "export-pattern", f"{{in}}/mask.yaml {SIZES} --head-dim 2 --output {{out}}/pattern", ("mask.yaml", "mask.npz")
    ),
    "export-pattern, of a model": Line(
        "export-pattern", "--model {in}/hf --head-dim 2 --output {out}/pattern", ("hf",), every=False
    ),
    "import-hf": Line("import-hf", "--input {in}/hf --output {out}/checkpoints", ("hf",)),
    "export-hf": Line(
        "export-hf", "--load {in}/checkpoints --tokenizer {in}/hf --output {out}/hf", ("checkpoints", "hf")
    ),
    "generate": Line(
        "generate", "--load {in}/checkpoints --tokenizer {in}/hf --prompt def --max-new-tokens 2", ("checkpoints", "hf")
    ),
    "generate, from stdin": Line(
        "generate", "--load {in}/checkpoints --tokenizer {in}/hf --prompt - --max-new-tokens 2", ("checkpoints", "hf"),
        every=False, stdin="def ",
    ),
    "quickstart": Line("quickstart", "--config {in}/config.yaml --runs {out}/runs --iterations 4", ("config.yaml",)),
    "pretrain": Line(
        "pretrain", LAUNCH.replace("torchrun pretrain_gpt_s2.py", ""), ("config.yaml", "hf", "text.bin", "text.idx")
    ),
}  # fmt: skip


class Case(NamedTuple):
    """One try: words of the line `line`, with one input file changed (path in {in}, kind) or in other streams."""

    name: str
    line: str
    words: list[str]
    changed: tuple[str, str] | None = None
    stream: str = ""


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options that take a value, by their last spelling, and positional arguments by their dest."""
    return {
        action.option_strings[-1] if action.option_strings else action.dest: action
        for action in parser._actions
        if action.nargs != 0 and not isinstance(action, argparse._SubParsersAction)
    }


def with_value(words: list[str], option: str, value: str) -> list[str]:
    """The line with an option's value replaced, or with the option, before a launch line or behind its script."""
    if option in words:
        at = words.index(option)
        return [*words[: at + 1], value, *words[at + 2 :]]
    return [*words, option, value]


def positional(words: list[str]) -> Iterator[int]:
    """Where a line has words that belong to no option."""
    for at, word in enumerate(words):
        if word == "--":
            return
        if not word.startswith("-") and (at == 0 or not words[at - 1].startswith("-")):
            yield at


def of_options(name: str, line: Line, parser: argparse.ArgumentParser) -> Iterator[Case]:
    """Every option of the line's parser (or of the line) with every value; a launch line's options are its own."""
    words = line.words.split()
    start = words.index("--") + 1 if "--" in words else 0
    head, tail = words[:start], words[start:]
    for option, action in options_of(parser).items():
        if not action.option_strings and tail is words:
            places = list(positional(words))
        elif line.every or option in tail:
            places = [None]
        else:
            places = []
        given = next((value for key, value in pairwise(tail) if key == option), "")
        suffix = Path(given).suffix if "/" in given else ""
        values = VALUES | ({f"{path} as {suffix}": path.replace("{}", suffix) for path in PATHS} if suffix else {})
        for at in places:
            order = sorted(values, key=lambda what: zlib.crc32(f"{option} {what}".encode("utf-8", "replace")))
            for what, value in ((what, values[what]) for what in order[: line.values or None]):
                changed = with_value(tail, option, value) if at is None else [*words[:at], value, *words[at + 1 :]]
                yield Case(f"{name}: {option} {what}", name, [*head, *changed])


def of_files(name: str, line: Line, lab: Path) -> Iterator[Case]:
    for file in line.inputs:
        root = lab / file
        paths = [root] if root.is_file() else [path for path in sorted(root.rglob("*")) if path.is_file()]
        for path in paths:
            for kind in KINDS:
                inside = str(path.relative_to(lab))
                yield Case(f"{name}: {inside} {kind}", name, line.words.split(), (inside, kind))


def of_streams(name: str, line: Line) -> Iterator[Case]:
    for stream in STREAMS:
        yield Case(f"{name}: {stream}", name, line.words.split(), stream=stream)


def change(path: Path, kind: str) -> None:
    """An input file becomes something else."""
    old = path.read_bytes()
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a loop":
        path.symlink_to(path.name)
    elif kind != "missing":
        path.write_bytes(CONTENTS[kind](old))


def some(cases: list[Case], share: int) -> list[Case]:
    """One of every `share` cases, the same every time, and of each subject at least one."""
    by_subject: dict[str, list[Case]] = {}
    for case in cases:
        by_subject.setdefault(f"{case.line}: {subject(case)}", []).append(case)
    chosen = []
    for group in by_subject.values():
        group.sort(key=lambda case: zlib.crc32(case.name.encode("utf-8", "surrogateescape")))
        chosen += group[: max(1, len(group) // share)]
    return chosen


def subject(case: Case) -> str:
    """What a case is about: the file, the streams, or the option; one for all options of which few values are drawn."""
    if case.changed or case.stream:
        return case.changed[0] if case.changed else "streams"
    option = case.name.partition(": ")[2].split(" ")[0]
    return "options" if LINES[case.line].values and option.startswith("-") else option


def mistake(case: Case, result: dict) -> str | None:
    """How a try breaks the rule: it ends soon with status 0 and a result, or with error lines and status 2; nothing is
    left behind that looks complete."""
    status, err = result["status"], result["err"]
    if re.search(r"^(Traceback|Exception ignored|--- Logging error)", err, flags=re.MULTILINE):
        return "a traceback"
    if result["killed"]:
        return f"killed by {result['killed']}: too long, or too much memory"
    if re.search(r"not enough memory|Unable to allocate|can't allocate memory|Cannot allocate", err):
        return "memory"
    lines = err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    silent = case.stream in ("closed stderr", "full stderr")
    if status == 2:
        if not errors and not silent:
            return "status 2 without an error line"
        if FAULT in err:
            return "a fault of this package"
        if len(errors) > 1 and len(set(errors)) < len(errors):
            return "the same error twice"
        others = [line for line in lines if not line.startswith(("error: ", "  ", "note: ", "warning: ", "wrote "))]
        others = [line for line in others if not re.search(r"Warning: ", line)]  # Python's own, of libraries
        if others and "No space left" not in err:  # which may be found after the work, and what was said of it
            return f"a line beside the error: {others[0]!r}"
        if not re.search(r"expected|give|correct|use|see|remove|free|name|make|load", err) and not silent:
            return "an error line without a remedy"
        if any(len(line) > 2500 for line in lines):
            return "an error line of a page"
        several = LINES[case.line].tool in ("compare", "choose-dense", "inspect")  # files, each of which is complete
        if result["left"] and not case.stream and (result["incomplete"] or not several):
            return f"files are left: {result['left']}"
        return None
    if status == 1 and LINES[case.line].tool in ("compare", "choose-dense") and lines and not errors:
        return None
    if status != 0:
        return f"status {status}"
    if errors:
        return "status 0 and an error line"
    if case.stream == "closed stdout" or (case.stream and not result["out"] and silent):
        return None
    if not result["out"].strip():
        return "status 0 and nothing said"
    if result["should write"] and not result["left"]:
        return "status 0 and nothing written"
    return result["incomplete"]


def incomplete(files: list[Path]) -> str | None:
    """What a file that a command wrote, which ended well, lacks."""
    for path in files:
        content = path.read_bytes()
        try:
            if path.suffix == ".json":
                json.loads(content)
            elif path.suffix == ".png":
                assert content.startswith(b"\x89PNG") and b"IEND" in content[-12:]
            elif path.suffix == ".html":
                assert content.rstrip().endswith(b"</html>")
        except (ValueError, AssertionError):
            return f"{path.name} is not complete"
    return None
