"""Write a page of every study in docs/quality/ from its data, and what follows from them in docs/patterns.md.

    python -m examples.quality.page            # the README.md of each study, its plots, and docs/patterns.md
    python -m examples.quality.page --check    # status 1 when a page is not what the data give

A study's page appears when its data are there. docs/patterns.md is written between its two marks; what stands above and
below them, and docs/quality.md, is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from examples.quality.cells import gap, last, paired, table
from examples.quality.continuations import ALL
from examples.quality.continued_page import draw as draw_continued
from examples.quality.continued_page import section as continued_section
from examples.quality.copies_page import copies_lines
from examples.quality.figures import draw_arms, draw_curves
from examples.quality.gaps_page import decides, gaps_section, noise_lines
from examples.quality.launch import ROOT
from examples.quality.needles_page import needles_lines
from examples.quality.positions import losing_lines, position_lines
from examples.quality.rates_page import given_rate, rates_table
from examples.quality.recall_page import draw as draw_recall
from examples.quality.recall_page import read_tests
from examples.quality.recall_page import section as recall_section
from examples.quality.repeats import section as repeats_section
from examples.quality.results import TIMES_OF, UNTIMED, header
from examples.quality.rules_page import read_findings, recall_folder
from examples.quality.rules_page import section as rules_section
from examples.quality.rules_page import summary as rules_summary
from examples.quality.scales import VARIED, Scale, file_seed, logs_by_seed, read_scales, seed_of, seeds_text
from examples.quality.seeds_page import draw as draw_seeds
from examples.quality.seeds_page import section as seeds_section
from examples.quality.studies import density
from examples.quality.targets import read_planned, target_lines
from s2_megatron.tools.compare.measure import ArmResult
from s2_megatron.tools.compare.runs import VALIDATION_LOSS, Run, number

PATTERNS, DATA = ROOT / "docs" / "patterns.md", ROOT / "docs" / "quality"
BEGIN, END = "<!-- results: python -m examples.quality.page -->", "<!-- end of the results -->"
REPEATS, RECALL_PICTURE = "repeats", "recall.png"
RULES = ("from-dense-rules8k", "rules8k", "lm32k")  # the studies of patterns.md
TEXT_TESTS = {"Where the loss lies": copies_lines, "Copying from far back": needles_lines}
TITLES = {
    "lm8k": "Language modelling at 8K",
    "lm32k": "Language modelling at 32K",
    "rules8k": "Rules of thumb, at 8K",
    "from-dense8k": "From a dense checkpoint, at its length",
    "from-dense-rules8k": "Rules of thumb from a dense checkpoint, at 8K",
    "from-dense-recall8k": "From a dense checkpoint: recall at 8K",
    "extend32k": "From dense at 8K to 32K",
    "extend-rules32k": "Rules of thumb from a dense checkpoint, from 8K to 32K",
    "extend-recall32k": "From a dense checkpoint: recall from 8K to 32K",
}


def _mean_last(result: ArmResult, name: str) -> float:
    return float(np.mean([last(run, name) for run in result.arm.runs]))


def targets(scale: Scale, is_whole: bool) -> list[str]:
    """Lines for a language model from random weights; models that go on from others have no target. is_whole: all of
    a study's seeds. Of fewer than decide by themselves only what is asked at equal time: the rest stands before
    them."""
    if scale.study.start is not None:
        return []
    planned = read_planned(scale.folder, scale.study.baseline)
    asked = ("tokens", "time") if is_whole or decides(scale) else ("time",)
    return target_lines(scale.comparison, planned, scale.study.step_tokens, asked)


def _loss_rows(scale: Scale) -> list[list[str]]:
    dense = scale.comparison.results[0]
    rows = []
    for result in scale.comparison.results:
        own, rate = [last(run, VALIDATION_LOSS) for run in result.arm.runs], result.tokens_per_second
        spread = f" ± {np.std(own, ddof=1):.4f}" if len(own) > 1 else ""
        trailing = "lm loss by position/trailing validation"
        rows.append(
            [
                result.arm.name,
                f"{100 * density(scale.study, result.arm.name):.1f} %",
                ", ".join(dict.fromkeys(f"{number(run.arguments, 'lr'):g}" for run in result.arm.runs)),
                f"{result.validation:.4f}{spread}",
                paired(result),
                gap(_mean_last(result, trailing), _mean_last(dense, trailing)),
                gap(result.at_equal["hours"], dense.at_equal["hours"]) if "hours" in result.at_equal else "-",
                gap(result.at_equal["flops"], dense.at_equal["flops"]),
                "-" if rate is None else f"{1000 * scale.study.step_tokens / rate:.0f}",
                "-" if result.speed_up is None else f"{result.speed_up:.2f}",
            ]
        )
    return rows


LOSS_COLUMNS = (
    "arm",
    "pairs attended",
    "learning rate",
    "validation loss",
    "training loss against dense, paired",
    "validation loss, last 1/8 of the context",
    "training loss at equal time",
    "training loss at equal FLOPs",
    "ms a step",
    "effective speed-up",
)


def about_runs(scale: Scale) -> list[str]:
    """The heading of a scale's section, and what its runs have in common."""
    counts = sorted({len(result.arm.runs) for result in scale.comparison.results})
    seeds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    headers = _headers(scale)
    machine = headers[0]["machine"]
    epochs = scale.tokens / scale.corpus["tokens"]
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if name != "device")
    return [
        f"## {scale.tokens / 1e6:.1f}M tokens a run",
        "",
        f"Runs an arm: {seeds}. Steps: {int(number(scale.runs[0].arguments, 'train_iters'))} of "
        f"{scale.study.step_tokens:,} tokens, {epochs:.2f} epochs of the corpus `{scale.corpus['sha256'][:12]}` "
        f"({scale.corpus['tokens']:,} tokens).{given_rate(scale)} {_devices(scale)}; {versions}."
        f"{_borrowed_times(headers)}{_uncompared(scale)}",
        "",
    ]


