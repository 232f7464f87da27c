"""What the texts name exists: files, links, anchors, flags, tests, make targets, commands; and no prose line is too
long."""

from __future__ import annotations

import argparse
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")),
        *(ROOT / folder / "NOTES.md" for folder in ("benchmarks", "tests", "studies")),
        *(ROOT / "examples" / "README.md", ROOT / "studies" / "README.md"),
    ],
    key=lambda path: path.as_posix(),
)
# Texts about versions that are gone: their commands and flags are those of the past.
PAST = {"CHANGELOG.md", "benchmarks/NOTES.md", "tests/NOTES.md"}
# Folders that a run or a build makes.
MADE = ("runs/", "dist/", "build/", ".venv")
SUFFIXES = (".py", ".md", ".yaml", ".json", ".sh", ".sbatch", ".png", ".toml", ".cff")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def parametrized(pages):
    return pytest.mark.parametrize("page", pages, ids=name_of)


@cache
def tracked() -> frozenset[str]:
    """Every file of the repository; in a checkout without git (an sdist), every file that lies there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        return frozenset(name for name in listed.stdout.splitlines() if (ROOT / name).exists())
    return frozenset(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())


def without_code(text: str) -> str:
    """Fenced blocks replaced by empty lines, so that line numbers stay."""
    return re.sub(r"^( *)```.*?^\1```", lambda found: "\n" * found[0].count("\n"), text, flags=re.M | re.S)


def code_spans(text: str) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_code(text))]


def code_lines(text: str) -> list[str]:
    """Lines of fenced blocks, continued ones joined, and the code spans."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, flags=re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()] + code_spans(text)


def paths_in(line: str) -> set[str]:
    """Words that look like a file of this repository: a path below one of its folders, or a file name with one of
    SUFFIXES. Placeholders (<...>, *) and absolute paths are none."""
    folders = {name.split("/")[0] for name in tracked() if "/" in name}
    found = set()
    line = re.sub(r"--(?:json|png|exchange-png|out) \S+", "", line)  # what a command writes need not be there yet
    for word in re.split(r"[\s,;()'\"=|]+", line):
        word = word.removeprefix("./").rstrip(".:/")
        if re.search(r"[*<>{}$]|\.\.\.", word) or word.startswith(("/", "--", "http")) or word.startswith(MADE):
            continue
        if "/" in word and word.split("/")[0] in folders:
            found.add(word.partition("::")[0])
        elif "/" not in word and word.endswith(SUFFIXES) and word not in SUFFIXES:
            found.add(word)
    return found


# Names that the texts give to files of the reader, of Megatron, or of a past commit.
NOT_OURS = {
    "pattern.png", "exchange.png", "table.json", "file.npz", "mask.npz", "my.yaml", "pretrain_gpt.py", "summary.json",
    "pattern.json", "run_status.json", "chosen.yaml", "plan.yaml", "notes.md", "train.sh", "windows.yaml",
    "losses.jsonl", "train.log", "config.json", "metadata.json", "kernels/__init__.py", "s2_megatron/kernels/blackwell",
}  # fmt: skip


def exists(name: str) -> bool:
    """A path from the root, or the name of some file (texts may leave the folder out)."""
    names = tracked()
    return (
        name in names
        or any(other.startswith(f"{name}/") for other in names)
        or ("/" not in name and any(other.endswith(f"/{name}") for other in names))
    )


@parametrized([page for page in PAGES if name_of(page) not in PAST])
def test_files_that_are_named_exist(page):
    lines = code_lines(page.read_text())
    named = {path for line in lines for path in paths_in(line)} - NOT_OURS
    assert not sorted(path for path in named if not exists(path) and not exists(f"docs/{path}"))


def test_the_search_for_files_sees_a_missing_one():
    line = "python benchmarks/nothing.py --from benchmarks/results/x.json --json new.json"
    assert paths_in(line) == {"benchmarks/nothing.py", "benchmarks/results/x.json"}
    assert not exists("benchmarks/nothing.py")
    assert exists("benchmarks/attention.py")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?)\s*$", without_code(page.read_text()), flags=re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


@parametrized(PAGES)
def test_links_resolve(page):
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text()))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@cache
def s2_flags() -> frozenset[str]:
    """The flags that --help shows."""
    from s2_megatron.megatron.arguments import add_s2_arguments

    parser = argparse.ArgumentParser(add_help=False)
    add_s2_arguments(parser)
    return frozenset(flag for action in parser._actions for flag in action.option_strings)


@parametrized([page for page in PAGES if name_of(page) not in PAST])
def test_flags_that_are_named_exist(page):
    named = set(re.findall(r"--s2-[a-z0-9-]*[a-z0-9]", page.read_text()))
    assert not sorted(named - s2_flags())


