"""Runs the tries of tests/tools/tries.py, each in a fork of this process, which has imported everything.

tried.py LAB LINES SHARE     LINES: names of tries.LINES joined by ;, or all. SHARE: one of so many cases.

Prints one JSON line: the number of tries, and of each that broke the rule its name, words, mistake and output.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.tools import tries

CPU_SECONDS, SECONDS, MEMORY = 30, 120, 3 * 2**30
CLONE_NEWNS = 0x00020000


def import_all() -> None:
    import importlib

    from s2_megatron.tools import commands
    from tests.megatron import preloaded  # noqa: F401

    for command in commands.COMMANDS.values():
        importlib.import_module(command.module)
    for name in (
        "s2_megatron.huggingface", "s2_megatron.tools.hf.checkpoint_model", "s2_megatron.megatron.preflight.start_up",
        "s2_megatron.tools.compare.table", "s2_megatron.tools.compare.page", "s2_megatron.tools.compare.measure",
        "s2_megatron.tools.choose_dense.measure", "s2_megatron.megatron.arguments", "examples.quickstart.run",
        "matplotlib.pyplot", "megatron.training.initialize", "megatron.training.argument_utils", "pretrain_gpt_s2",
        "s2_megatron.megatron.data", "s2_megatron.megatron.records.status",
        "transformers.models.auto.tokenization_auto",
    ):  # fmt: skip
        importlib.import_module(name)


def make_lab(lab: Path) -> None:
    """The inputs of all good lines."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from examples.quickstart.dataset import train_byte_pairs
    from s2_megatron.config.load import load_config
    from tests.huggingface.tiny import model_of
    from tests.tools.logged_runs import losses, s2_arguments, write_loss_log

    (lab / "config.yaml").write_text("block_size: 16\nlayers: DSSS\nspecs:\n  S: {local_tokens: 32, stride: 4}\n")
    (lab / "mask.yaml").write_text("block_size: 16\nlayers: DMMM\nspecs:\n  M: {mask: mask.npz}\n")
    rows = np.arange(1, 17)
    np.savez(lab / "mask.npz", indptr=np.cumsum([0, *rows]), indices=np.concatenate([np.arange(n) for n in rows]))
    sizes = dict(num_layers=4, num_heads=4, num_kv_heads=2, seq_length=256)
    text = Path(tries.__file__).read_text()
    vocabulary = 300
    tokenizer = train_byte_pairs([text], vocabulary)
    ids = np.array(tokenizer.encode(text).ids, np.uint16)
    builder = IndexedDatasetBuilder(str(lab / "text.bin"), dtype=np.uint16)
    for document in np.array_split(ids, 20):
        builder.add_document(document, [len(document)])
    builder.finalize(str(lab / "text.idx"))
    (lab / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text.splitlines()))
    (lab / "plain.yaml").write_text("block_size: 16\nlayers: D\n")
    for name, config in (("hf", "config.yaml"), ("hf_dense", "plain.yaml")):
        sparsity = load_config(lab / config).resolve(**sizes)
        model_of(sparsity, vocab_size=vocabulary, max_position_embeddings=256).save_pretrained(lab / name)
        tokenizer.save(str(lab / name / "tokenizer.json"))
        (lab / name / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}\n'
        )
        target = lab / {"hf": "checkpoints", "hf_dense": "dense"}[name]
        words = ["import-hf", "--input", str(lab / name), "--output", str(target)]
        result = forked(lambda words=words: command(words), lab, "", "")
        assert result["status"] == 0, result
    write_loss_log(lab / "a.jsonl", losses(1, 1))
    write_loss_log(lab / "b.jsonl", losses(1, 2), **s2_arguments())


def command(words: list[str]) -> int:
    from s2_megatron.tools import commands

    return commands.main(words)


def quickstart(words: list[str]) -> int:
    """Up to where it trains, with few documents."""
    from examples.quickstart import dataset, run
    from examples.quickstart.corpus import Document

    def train(*_):
        print("trains")
        sys.stdout.flush()
        raise SystemExit(0)

    texts = [Document(f"{n}.py", Path(module.__file__).read_text()) for n, module in enumerate((argparse, traceback))]
    dataset.collect_documents = lambda: texts
    prepare = run.prepare_corpus
    run.prepare_corpus = lambda *given, **more: prepare(*given, vocabulary_size=400, **more)
    run.train = train
    sys.argv = ["run.py", *words]
    run.main()
    return 0


