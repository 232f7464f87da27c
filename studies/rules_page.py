"""The rules of thumb: of every question the table of its arms, and which of them won, if that can be told.

The study's page gets the tables (`section`), docs/patterns.md what follows from them (`summary`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from studies.arms import Question
from studies.cells import last, table
from studies.effects import Effects, Verdict, fit, judge
from studies.estimate import GPU, step_seconds
from studies.results import read_json
from studies.scales import runs_by_key, seeds_text
from studies.studies import Study, density, sparsity
from studies.tasks import TASKS
from examples.quickstart.launch import Model
from s2_megatron.tools.compare.measure import Comparison
from s2_megatron.tools.compare.runs import VALIDATION_LOSS

TRAILING = "lm loss by position/trailing validation"
# Of the forecasts, beside the study's layers and sparsity: the layers of a 7B model, heads of 128.
WIDTH, FFN, HEADS, VOCABULARY = 4096, 11008, 32, 32000
LENGTHS = (32768, 131072)
LOSS, TRAILING_LOSS, RECALL = "validation loss", "loss in the last 1/8 of the context", "recall"


@dataclass(frozen=True)
class Findings:
    """Of one study with one number of tokens. values: {LOSS, TRAILING_LOSS or RECALL: {(arm, seed): value}}, recall
    in percent, and its seeds need not be those of the losses."""

    study: Study
    values: dict[str, dict[tuple[str, str], float]]

    def effects(self, name: str, question: Question) -> Effects:
        """Fitted to all arms together, for one noise of many runs. Where runs go on from a dense model, to those of the
        question: what an arm costs depends on the dense model there, and on it for some questions far more than for
        others."""
        arms = self.study.arm_names if self.study.start is None else question.arms
        return fit({(arm, seed): value for (arm, seed), value in self.values[name].items() if arm in arms})

    def answered(self, question: Question) -> list[str]:
        """The question's arms that have losses, in its order; [] without the first one, and where fewer than two of
        them compete."""
        trained = {arm for arm, _ in self.values[LOSS]}
        there = [arm for arm in question.arms if arm in trained]
        first = next(iter(question.arms))
        rivals = [arm for arm in there if arm != question.reference]
        return there if first in there and len(rivals) > 1 else []

    def competing(self, question: Question) -> list[str]:
        """Of `answered` those that can win."""
        return [arm for arm in self.answered(question) if arm != question.reference]

    def measures(self, question: Question) -> list[str]:
        """What says who won, of a question that is answered: the losses, and recall where all its arms have it of the
        same seeds, two or more."""
        recalled = self.values.get(RECALL, {})
        seeds = [{seed for own, seed in recalled if own == arm} for arm in self.answered(question)]
        is_told = len(seeds[0]) > 1 and all(each == seeds[0] for each in seeds)
        return [LOSS, TRAILING_LOSS, *([RECALL] if is_told else [])]

    def verdict(self, question: Question, name: str) -> Verdict:
        """By one of `measures`."""
        return judge(self.effects(name, question), self.competing(question), larger_is_better=name == RECALL)


def recall_folder(study: Study, data: Path) -> Path | None:
    """Where the accuracies of a study's arms are: of its twin with tasks, the runs with the most tokens; of equal ones
    those with the most tests."""
    if study.recall is None:
        return None
    tests = Counter(path.parent for path in (data / study.recall).glob("*/*.recall.json"))

    def rank(folder: Path) -> tuple[float, int, str]:
        tokens = folder.name.partition("M-")[0].rpartition("+")[2]  # those after the switch
        return float(tokens), tests[folder], folder.name

    return max(tests, key=rank, default=None)


def read_findings(study: Study, comparison: Comparison, recalled: Path | None) -> Findings:
    """comparison: of the study's runs. recalled: recall_folder."""
    runs = runs_by_key(comparison)
    values = {
        name: {key: last(run, series) for key, run in runs.items()}
        for name, series in ((LOSS, VALIDATION_LOSS), (TRAILING_LOSS, TRAILING))
    }
    accuracies = {
        (arm, path.name.partition(".")[0].rpartition("_seed")[2]): 100 * read_json(path, {})[TASKS[0]]["accuracy"]
        for arm in study.arm_names
        for path in (sorted(recalled.glob(f"{arm}_seed*.recall.json")) if recalled is not None else ())
    }
    return Findings(study, values | ({RECALL: accuracies} if accuracies else {}))


