"""`s2-megatron check` many times in one process, which has Megatron imported and `torch.cuda` on the CPU.

check_cases.py cases IN.json OUT.json      every launch line of IN.json
check_cases.py fuzz EXAMPLES               flags and sparsity YAMLs by hypothesis; raises where the property fails
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import warnings
from pathlib import Path
from unittest.mock import patch

from s2_megatron.megatron.errors import FAULT
from s2_megatron.tools import commands

SECONDS = 10.0
WORKING = "checking the launch line ...\n"  # of a check that takes long


def check(words: list[str], *options: str) -> dict:
    """What `s2-megatron check` does with this launch line."""
    return run(["check", *options, "--", *words])


def run(command: list[str]) -> dict:
    """Status, output and seconds of computing of a command of s2-megatron."""
    out, err, began = io.StringIO(), io.StringIO(), time.process_time()
    with (
        patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1"),
        patch.object(sys, "argv", list(sys.argv)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = commands.main(command)
        except SystemExit as end:  # argparse's, for the options
            status = end.code
    return {"status": status, "out": out.getvalue(), "err": err.getvalue(), "seconds": time.process_time() - began}


def violates(result: dict) -> str | None:
    """How a result breaks the rule: success, or an error line for each mistake and status 2, soon. Further lines of
    an error are indented."""
    lines = [
        line
        for line in result["err"].removeprefix(WORKING).splitlines()
        if "Warning" not in line and "warn" not in line
    ]
    errors = [line for line in lines if line.startswith("error: ")]
    if result["seconds"] > SECONDS:
        return f"it took {result['seconds']:.1f} s"
    if "Traceback" in result["err"] or result["status"] not in (0, 2):
        return f"status {result['status']}"
    if bool(errors) != (result["status"] == 2):
        return f"{len(errors)} error lines with status {result['status']}"
    if FAULT in result["err"]:
        return "a fault of this package"
    if result["status"] == 2 and lines[0] != errors[0]:
        return "something before the error"
    return None


class Outcomes:
    """Of a fuzzed command: each keeps the rule, and both kinds occur."""

    def __init__(self):
        self.seen: dict[int, int] = {}

    def add(self, words: list[str], result: dict) -> None:
        wrong = violates(result)
        assert wrong is None, f"{wrong}: {words}\n{result['err'][-3000:]}"
        self.seen[result["status"]] = self.seen.get(result["status"], 0) + 1

    def report(self) -> None:
        print(json.dumps(self.seen))
        assert self.seen.get(0) and self.seen.get(2), f"one kind of outcome only: {self.seen}"


def cases(source: Path, target: Path) -> None:
    target.write_text(json.dumps([check(words) for words in json.loads(source.read_text())]))


def sparsities():
    """Strategy: a sparsity YAML's content, right and wrong."""
    from hypothesis import strategies as st

    from s2_megatron.config.schema import SpecConfig
    from tests.config.test_config_errors import VALUES

    spec = st.dictionaries(st.sampled_from([*SpecConfig.model_fields, "other"]), VALUES, max_size=4)
    return st.fixed_dictionaries(
        {"layers": st.just("S") | VALUES, "specs": VALUES | st.dictionaries(st.just("S"), spec, max_size=1)},
        optional=dict.fromkeys(("block_size", "mtp_layers", "softmax_scale", "other"), VALUES),
    )


def fuzz_inspect(examples: int) -> None:
    import yaml
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from tests.megatron.arguments import CONFIG

    number = st.integers(-1, 70) | st.sampled_from([128, 8192, 10**6, 2**31, 10**30, "x", "1.5", "", "nan"])
    flags = ["--num-layers", "--num-attention-heads", "--num-query-groups", "--seq-length", "--context-parallel-size",
        "--tensor-model-parallel-size", "--hidden-size", "--kv-channels", "--other"]  # fmt: skip
    changed = st.dictionaries(st.sampled_from(flags), number, max_size=3)

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(changed, st.none() | sparsities(), st.booleans())
    def a_call(extra, sparsity, as_line):
        Path("fuzz.yaml").write_text(CONFIG if sparsity is None else yaml.safe_dump(sparsity))
        model = {"--num-layers": 4, "--num-attention-heads": 4, "--seq-length": 256, "--hidden-size": 64} | extra
        words = [f"{flag}={value}" for flag, value in model.items()]
        if as_line:
            command = ["inspect", "--", "pretrain_gpt_s2.py", "--s2-config=fuzz.yaml", *words]
        else:
            command = ["inspect", "fuzz.yaml", *words]
        outcomes.add(command, run(command))

    outcomes = Outcomes()
    a_call()
    outcomes.report()


def fuzz(examples: int) -> None:
    import argparse

    import yaml
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from megatron.training.arguments import add_megatron_arguments

    from s2_megatron.megatron.arguments import add_s2_arguments
    from tests.megatron.arguments import BASE, CONFIG, arguments

    parser = add_s2_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    flags = {action.option_strings[-1]: action for action in parser._actions if action.option_strings}
    words = st.one_of(
        st.integers(-2, 70).map(str),
        st.sampled_from(["0", "1", "8", "64", str(2**31), str(10**30), "1e999", "nan", "-1", "", " ", "x", "\x1b[31m"]),
        st.sampled_from([".", "/", "/dev/null", "/dev/zero", "/proc/1/mem", "a/b", "\0", "é", "[1]*999999999", "tt|t"]),
        st.text(max_size=6),
        st.sampled_from(list(flags)),
    )

    def given_flag(name):
        action = flags[name]
        value = words if not action.choices else words | st.sampled_from([str(choice) for choice in action.choices])
        if action.nargs == 0:
            return st.just([name])
        if action.nargs in ("+", "*"):
            return st.lists(value, max_size=3).map(lambda values: [name, *values])
        return value.map(lambda text: [name, text])

    changed = st.lists(st.sampled_from(sorted(set(flags) - {"-h", "--help"})).flatmap(given_flag), max_size=4)
    data = sparsities()
    runners = st.sampled_from([[], ["torchrun", "--nproc-per-node", "2"], ["python"], ["srun", "-n", "4", "python"]])

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(runners, changed, st.sets(st.sampled_from(list(BASE)), max_size=1), st.none() | data)
    def a_line(runner, extra, without, sparsity):
        Path("fuzz.yaml").write_text(CONFIG if sparsity is None else yaml.safe_dump(sparsity))
        line = [*runner, "pretrain_gpt_s2.py"] if runner else []
        line += [
            "--s2-config",
            "fuzz.yaml",
            *arguments({"--eval-interval": "10", "--num-workers": "0"}, tuple(without)),
            *(word for words in extra for word in words),
        ]
        outcomes.add(line, check(line))

    outcomes = Outcomes()
    a_line()
    outcomes.report()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    check(["pretrain_gpt_s2.py"])  # imports Megatron, which is no part of what is measured
    if sys.argv[1] == "cases":
        cases(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        {"fuzz": fuzz, "fuzz-inspect": fuzz_inspect}[sys.argv[1]](int(sys.argv[2]))