def pretrain(words: list[str]) -> int:
    """Up to where it trains."""
    import megatron.training

    import pretrain_gpt_s2

    def trains(*_, **__):
        print("trains")
        sys.stdout.flush()
        os._exit(0)

    megatron.training.pretrain = trains
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    sys.argv = ["pretrain_gpt_s2.py", *words]
    pretrain_gpt_s2.main()
    return 0


def parser_of(line: tries.Line):
    """The parser whose options are tried."""
    import argparse

    from s2_megatron.megatron.arguments import add_s2_arguments
    from s2_megatron.tools import commands

    if line.tool == "quickstart":
        from examples.quickstart import run

        seen = []
        parse_args, argparse.ArgumentParser.parse_args = (
            argparse.ArgumentParser.parse_args,
            lambda self, *_: seen.append(self),
        )
        run.parse_arguments([])
        argparse.ArgumentParser.parse_args = parse_args
        return seen[0]
    if line.tool == "pretrain":
        return add_s2_arguments(argparse.ArgumentParser(add_help=False))
    if "-- " in line.words and line.tool == "check":
        from megatron.training.arguments import add_megatron_arguments

        return add_s2_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    parser = commands._parser(line.tool)
    return parser._subparsers._group_actions[0].choices[line.tool]


def runner(line: tries.Line):
    own = {"quickstart": quickstart, "pretrain": pretrain}
    return own.get(line.tool) or (lambda words: command([line.tool, *words]))


def prepare_streams(stream: str, stdin: str, out: int, err: int) -> None:
    """The standard streams of this fork, as an interpreter opens them."""
    given = {
        "megabytes of stdin": b"def f(x): " * 500_000, "stdin that is no UTF-8": b"\xff\xfedef", "empty stdin": b"",
    }.get(stream, stdin.encode())  # fmt: skip
    with tempfile.TemporaryFile() as read:
        read.write(given)
        read.seek(0)
        os.dup2(read.fileno(), 0)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full if stream == "full stdout" else out, 1)
    os.dup2(full if stream == "full stderr" else err, 2)
    encoding = {"ascii": "ascii", "C locale": "ascii", "latin-1": "latin-1"}.get(stream, "utf-8")
    errors = "surrogateescape" if stream == "C locale" else "strict"
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):  # made by an import; in a command that writes to stderr
            if getattr(getattr(handler, "stream", None), "name", None) == "<stdout>":
                handler.stream = io.StringIO()
    for number, (name, mode) in enumerate((("stdin", "rb"), ("stdout", "wb"), ("stderr", "wb"))):
        if stream == f"closed {name}":
            os.close(number)
            setattr(sys, name, None)
            continue
        escapes = "backslashreplace" if name == "stderr" else errors
        file = os.fdopen(number, mode, closefd=False)
        setattr(sys, name, io.TextIOWrapper(file, encoding, escapes, line_buffering=name == "stderr"))


def limit() -> None:
    data = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    most = int(data.split()[1]) * 1024 + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS + int(time.process_time()), CPU_SECONDS + 600))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)


