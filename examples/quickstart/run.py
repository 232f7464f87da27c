"""Train the quickstart GPT, from the standard library's text to a summary; `make pretrain` runs this.

    python -m examples.quickstart.run
    python -m examples.quickstart.run --config configs/quickstart_dense.yaml
    python -m examples.quickstart.run --iterations 500        # continues a finished run

Everything goes to runs/<name of the config>/: train.log, losses.jsonl, checkpoints/, tensorboard/, summary.json, and
corpus.json with the hash of every file of the corpus. A run that was stopped, by whatever, continues from its last
checkpoint, and its losses.jsonl ends up with the losses of an uninterrupted run. Status 2: something that the user can
mend, in one `error:` line; 1: the training failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from examples.quickstart import failures, launch, summary
from examples.quickstart.dataset import VOCABULARY_SIZE, PreparedCorpus, prepare_corpus
from examples.quickstart.failures import QuickstartError, checkpoint_iteration
from examples.quickstart.progress import OutputFollower, Speed, follow_training
from s2_megatron.megatron.preflight.values import RANGES
from s2_megatron.megatron.records.loss_log import read_loss_log, truncate_loss_log
from s2_megatron.printing import open_streams
from s2_megatron.tools.streams import BAD_INPUT, flush, one_line, say_error

DEFAULT_CONFIG = launch.ROOT / "configs" / "quickstart.yaml"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line: the usage would be that of flags which make does not take."""
        self.exit(2, f"error: {one_line(message)}; see make help\n")


def count_of(name: str):
    """A whole number that Megatron's setting of this name takes, as a type for argparse."""
    least, most = RANGES[name]

    def count(text: str) -> int:
        digits = text.strip()
        if not (digits.isdecimal() and len(digits) <= 20 and least <= int(digits) <= most):
            raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of {least} to {most}, such as 300")
        return int(digits)

    return count


def folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("empty (an unset variable?); expected a folder; give RUNS=runs")
    return Path(os.path.realpath(text))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = _Parser(
        prog="make pretrain",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="sparsity YAML")
    parser.add_argument(
        "--iterations", type=count_of("train_iters"), default=launch.DEFAULT_ITERATIONS, help="train up to this one"
    )
    parser.add_argument(
        "--save-interval", type=count_of("save_interval"), default=75, help="iterations between two checkpoints"
    )
    parser.add_argument(
        "--seed", type=count_of("seed"), default=1234, help="of the corpus order, the initial weights and the batches"
    )
    parser.add_argument("--runs", type=folder, default=launch.ROOT / "runs", help="folder of all runs")
    return parser.parse_args(arguments)


def resolve_sparsity(config: Path, console: Console):
    """The config's sparsity for the quickstart's model. The shipped config must be a real S2 run; others are only
    remarked upon."""
    from s2_megatron.config.load import load_config

    sparsity = load_config(config).resolve(**launch.MODEL.shape)
    text = summary.s2_run_text(sparsity)
    if text is None:
        console.print("dense run: every layer attends all causal pairs", highlight=False)
        return sparsity
    problems = summary.s2_run_problems(sparsity)
    if problems and os.path.realpath(config) == os.path.realpath(DEFAULT_CONFIG):
        raise QuickstartError(f"{config}: {'; '.join(problems)}")
    console.print(text, highlight=False)
    for problem in problems:
        console.print(f"note: {problem}", highlight=False)
    return sparsity


def lock_run(run_folder: Path, console: Console, wait_seconds: float = 30.0):
    """An open file that holds the run's lock. Raises QuickstartError when another process still has it after
    `wait_seconds`: what a killed run leaves takes a moment to end."""
    file = (run_folder / "lock").open("a+")
    deadline = time.monotonic() + wait_seconds
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                raise QuickstartError(
                    f"another `make pretrain` is working in {run_folder}; wait for it, or stop it"
                ) from None
            if not told:
                console.print(
                    f"waiting up to {wait_seconds:.0f} s for another `make pretrain` to end, which has this folder",
                    highlight=False,
                )
                told = True
            time.sleep(0.2)
        else:
            return file


