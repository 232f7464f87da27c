"""Draws launch flags, asks `s2-megatron check` about them, and trains what it accepts: an accepted line has to train as
many iterations as it says, a refused one has to be error lines, one for each of its mistakes.

    python -m tests.megatron.launch_trial --draws 200 --seed 0

prints each draw that breaks the rule, with the flags that it takes for that, and a summary:

    learning rate, 1 process: failed: AssertionError: ... (optimizer_param_scheduler.py)
        --lr-decay-iters 2 --lr-warmup-iters 4
    200 draws: 131 accepted and trained, 68 refused by one line, 1 accepted and failed

With --refused some of the refused lines are trained as well, with what this package checks switched off; those that
train are listed, to judge whether the refusal is right. Megatron's own refusals are not tried. Needs no GPU.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from s2_megatron.megatron.errors import FAULT
from s2_megatron.megatron.records.loss_log import read_loss_log
from s2_megatron.megatron.records.status import read_status
from tests.megatron.conftest import ROOT, run_processes, write_corpus
from tests.megatron.launch_draws import Change, command_line, draw

CHECK = ROOT / "s2_megatron" / "__main__.py"
ENTRY = ROOT / "tests" / "megatron" / "scripts" / "tried_pretrain.py"
SPARSITY = "block_size: 16\nlayers: S\nmtp_layers: S\nspecs:\n  S: {local_blocks: 1, stride: 2}\n"
TRAINED, REFUSED, FAILED, HUNG, IDLE, UNTIDY = (
    "trained",
    "refused",
    "failed",
    "hung",
    "trained nothing",
    "untidy refusal",
)
# Flags that end a run early, and those that leave it without a step.
ENDING = ("--exit-interval", "--exit-duration-in-mins", "--error-injection-rate")
WITHOUT_STEPS = ("--skip-train", "--ckpt-convert-format", "--iterations-to-skip")


class Outcome(NamedTuple):
    """Of a line that was checked, or trained. kind: one of the words above. why: the error, for people; where: what
    two failures for one reason have in common."""

    kind: str
    why: str = ""
    where: str = ""


@dataclass
class Trial:
    """folder: of data and runs. seconds: the most that a run may take."""

    folder: Path
    seconds: float = 300
    counted: collections.Counter = field(default_factory=collections.Counter)
    runs: int = 0

    def __post_init__(self):
        self.lab = self.folder / "lab"
        self.lab.mkdir()
        make_lab(self.lab)

    def start_checkpoint(self) -> None:
        """A checkpoint after two iterations, at {lab}/start, for lines that load."""
        outcome = self.train([{"--save": [str(self.lab / "start")], "--train-iters": ["2"]}], 1)
        assert outcome.kind == TRAINED, outcome

    def check(self, changes: list[Change], processes: int) -> Outcome:
        run = self.next_run()
        line = ["torchrun", f"--nproc-per-node={processes}", "pretrain_gpt_s2.py", *self.words(changes, run)]
        status, output = run_processes([str(CHECK), "check", "--", *line], 1, self.seconds, forked=True)
        errors = [text for text in output.splitlines() if text.startswith("error: ")]
        if status == 0 and not errors and "nothing wrong found" in output:
            return Outcome(TRAINED)
        if status == 0 and "--help" in line:
            return Outcome(REFUSED, "it asks for the help")
        settings = [re.split(r"[=:]", text.removeprefix("error: "), maxsplit=1)[0] for text in errors]
        said_once = 0 < len(settings) == len(set(settings))  # a line for each setting that is wrong
        if status == 2 and said_once and "Traceback" not in output and FAULT not in output:
            return Outcome(REFUSED, errors[0])
        return Outcome(UNTIDY, f"status {status}: {output[-500:]}", "check")

    def train(self, changes: list[Change], processes: int, unchecked: bool = False) -> Outcome:
        run = self.next_run()
        words, log = self.words(changes, run), run / "losses.jsonl"
        environment = {"WANDB_MODE": "offline", "UNCHECKED": str(int(unchecked))}
        command = [str(ENTRY), *words, "--s2-loss-log", str(log)]
        status, output = run_processes(command, processes, self.seconds, environment, forked=True)
        outcome = judged(status, output, words, log)
        shutil.rmtree(run, ignore_errors=True)
        return outcome

    def next_run(self) -> Path:
        self.runs += 1
        run = self.folder / f"run_{self.runs}"
        run.mkdir()
        return run

    def words(self, changes: list[Change], run: Path) -> list[str]:
        return command_line(changes, str(self.lab), str(run))

    def accepted(
        self, changes: list[Change], processes: int
    ) -> tuple[list[Change], list[tuple[list[Change], Outcome]]]:
        """(the changes that the check takes together, what it refused on the way to them)"""
        outcome = self.check(changes, processes)
        if outcome.kind == TRAINED:
            return changes, []
        refused, kept = [(changes, outcome)], []
        for change in changes if len(changes) > 1 else []:
            outcome = self.check([*kept, change], processes)
            if outcome.kind == TRAINED:
                kept.append(change)
            else:
                refused.append(([*kept, change], outcome))
        return kept, refused

    def shrunk(self, changes: list[Change], processes: int, outcome: Outcome) -> list[Change]:
        """The changes without those that the failure does not need."""
        for change in list(changes):
            fewer = [each for each in changes if each is not change]
            if self.check(fewer, processes).kind == TRAINED:
                again = self.train(fewer, processes)
                if again.kind == outcome.kind and again.where == outcome.where:
                    changes = fewer
        return changes


def make_lab(lab: Path) -> None:
    """Data, a sparsity and a tokenizer that the drawn flags name."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    (lab / "sparsity.yaml").write_text(SPARSITY)
    corpus = str(lab / "corpus")
    write_corpus(lab / "corpus")
    (lab / "data_args").write_text(f"1.0 {corpus}")
    (lab / "splits.json").write_text(json.dumps({name: ["1.0", corpus] for name in ("train", "valid", "test")}))
    (lab / "sequences.json").write_text(json.dumps({corpus: [400, 401]}))
    words = {word: number for number, word in enumerate(["<unk>", "<pad>", "<eos>", *"abcdefghij"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(lab / "tokenizer")


def judged(status: int, output: str, words: list[str], log: Path) -> Outcome:
    """What became of a training."""
    steps = max(read_loss_log(log)[0], default=0) if log.exists() else 0
    if status == 9 and "Traceback" not in output:
        return Outcome(HUNG, output[-500:], "hung")
    if status != 0:
        errors = [text for text in output.splitlines() if text.startswith("error: ")]
        if errors:
            return Outcome(FAILED, errors[0], "refused by the start: " + re.sub(r"[0-9.]+|/\S+", "", errors[0])[:80])
        return Outcome(FAILED, *raised(output))
    asked = [int(after) for word, after in pairwise(words) if word == "--train-iters"]
    if any(word in WITHOUT_STEPS for word in words) or "was done before" in output:
        return Outcome(TRAINED)
    if not steps or (asked and steps != asked[-1] and not any(word in ENDING for word in words)):
        place = next((after for word, after in pairwise(words) if word == "--save"), None)
        found = read_status(place) if place else None
        said = found["line"] if found else output[-300:]
        return Outcome(IDLE, f"{steps} iterations of {asked}: {said}", "idle")
    return Outcome(TRAINED)


def raised(output: str) -> tuple[str, str]:
    """(the error of a traceback with the line of source that raised it, file and line)"""
    start = r"^(?:\[rank\d+\]: ?)?"
    frames = re.findall(start + r'  File "([^"]+)", line (\d+), in .*\n(?:.*?)    (.*)$', output, flags=re.M)
    kinds = r"((?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Found)\b.*)$"
    errors = re.findall(start + kinds, output, flags=re.M)
    error = errors[-1] if errors else output[-400:]
    if not frames:
        return error, re.sub(r"[0-9]+", "", error)[:80]
    file, line, source = frames[-1]
    return f"{error[:400]} ({Path(file).name}:{line}: {source.strip()[:100]})", f"{Path(file).name}:{line} {error[:25]}"


def shown(changes: list[Change]) -> str:
    return " ".join(
        f"(without {flag})" if words is None else " ".join((flag, *words))
        for each in changes
        for flag, words in each.items()
    )


def run(
    trial: Trial, draws: int, seed: int, *, refused_too: float = 0.0, only: str | None = None, log=None
) -> list[str]:
    """What broke the rule. refused_too: the share of refused lines that are trained without checks. log: a file for
    one JSON line a draw."""
    choice, found, known = random.Random(seed), [], set()
    done = 0

    def note(kind: str, name: str, processes: int, changes: list[Change], outcome: Outcome) -> None:
        trial.counted[kind] += 1
        entry = dict(
            kind=kind, group=name, processes=processes, flags=shown(changes), why=outcome.why, where=outcome.where
        )
        if log:
            log.write(json.dumps(entry) + "\n")
            log.flush()
        if kind not in (TRAINED, REFUSED) and (kind, outcome.where) not in known:
            known.add((kind, outcome.where))
            found.append(f"{name}, {processes} process(es): {kind}: {outcome.why}\n    {shown(changes)}")
            print(found[-1], flush=True)

    while done < draws:
        name, processes, changes = draw(choice, only)
        done += 1
        kept, refused = trial.accepted(changes, processes)
        for tried, outcome in refused:
            note(outcome.kind, name, processes, tried, outcome)
        own = [tried for tried, outcome in refused if outcome.kind == REFUSED and "Megatron refuses" not in outcome.why]
        if own and choice.random() < refused_too:
            outcome = trial.train(own[-1], processes, unchecked=True)
            if outcome.kind == TRAINED:
                why = next(outcome.why for tried, outcome in refused if tried is own[-1])
                note("refused, and trains", name, processes, own[-1], Outcome(TRAINED, why, why[:60]))
            else:
                trial.counted["refused, and does not train"] += 1
        if not kept:
            continue
        began = time.monotonic()
        outcome = trial.train(kept, processes)
        if outcome.kind != TRAINED and (outcome.kind, outcome.where) not in known:
            kept = trial.shrunk(kept, processes, outcome)
        elif time.monotonic() - began > 60 and outcome.kind == TRAINED:
            outcome = Outcome("slow", f"{time.monotonic() - began:.0f} s", "slow")
        note(outcome.kind, name, processes, kept, outcome)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", help="draw from this group of launch_draws.py only")
    parser.add_argument("--refused", type=float, default=0.0, help="share of refused lines that are trained unchecked")
    parser.add_argument("--log", type=Path, help="a file for one JSON line a draw")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder))
        trial.start_checkpoint()
        log = parsed.log.open("a") if parsed.log else None
        found = run(trial, parsed.draws, parsed.seed, refused_too=parsed.refused, only=parsed.group, log=log)
    counts = ", ".join(f"{number} {kind}" for kind, number in trial.counted.most_common())
    print(f"{parsed.draws} draws: {counts}")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