def forecast(study: Study, arm: str, length: int) -> float:
    """Milliseconds of a step of one sequence, forward and backward, with the study's sparsity in the layers of a 7B
    model, as many of them as the study has."""
    model = Model(study.model.num_layers, WIDTH, FFN, HEADS, study.model.num_kv_heads, length)
    return 1000 * step_seconds(model, sparsity(study, arm), 1, 1, VOCABULARY)


def recall_by_seed(found: Findings, arm: str) -> str:
    """Of every seed of the arm, which stands behind it where the study has several."""
    several = len(_recall_seeds(found)) > 1
    own = sorted((int(seed), value) for (name, seed), value in found.values.get(RECALL, {}).items() if name == arm)
    return ", ".join(f"{value:.1f} ({seed})" if several else f"{value:.1f}" for seed, value in own) or "-"


def _recall_seeds(found: Findings) -> tuple[str, ...]:
    return tuple(sorted({seed for _, seed in found.values.get(RECALL, {})}, key=int))


def _difference(effects: Effects, arm: str, base: str, comparisons: int) -> str:
    if arm == base:
        return "-"
    half = effects.half_width(arm, base, comparisons)
    spread = "" if math.isinf(half) else f" ± {half:.4f}"
    # Losses have five digits, so a difference of two means can lie half-way between two of four: the last bit of a
    # machine's arithmetic must not choose.
    return f"{round(effects.difference(arm, base), 9):+.4f}{spread}"


def question_table(found: Findings, question: Question) -> list[str]:
    """One row an arm; the differences are to the first arm that is there."""
    study, arms = found.study, found.answered(question)
    base, comparisons = arms[0], max(math.comb(len(found.competing(question)), 2), len(arms) - 1)
    loss, trailing = (found.effects(name, question) for name in (LOSS, TRAILING_LOSS))
    recalled = {arm: recall_by_seed(found, arm) for arm in arms}
    is_recalled = set(recalled.values()) != {"-"}
    rows = [
        [
            f"{question.arms[arm]} (`{arm}`)",
            f"{100 * density(study, arm):.1f} %",
            f"{loss.mean(arm):.4f}",
            _difference(loss, arm, base, comparisons),
            f"{trailing.mean(arm):.4f}",
            _difference(trailing, arm, base, comparisons),
            *([recalled[arm]] if is_recalled else []),
            *(f"{forecast(study, arm, length):.0f}" for length in LENGTHS),
        ]
        for arm in arms
    ]
    at = [f"ms at {length // 1024}K" for length in LENGTHS]
    against = f"against {question.arms[base]}"
    recall = ["recall, %"] if is_recalled else []
    return table(["", "pairs", LOSS, against, TRAILING_LOSS, against, *recall, *at], rows)


def verdict_text(found: Findings, question: Question, name: str) -> str:
    """Who won by one measure, who is not told apart from the winner, and who of them attends the fewest pairs."""
    verdict, arms = found.verdict(question, name), question.arms
    if not verdict.decided:
        return f"not decided: one seed. Best so far: {arms[verdict.best]}"
    if len(verdict.level) == 1:
        return f"**{arms[verdict.best]}** won"
    others = ", ".join(arms[arm] for arm in verdict.level[1:])
    text = f"**{arms[verdict.best]}** is best, not told apart from {others}"
    if set(found.competing(question)) == set(verdict.level):
        text = "not told apart"
    if found.study.start is not None or not differs(
        found, verdict
    ):  # where it depends on the dense model, pairs decide nothing
        return text
    return f"{text}; the fewest pairs: **{arms[cheapest(found, verdict)]}**"


def differs(found: Findings, verdict: Verdict) -> bool:
    """Whether the arms that are not told apart attend different numbers of pairs."""
    shares = [density(found.study, arm) for arm in verdict.level]
    return max(shares) > 1.02 * min(shares)