def check_settings(run_folder: Path, settings: dict) -> None:
    """Keep what the run was started with, and refuse to continue it with something else."""
    path = run_folder / "run.json"
    if not path.exists():
        summary.write_atomically(path, settings)
        return
    stored = summary.read_json(path)
    changed = [name for name in settings if settings[name] != stored.get(name)]
    if changed:
        changes = ", ".join(_change(name, stored.get(name), settings[name]) for name in changed)
        raise QuickstartError(
            f"{run_folder} holds a run with other settings ({changes}); move it away to start a new one"
        )


def _change(name: str, before, after) -> str:
    from s2_megatron.config.sparsity import diff_sparsity

    if name == "sparsity" and before is not None:
        return "; ".join(diff_sparsity(before, after))
    return f"{name} {before!r} -> {after!r}"


def finished_summary(run_folder: Path, iterations: int) -> dict | None:
    """The summary of a run that has already trained that far."""
    path = run_folder / "summary.json"
    if not path.exists():
        return None
    content = summary.read_json(path)
    return content if content.get("iterations", 0) >= iterations else None


def train(
    run_folder: Path, corpus: PreparedCorpus, sparsity, parsed, start: int, on_gpu: bool, lock, console: Console
) -> float | None:
    """Run torchrun from iteration `start` to the end of the training; tokens a second. Raises QuickstartError when it
    fails."""
    if start:
        console.print(f"continuing from the checkpoint of iteration {start}", highlight=False)
    losses, log = launch.loss_log(run_folder), run_folder / "train.log"
    truncate_loss_log(losses, start)
    command = launch.training_command(
        Path(os.path.realpath(parsed.config)),
        parsed.iterations,
        parsed.seed,
        run_folder,
        corpus,
        on_gpu=on_gpu,
        save_interval=parsed.save_interval,
    )
    log.touch()
    attempt = log.stat().st_size  # what stands before is of earlier attempts
    output = OutputFollower(log, caption_lines=len(sparsity.summary().splitlines()))
    speed = Speed(launch.TOKENS_PER_ITERATION)
    process = launch.start_training(command, log, lock.fileno())
    try:
        status = follow_training(process, losses, output, parsed.iterations, console, speed)
    finally:
        if process.poll() is None:  # Ctrl-C, SIGTERM or an error here
            process.terminate()
            process.wait()
    if status != 0:
        own = failures.own_output(log, attempt)
        console.print(failures.last_lines(own), highlight=False, markup=False, soft_wrap=True)
        raise failures.of_training(own, status, log, parsed.runs)
    return speed.tokens_per_second()


def backend_in(output: str) -> str | None:
    """What the training process said that it computes attention with; the last run's where there are several."""
    found = re.findall(r"^S2 attention (?:backend|kernels): (\w+)", output, flags=re.MULTILINE)
    return found[-1] if found else None