def _headers(scale: Scale) -> list[dict]:
    """Of the runs that are compared."""
    return [header(Path(run.sources[0])) for run in scale.runs if seed_of(run) in scale.seeds]


def _devices(scale: Scale) -> str:
    return ", ".join(sorted({each["machine"]["device"] for each in _headers(scale)}))


def _borrowed_times(headers: Sequence[dict]) -> str:
    """A sentence on the runs that shared their GPU, "" without one."""
    borrowed, untimed = (sum(name in each for each in headers) for name in (TIMES_OF, UNTIMED))
    sentence = f" Runs that shared their GPU: {borrowed + untimed}." if borrowed + untimed else ""
    if borrowed:
        sentence += " They have the step times of runs of their arms that were alone."
    return sentence + (f" Without times for that reason: {untimed}." if untimed else "")


def _uncompared(scale: Scale) -> str:
    """A sentence on results that wait for a run of the baseline, "" without one."""
    logs = [path for arm in scale.study.arm_names for path in logs_by_seed(scale.folder, arm)]
    waiting = ", ".join(path.stem for path in logs if str(file_seed(path)) not in scale.seeds)
    return f" Not compared, for no {scale.study.baseline} run has their seed: {waiting}." if waiting else ""


def part_section(scale: Scale, picture: str, is_whole: bool) -> list[str]:
    """What compares means over seeds, which all arms have, as lines of Markdown. picture: of the curves, from the
    page. is_whole: all seeds of the study."""
    return [
        *([] if scale.study.tasks is not None else _loss_lines(scale, picture, is_whole)),
        f"![Loss over tokens and over time, paired differences, gap by position]({picture})",
        "",
        *compare_lines(scale),
    ]


def compare_lines(scale: Scale) -> list[str]:
    """The command that compares these runs."""
    runs = [(result.arm.name, run) for result in scale.comparison.results for run in result.arm.runs]
    return [
        "The same comparison, with all its remarks and intervals:",
        "",
        "```bash",
        f"s2-megatron compare {' '.join(f'{arm}={_shown(run)}' for arm, run in runs)} --vary {','.join(VARIED)} "
        "--html compare.html",
        "```",
        "",
    ]


