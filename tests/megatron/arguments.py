"""Argument lists through Megatron's real parser, many in one process: `parse_cases` for tests, this file as a script
for the process.

The process has `torch.cuda` patched to the CPU, which no other test must see, hence a subprocess.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from tests.megatron import forks
from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[2]

# A small GPT that S2 attention accepts, on a CPU without Transformer Engine and Apex.
BASE = {
    "--num-layers": "4", "--hidden-size": "128", "--num-attention-heads": "4", "--group-query-attention": None,
    "--num-query-groups": "2", "--seq-length": "1024", "--max-position-embeddings": "1048576",
    "--position-embedding-type": "rope", "--micro-batch-size": "1", "--attention-dropout": "0", "--hidden-dropout": "0",
    "--transformer-impl": "local", "--no-persist-layer-norm": None, "--no-rope-fusion": None,
    "--no-gradient-accumulation-fusion": None, "--distributed-backend": "gloo",
    "--no-create-attention-mask-in-dataloader": None, "--train-iters": "10", "--lr": "1e-4",
    "--tokenizer-type": "NullTokenizer", "--vocab-size": "512", "--mock-data": None,
}  # fmt: skip

CONFIG = """\
block_size: 64
layers: DSSS
mtp_layers: S
specs:
  S: {local_tokens: 128, stride: 4}
"""


def every_block(head, query_block, key_blocks):
    """A pattern function that attends everything."""
    return key_blocks >= 0


def arguments(changes: dict[str, str | list[str] | None] | None = None, without: tuple[str, ...] = ()) -> list[str]:
    """BASE as a command line, with flags changed, added (None: no value) or left out."""
    flags = {flag: value for flag, value in {**BASE, **(changes or {})}.items() if flag not in without}
    result = []
    for flag, value in flags.items():
        result += [flag, *([] if value is None else value if isinstance(value, list) else [value])]
    return result


def parse_cases(cases: list[dict], **environment: str) -> list[dict]:
    """The results of all cases, in order, from one process. For the keys see `run_case`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cases.json").write_text(json.dumps(cases))
        variables = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "TRITON_INTERPRET": "0",
            **environment,
        }
        forks.run(Path(__file__), [folder], variables, Path(folder))
        return json.loads((Path(folder) / "results.json").read_text())


_base: list = []  # BASE parsed, and parsed and validated


def parse(argv: list[str], attributes: dict | None = None):
    """(Megatron's namespace, the message of Megatron's own refusal or None) for a command line.

    Where Megatron itself refuses the arguments on this machine (for the lack of Transformer Engine, say), the namespace
    is that of BASE with what `argv` changes, so that S2's own answer can be seen.
    """
    from megatron.training.arguments import parse_args, validate_args

    from s2_megatron.megatron.arguments import add_s2_arguments

    def parsed(line):
        sys.argv = ["pretrain_gpt_s2.py", *line]
        return parse_args(add_s2_arguments)

    if not _base:
        plain = parsed(arguments())
        _base.extend([plain, validate_args(copy.deepcopy(plain))])
    wanted = parsed(argv)
    refused = None
    try:
        args = validate_args(copy.deepcopy(wanted))
    except (AssertionError, ValueError, TypeError, RuntimeError) as error:
        refused = f"{type(error).__name__}: {error}"
        plain, args = copy.deepcopy(_base)
        for name, value in vars(wanted).items():
            if value != getattr(plain, name):
                setattr(args, name, value)
    for name, value in (attributes or {}).items():
        setattr(args, name, value)
    return args, refused


def run_case(case: dict) -> dict:
    """argv: a command line; world_size: of the job; connections: CUDA_DEVICE_MAX_CONNECTIONS; attributes: set
    afterwards; version: of megatron-core, pretended; device: pretended type of device; missing: a package that is
    pretended to be missing; unreviewed: arguments that are taken out of REVIEWED (refusals/model.py).

    Returns error (the type's name), message, refused_by_megatron, what prepare_s2 printed, whether it returned a
    run, the softmax scale of the model config that Megatron derives, and the attributes of args that start with
    "s2_" and "flight_".
    """
    import megatron.core.package_info as package_info
    from megatron.training.argument_utils import core_transformer_config_from_args

    from s2_megatron import printing
    from s2_megatron.megatron import arguments
    from s2_megatron.megatron.refusals import model

    result = {"error": None, "message": None, "refused_by_megatron": None, "args": {}}
    import torch

    find_spec, printed = importlib.util.find_spec, io.StringIO()
    printing._printed.clear()

    def found_unless_missing(name, *rest):
        return None if name == case.get("missing") else find_spec(name, *rest)

    try:
        variables = dict(
            WORLD_SIZE=str(case.get("world_size", 1)),
            CUDA_DEVICE_MAX_CONNECTIONS=case.get("connections", "1"),
            TRITON_INTERPRET=case.get("interpret", "0"),
        )
        with patch.dict(os.environ, variables):
            args, result["refused_by_megatron"] = parse(case["argv"], case.get("attributes"))
        with (
            patch.dict(os.environ, TRITON_INTERPRET=variables["TRITON_INTERPRET"]),
            patch.object(package_info, "__version__", case.get("version", package_info.__version__)),
            patch.object(arguments, "compute_device", lambda: torch.device(case.get("device", "cpu"))),
            patch.object(importlib.util, "find_spec", found_unless_missing),
            patch.object(model, "REVIEWED", model.REVIEWED.difference(case.get("unreviewed", ()))),
            contextlib.redirect_stderr(printed),
        ):
            run = arguments.prepare_s2(args)
        result["is_s2"] = run is not None
        result["config_softmax_scale"] = core_transformer_config_from_args(args).softmax_scale
        result["args"] = {name: value for name, value in vars(args).items() if name.startswith(("s2_", "flight_"))}
    except ValueError as caught:
        result |= {"error": type(caught).__name__, "message": str(caught)}
    return {**result, "printed": printed.getvalue()}


def main() -> None:
    folder = Path(sys.argv[1])
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    results = [run_case(case) for case in json.loads((folder / "cases.json").read_text())]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