def _below_here(path: Path) -> str:
    """The path as one would type it: relative where it lies below the working directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def show_summary(content: dict, path: Path, console: Console) -> None:
    table = Table(title="Summary", show_header=False, title_justify="left")
    corpus = content["corpus"]
    rows = {
        "first loss": f"{content['first_loss']:.4f}",
        "last loss": f"{content['last_loss']:.4f} (mean of the last {summary.LAST_ITERATIONS} iterations, "
        f"{content['last_loss'] / content['first_loss']:.0%} of the first)",
        "validation loss": f"{content['validation_loss']:.4f}",
        "layers": ", ".join(f"{count} {kind}" for kind, count in content["layers"].items()),
        "attended pairs": f"{content['density']:.1%} of the causal ones, all layers together",
        "backend": f"{content['backend']} on {content['device']}",
        "tokens/s": f"{content['tokens_per_second']:,.0f}" if content["tokens_per_second"] else "-",
        "iterations": str(content["iterations"]),
        "corpus": f"{corpus['documents']} documents, {corpus['tokens']:,} tokens, Python {corpus['python']}, "
        f"seed {content['seed']}, SHA-256 {corpus['sha256'][:12]}",
        "checkpoint": _below_here(Path(content["checkpoint"])),
        "summary": _below_here(path),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table, highlight=False)


def run(parsed: argparse.Namespace, console: Console) -> None:
    if not parsed.config.exists():
        raise QuickstartError(f"CONFIG={parsed.config}: no such file; see configs/")
    run_folder = parsed.runs / parsed.config.stem
    run_folder.mkdir(parents=True, exist_ok=True)
    failures.require_space(run_folder)
    lock = lock_run(run_folder, console)
    sparsity = resolve_sparsity(parsed.config, console)
    finished = finished_summary(run_folder, parsed.iterations)
    if finished is not None:
        check_settings(run_folder, {"sparsity": sparsity.canonical_json()})
        count = finished["iterations"]
        console.print(
            f"{run_folder} is finished: {count} iterations, validation loss {finished['validation_loss']:.4f}. "
            f"`make pretrain ITERATIONS={2 * count}` trains further; see {run_folder / 'summary.json'}",
            highlight=False,
            soft_wrap=True,
        )
        return

    start = checkpoint_iteration(run_folder)
    if start > parsed.iterations:
        raise QuickstartError(f"{run_folder} has been trained to iteration {start}; give ITERATIONS={start} or more")

    import torch  # takes seconds, and a finished run needs it no more than a wrong config

    on_gpu = torch.cuda.is_available()
    corpus = prepare_corpus(parsed.runs / "corpus", parsed.seed, tell=lambda text: console.print(text, highlight=False))
    check_settings(
        run_folder,
        {
            "sparsity": sparsity.canonical_json(),
            "seed": parsed.seed,
            "corpus": corpus.description["sha256"],
            "vocabulary_size": VOCABULARY_SIZE,
            "model": launch.model_flags(launch.MODEL),
            "device": "gpu" if on_gpu else "cpu",
        },
    )
    tokens_per_second = train(run_folder, corpus, sparsity, parsed, start, on_gpu, lock, console)
    summary.write_atomically(run_folder / "corpus.json", corpus.description)
    content = summary.make_summary(
        *read_loss_log(launch.loss_log(run_folder)),
        sparsity,
        backend=backend_in((run_folder / "train.log").read_text(errors="replace")),
        device=torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores",
        tokens_per_second=tokens_per_second,
        checkpoint=str(run_folder / "checkpoints" / f"iter_{checkpoint_iteration(run_folder):07d}"),
        config=str(parsed.config),
        seed=parsed.seed,
        corpus={name: value for name, value in corpus.description.items() if name != "file_sha256"},
    )
    path = run_folder / "summary.json"
    if path.exists():  # of fewer iterations: it stays beside the new one
        path.rename(run_folder / f"summary_{summary.read_json(path)['iterations']}.json")
    summary.write_atomically(path, content)
    show_summary(content, path, console)
    ratio = content["last_loss"] / content["first_loss"]
    if content["iterations"] >= launch.DEFAULT_ITERATIONS and ratio > summary.LARGEST_LOSS_RATIO:
        raise QuickstartError(
            f"the last loss is {ratio:.0%} of the first, expected {summary.LARGEST_LOSS_RATIO:.0%} at most", status=1
        )
    lock.close()


def main() -> None:
    # A killed terminal or a scheduler's SIGTERM ends the training process too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    open_streams()
    parsed = parse_arguments()
    console = Console() if sys.stdout.isatty() else Console(width=140)
    try:
        run(parsed, console)
        flush()
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)
    except (QuickstartError, *BAD_INPUT) as error:
        refused = failures.of_system(error, parsed.runs) if isinstance(error, OSError) else error
        say_error(refused or error)
        with contextlib.suppress(OSError):
            flush()  # of a full disk, the end of the process would make a traceback
        sys.exit(getattr(refused, "status", 2))
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