def _loss_lines(scale: Scale, picture: str, is_whole: bool) -> list[str]:
    """Of a study of text; the loss of tasks that are learnt is near zero, where a share of it says nothing."""
    held = targets(scale, is_whole)
    return [
        *([] if scale.study.start is None else _continued_lines(scale, picture)),
        *(f"- {line}" for line in held),
        *([""] if held else []),
        *table(LOSS_COLUMNS, _loss_rows(scale)),
        "",
        *noise_lines(scale),
        *position_lines(scale.comparison),
        *(line for lines_of in TEXT_TESTS.values() for line in _tested_lines(scale, lines_of)),
    ]


def _tested_lines(part: Scale, lines_of: Callable) -> list[str]:
    """lines_of: of TEXT_TESTS."""
    arms = [result.arm.name for result in part.comparison.results]
    return lines_of(part.folder, arms, part.study.baseline, part.seeds)


def _by_seed(scale: Scale, shown: str, pictures: bool) -> list[str]:
    """Shares of dense's loss, hence not of tasks."""
    if scale.study.start is None or scale.study.tasks is not None:
        return []
    if pictures:
        draw_seeds(scale.study, scale.folder, scale.comparison, scale.folder / "seeds.png")
    return seeds_section(scale.study, scale.folder, scale.comparison, shown)


def _continued_lines(scale: Scale, picture: str) -> list[str]:
    return continued_section(scale.study.start, scale.folder, scale.comparison, switch_picture(picture))


def _curves(part: Scale, count: int) -> str:
    """The file of a part's curves, of which there are `count`."""
    return "curves.png" if count == 1 else f"curves-seed{'-'.join(part.seeds)}.png"


def scale_section(scale: Scale, shown: str, pictures: bool) -> list[str]:
    """A study's results with one number of tokens, as lines of Markdown. shown: the folder of its pictures, from the
    page. pictures: draw them too."""
    study, parts = scale.study, scale.parts()
    tests = {} if study.tasks is None else read_tests(study, scale.folder)
    lines = about_runs(scale)
    if tests:
        lines += recall_section(study, tests, f"{shown}/{RECALL_PICTURE}")
        if pictures:
            draw_recall(study, tests, scale.folder / RECALL_PICTURE)
    lines += _by_seed(scale, shown, pictures)
    if len(parts) > 1 and study.start is None:
        lines += [*gaps_section(scale), *compare_lines(scale)]
    if pictures:
        for kind in ("curves", "switch"):  # of other parts, when there were fewer seeds
            for old in scale.folder.glob(f"{kind}*.png"):
                old.unlink()
    for part in parts:
        name = _curves(part, len(parts))
        if len(parts) > 1:
            lines += [f"### {seeds_text(part.seeds).capitalize()}", ""]
        lines += part_section(part, f"{shown}/{name}", len(parts) == 1)
        if pictures:
            picture = scale.folder / name
            draw_curves(part.comparison, picture)
            if study.start is not None and study.tasks is None:
                draw_continued(scale.folder, part.comparison, Path(switch_picture(str(picture))))
    return lines


def switch_picture(curves: str) -> str:
    """Beside the picture of the curves."""
    path = PurePosixPath(curves)
    return str(path.with_name(path.name.replace("curves", "switch")))


def _shown(run: Run) -> str:
    path = Path(run.sources[0])
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


ABOUT = (
    "Written by `python -m examples.quality.page` from the data in docs/quality. [What it means](../../quality.md), "
    "[how it was measured, and what the arms are](../../quality_method.md)."
)