def forked(run, folder: Path, stream: str, stdin: str) -> dict:
    """Status, output and end of a function in a fork, whose working directory is `folder`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setsid()
                os.chdir(folder)
                prepare_streams(stream, stdin, out.fileno(), err.fileno())
                limit()
                status = run()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
                if status == 1 and end.code != 1:
                    print(end.code, file=sys.stderr)
            except BaseException:  # noqa: BLE001 - what a process shows at its end
                signal.alarm(10)
                os.dup2(err.fileno(), 2)
                os.write(2, traceback.format_exc().encode("utf-8", "backslashreplace"))
            finally:
                for file in (sys.stdout, sys.stderr):
                    try:
                        if file is not None:
                            file.flush()
                    except (OSError, ValueError):
                        if file is sys.stdout:
                            os.write(err.fileno(), b"Exception ignored while flushing sys.stdout\n")
                            status = 120
                os._exit(status)
        _, ended, usage = os.wait4(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    killed = signal.Signals(os.WTERMSIG(ended)).name if os.WIFSIGNALED(ended) else None
    status = None if killed else os.waitstatus_to_exitcode(ended)
    return {
        "status": status,
        "out": texts[0],
        "err": texts[1],
        "killed": killed,
        "seconds": usage.ru_utime + usage.ru_stime,
    }


def full_disk(folder: Path) -> bool:
    """Makes `folder` a disk without room, in this process and its forks alone; whether that is allowed."""
    folder.mkdir()
    try:
        os.unshare(CLONE_NEWNS)
    except OSError:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    private = libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
    if private or libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=16k"):
        return False
    with contextlib.suppress(OSError), (folder / "room").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return True


def try_one(case: tries.Case, lab: Path, full: Path) -> dict:
    """The result of a case, in a folder of its own."""
    line = tries.LINES[case.line]
    with tempfile.TemporaryDirectory(dir=lab.parent) as place:
        work = Path(place)
        for name in ("in", "out", "work", "here"):
            (work / name).mkdir()
        for name in line.inputs:
            source = lab / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, work / "in" / name)
        (work / "loop").symlink_to("loop")
        (work / "work" / "file").write_text("a file")
        if case.changed:
            tries.change(work / "in" / case.changed[0], case.changed[1])
        places = {"{in}": work / "in", "{out}": work / "out", "{work}": work / "work", "{loop}": work / "loop",
            "{full}": full}  # fmt: skip

        def filled(text: str) -> str:
            for name, path in places.items():
                text = text.replace(name, str(path))
            return text

        words = [filled(word) for word in case.words]
        before = {path for top in (work, full) for path in top.rglob("*")}
        result = forked(lambda: runner(line)(words), work / "here", case.stream, filled(line.stdin))
        new = [path for top in (work, full) for path in top.rglob("*") if path not in before and not path.is_dir()]
        kept = ("run_status.json", "lock")  # what they hold is so, whatever else was not written
        result["left"] = [str(path) for path in new if path.name not in kept]
        result["incomplete"] = tries.incomplete([path for path in new if path.is_file()])
        for path in full.iterdir():
            if path.name != "room":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return result


def drawn(names: list[str], lab: Path, share: int) -> list[tries.Case]:
    """The cases of these lines."""
    cases = []
    for name in names:
        line = tries.LINES[name]
        mine = [tries.Case(f"{name}: as it is", name, line.words.split())]
        mine += tries.of_options(name, line, parser_of(line))
        mine += tries.of_files(name, line, lab)
        mine += tries.of_streams(name, line)
        cases += tries.some(mine, share)
    return cases


def main(lab: Path, names: str, share: int) -> None:
    import_all()
    lab.mkdir()
    make_lab(lab)
    full = lab.parent / "full"
    has_full = full_disk(full)
    chosen = list(tries.LINES) if names == "all" else names.split(";")
    cases = drawn(chosen, lab, share)
    if not has_full:
        cases = [case for case in cases if not any("{full}" in word for word in case.words)]
    broken, slowest, statuses = [], [], {}
    writes = {}
    for case in cases:
        result = try_one(case, lab, full)
        result["should write"] = writes.setdefault(case.line, bool(result["left"]))  # the first is the good one
        wrong = tries.mistake(case, result)
        if case.name.endswith(": as it is") and result["status"] != 0:
            wrong = f"the good line ends with status {result['status']}"
        statuses[str(result["status"])] = statuses.get(str(result["status"]), 0) + 1
        slowest.append((round(result["seconds"], 1), case.name))
        if wrong:
            print(case.name, wrong, file=sys.stderr, flush=True)
            broken.append({"case": case.name, "words": case.words, "mistake": wrong, **result})
            for text in ("out", "err"):
                broken[-1][text] = broken[-1][text][-1500:]
    slowest.sort(reverse=True)
    print(
        json.dumps(
            {"tries": len(cases), "statuses": statuses, "full disk": has_full, "slowest": slowest[:8], "broken": broken}
        )
    )


if __name__ == "__main__":
    import argparse

    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