def test_every_flag_is_explained():
    rows = re.findall(
        r"^\| `(--s2-[a-z0-9-]+)[^|]*\|", (ROOT / "docs" / "launch.md").read_text().replace("\\|", "/"), re.M
    )
    assert sorted(rows) == sorted(s2_flags())


@parametrized([page for page in PAGES if name_of(page) not in PAST])
def test_tests_that_are_named_exist(page):
    sources = "\n".join((ROOT / name).read_text() for name in tracked() if re.fullmatch(r"tests/.*test_\w+\.py", name))
    named = {span for span in code_spans(page.read_text()) if re.fullmatch(r"test_\w+", span)}
    assert not sorted(name for name in named if f"def {name}(" not in sources)


@parametrized([page for page in PAGES if name_of(page) not in PAST])
def test_modules_and_commands_that_are_named_exist(page):
    from s2_megatron.tools.commands import COMMANDS

    lines = code_lines(page.read_text())
    text = "\n".join(lines)
    for module in re.findall(r"-m ((?:s2_megatron|examples|studies|tests)\.[\w.]+)", text):
        assert exists(f"{module.replace('.', '/')}.py"), f"python -m {module}"
    for command in re.findall(r"(?:-m s2_megatron|\bs2-megatron) ([a-z][a-z-]*)", text):
        assert command in COMMANDS, f"s2-megatron {command}"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for target in {found for line in lines for found in re.findall(r"^make ([a-z-]+)", line)}:
        assert target in targets, f"make {target}"
    for line in lines:
        for module, names in re.findall(r"^\+? *from (s2_megatron[\w.]*) import ([\w, ]+)", line):
            imported = __import__(module, fromlist=["names"])
            missing = [name for name in re.split(r", *", names.strip()) if not hasattr(imported, name)]
            assert not missing, f"from {module} import {', '.join(missing)}"


@cache
def options_of(script: str) -> frozenset[str]:
    """The options in a script's source, and in the modules beside it, which may add them."""
    sources = [ROOT / script, *(ROOT / script).parent.glob("*.py")]
    return frozenset(flag for path in sources for flag in re.findall(r"\"(--[a-z][a-z0-9-]*)\"", path.read_text()))


@parametrized([page for page in PAGES if name_of(page) not in PAST | {"docs/validation.md"}])
def test_options_of_our_scripts_exist(page):
    wrong = []
    for line in code_lines(page.read_text()):
        for script, rest in re.findall(r"((?:benchmarks|tests)/[\w/]+\.py)((?: [^|;&`]*)?)", line):
            flags = set(re.findall(r"(?<=\s)(--[a-z][a-z0-9-]*)", rest))
            wrong += [f"{script} {flag}" for flag in sorted(flags - options_of(script))]
    assert not wrong


@parametrized(PAGES)
def test_prose_lines_are_short(page):
    """120 columns, except for tables, commands and lines that are one link."""
    lines = without_code(page.read_text()).splitlines()
    prose = [
        (number, line) for number, line in enumerate(lines, 1) if not re.match(r"\s*\||!?\[[^\]]*\]\([^)]*\)$", line)
    ]
    assert not [number for number, line in prose if len(line) > 120]


def test_every_kernel_file_is_in_the_tour():
    tour = set(re.findall(r"\]\(\.\./s2_megatron/kernels/([\w/.]+)\)", (ROOT / "docs" / "kernels.md").read_text()))
    kernels = ROOT / "s2_megatron" / "kernels"
    files = {path.relative_to(kernels).as_posix() for path in kernels.rglob("*.py")}
    assert not sorted(file for file in files if file not in tour and str(Path(file).parent) not in tour)


def test_every_room_is_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "s2_megatron").glob("*/__init__.py")}
    assert not sorted(room for room in rooms if f"[{room}/](../s2_megatron/{room})" not in text)


def numbers_in(text: str) -> list[str]:
    """Those of the prose and the tables. Code, addresses and names (FA-2, H100, fp8, an arXiv number) do not count."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|arXiv [\d.]+", "", without_code(text))
    return re.findall(r"(?<![A-Za-z\d.,])(?<![A-Za-z]-)\d+(?:[.,]\d+)*", text)


def test_the_search_for_numbers_leaves_code_and_names_out():
    text = "FA-2 on `8` [H100s](x9.md), 1,000 of -0.5 to 2.11.0 (arXiv 2407.17678)\n```\n7\n```\n128K, fp8"
    assert numbers_in(text) == ["1,000", "0.5", "2.11.0", "128"]


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1050 and len(numbers_in(text)) <= 35


MOST_WORDS = {
    "patterns": 1600, "choose-dense": 900, "inference": 1300, "performance": 2000, "validation": 2500,
    "convert": 900, "context_parallel": 1180, "kernels": 1300, "launch": 2000,
}  # fmt: skip


@pytest.mark.parametrize("page, words", MOST_WORDS.items())
def test_pages_are_short(page, words):
    assert len((ROOT / "docs" / f"{page}.md").read_text().split()) <= words