def study_text(name: str, data: Path, pictures: bool) -> str:
    """The page of a study, "" where it has no results. pictures: draw them too."""
    study, scales = ALL[name], read_scales(ALL[name], data)
    if not scales:
        return ""
    lines = [f"# {TITLES[name]}", "", ABOUT, "", *rates_table(study, data)]
    for scale in scales:
        shown = scale.folder.name
        if not study.questions:
            lines += scale_section(scale, shown, pictures)
            continue
        found = read_findings(study, scale.comparison, recall_folder(study, data))
        if pictures:
            for question in (each for each in study.questions if found.answered(each)):
                draw_arms(scale.comparison, question.arms, scale.folder / f"{question.name}.png")
        lines += [*about_runs(scale), *_by_seed(scale, shown, pictures), *rules_section(found, shown)]
        for heading, lines_of in TEXT_TESTS.items():
            if tested := [line for part in scale.parts() for line in _tested_lines(part, lines_of)]:
                lines += [f"### {heading}", "", *tested]
    return "\n".join(lines)


def repeats_text(data: Path) -> str:
    """The page of the runs that were repeated with one seed, "" without one."""
    folders = sorted(folder for folder in (data / REPEATS).glob("*") if folder.is_dir())
    if not folders:
        return ""
    return "\n".join(
        ["# Repeats of one seed", "", ABOUT, "", *(line for each in folders for line in repeats_section(each))]
    )


def study_pages(data: Path, pictures: bool) -> dict[Path, str]:
    """{a page: what it says} of the studies in a folder that have results. pictures: draw them too."""
    texts = {data / name / "README.md": study_text(name, data, pictures) for name in TITLES}
    texts[data / REPEATS / "README.md"] = repeats_text(data)
    return {path: f"{wrapped(text).rstrip()}\n" for path, text in texts.items() if text}


def rules_text(data: Path) -> str:
    """What stands between the marks of patterns.md: of each study the scale with the most tokens."""
    lines: list[str] = []
    for name in RULES:
        study = ALL[name]
        for scale in read_scales(study, data)[:1]:
            device = _devices(scale)
            if study.questions:
                found = read_findings(study, scale.comparison, recall_folder(study, data))
                lines += rules_summary(found, scale.tokens, device)
            else:
                lines += [f"At {study.model.seq_length // 1024}K, {scale.tokens / 1e6:.0f}M tokens a run, on {device}, "
                          "validation loss by position:", "", *losing_lines(scale.comparison)]  # fmt: skip
    return "\n".join(lines)


COLUMNS = 120
NO_RESULTS = "Nothing yet: none of these studies has been trained to its end on a GPU.\n\n"


def wrapped(text: str) -> str:
    """Markdown with its prose in lines of at most COLUMNS; tables, pictures and code stay as they are."""
    lines, is_code = [], False
    for line in text.split("\n"):
        is_code ^= line.startswith("```")
        if is_code or line.startswith(("|", "!", "```")) or len(line) <= COLUMNS:
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            whole = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), line)  # code is not broken
            pieces = textwrap.wrap(
                whole, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
            lines += [piece.replace("\0", " ") for piece in pieces]
    return "\n".join(lines)


def with_results(page: str, results: str) -> str:
    """The page with its results replaced. Raises ValueError for a page without the two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no line {BEGIN!r} followed by {END!r}; add both where the results belong")
    return f"{before}{begin}\n\n{wrapped(results) or NO_RESULTS}{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.quality.page", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a page is not current")
    parsed = parser.parse_args()
    pages = study_pages(DATA, pictures=not parsed.check)
    pages[PATTERNS] = with_results(PATTERNS.read_text(), rules_text(DATA))
    if not parsed.check:
        for path, text in pages.items():
            path.write_text(text)
        return
    there = {PATTERNS, *DATA.glob("*/README.md")}
    old = [path for path in {*pages, *there} if path not in there or pages.get(path) != path.read_text()]
    for path in sorted(old):
        print(f"{path.relative_to(ROOT)} is not what the data give; run python -m examples.quality.page, or remove it "
              "where its data are gone", file=sys.stderr)  # fmt: skip
    sys.exit(1 if old else 0)


if __name__ == "__main__":
    main()