def cheapest(found: Findings, verdict: Verdict) -> str:
    """Of the arms that are not told apart from the best, the one with the fewest pairs; the best of equal ones."""
    return min(verdict.level, key=lambda arm: round(density(found.study, arm), 3))


def section(found: Findings, pictures: str) -> list[str]:
    """Lines of Markdown: a table, the verdicts and a picture for every question that has data. pictures: the folder of
    them, from the page."""
    alone = found.study.start is not None
    lines = [
        "Noise is estimated from the arms of each question alone."
        if alone
        else _spread(found, found.study.questions[0]),
        "Intervals are at 95 % for all comparisons of a column together.",
        *_about_recall(found),
        f"Milliseconds are the forecast (`s2-megatron inspect`) of one {GPU} for a step of one sequence through "
        f"{found.study.model.num_layers} layers of a 7B model.",
        "",
    ]
    base = found.study.baseline
    for question in found.study.questions:
        if not found.answered(question):
            continue
        lines += [f"### {question.text}", "", *question_table(found, question), ""]
        lines += [f"- By {name}: {verdict_text(found, question, name)}." for name in found.measures(question)]
        lines += [f"- {_spread(found, question)}"] if alone else []
        caption = f"{question.text}: loss against {base} over tokens and by position"
        lines += ["", f"![{caption}]({pictures}/{question.name}.png)", ""]
    return lines


def _about_recall(found: Findings) -> list[str]:
    """A sentence where there are accuracies."""
    if RECALL not in found.values:
        return []
    seeds = _recall_seeds(found)
    behind = "; the seed stands behind each" if len(seeds) > 1 else ""
    return [
        f"Recall is the share of right answers of the same arms in `{found.study.recall}` ({seeds_text(seeds)})"
        f"{behind}."
    ]


def _spread(found: Findings, question: Question) -> str:
    """Sentences: how far apart runs are beside arm and seed, and how many seeds that asks for."""
    loss = found.effects(LOSS, question)
    if loss.freedom == 0:
        return "One seed: how large differences by chance are is not known."
    return (
        f"What is left between runs beside arm and seed: ± {loss.noise:.4f} (standard deviation of the validation "
        f"loss, {loss.freedom} degrees of freedom). {seeds_needed(loss)}"
    )


def seeds_needed(loss: Effects) -> str:
    """A sentence: with how many seeds a study of such noise would decide what its targets ask."""
    whole, half = (loss.seeds_for(share * float(loss.means.mean())) for share in (0.01, 0.005))
    return (
        f"With noise of this size it would take about {whole} seeds of every arm to know one difference to ± 1 % of "
        f"the loss, and {half} to ± 0.5 %."
    )


def summary(found: Findings, tokens: float, device: str) -> list[str]:
    """What docs/patterns.md says: one row a question."""
    questions = [question for question in found.study.questions if found.answered(question)]
    if not questions:
        return []
    rows, measures = [], max((found.measures(question) for question in questions), key=len)
    for question in questions:
        told = found.measures(question)
        measured = [verdict_text(found, question, name) if name in told else "-" for name in measures]
        values = [found.effects(LOSS, question).mean(arm) for arm in found.competing(question)]
        rows.append([question.text, *measured, f"{np.ptp(values):.4f}"])
    model, study = found.study.model, found.study
    going_on = "" if study.start is None else "Going on from a dense model. "
    return [
        f"{going_on}A model of {model.num_layers} layers of {model.hidden_size} ({model.num_heads} query heads, "
        f"{model.num_kv_heads} KV heads), {model.seq_length:,} tokens, {tokens / 1e6:.0f}M tokens a run, on "
        f"{device}; around a window of {study.local_tokens} and a stride of {study.stride}. It is small and has seen "
        "few tokens: a large model may give other answers.",
        "",
        *table(["question", *(f"by {name}" for name in measures), "from best to worst, in loss"], rows),
        "",
        f"The tables behind it, with step times: [{study.name}](quality/{study.name}/README.md).",
        "",
    ]
