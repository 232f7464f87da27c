"""A Triton that the Hopper kernels were not measured on: the kernels are tried, once, and the portable ones are there.
The trial itself runs in tests/gluon_emulator; here stand-ins give its answers."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from s2_megatron.kernels import dispatch, trial
from s2_megatron.kernels.hopper import launch as hopper
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import build_layout
from tests.ops.test_attention import pattern_of

PATTERN = pattern_of(((2, 1), (None, 2)), 64, 4, 2)
QUERY = torch.empty(1, 4, 128, 64, dtype=torch.bfloat16)
KEY = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16)


def call_with(backend="auto", **flags):
    return AttentionCall(build_layout(PATTERN), 0.1, "sbhd", None, None, backend, **flags)


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """[(arguments, options)] of processes that would have been started; answer: what the next ones say."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trial.triton, "__version__", "3.11.0")
    monkeypatch.setattr(dispatch, "_is_hopper", lambda device: True)
    started = SimpleNamespace(made=[], answer={"reason": None}, status=0, stderr=b"")

    def run(arguments, **options):
        started.made.append((arguments, options))
        if isinstance(started.answer, Exception):
            raise started.answer
        said = b"" if started.answer is None else b"noise\n" + json.dumps(started.answer).encode() + b"\n"
        return subprocess.CompletedProcess(arguments, started.status, said, started.stderr)

    monkeypatch.setattr(trial.subprocess, "run", run)
    new_process()
    yield started
    new_process()


def new_process():
    """Forgets what a new process would not know."""
    trial._known.clear()
    trial.no_gluon.cache_clear()


def chosen(**options):
    return dispatch._hopper(QUERY, KEY, KEY, call_with(**options))


def test_a_trial_that_agrees_is_made_once(runs):
    assert chosen() is hopper and chosen() is hopper
    ((arguments, options),) = runs.made
    assert arguments == [sys.executable, "-m", "s2_megatron.testing.kernel_trial"]
    assert options["timeout"] == trial.SECONDS
    new_process()
    assert chosen() is hopper and len(runs.made) == 1, "the verdict was not stored"


def test_every_kind_has_its_own_trial(runs):
    call = call_with()
    for one in (call, call._replace(deterministic=True)):  # of one layout, which remembers the choice
        assert dispatch._hopper(QUERY, KEY, KEY, one) is hopper
    assert len(runs.made) == 2
    dispatch._hopper(QUERY.half(), KEY.half(), KEY.half(), call_with())
    assert len(runs.made) == 3


def test_another_triton_or_another_source_is_tried_again(runs, monkeypatch):
    chosen()
    new_process()
    monkeypatch.setattr(trial.triton, "__version__", "3.12.0")
    chosen()
    new_process()
    monkeypatch.setattr(trial, "_sources", lambda: "changed")
    chosen()
    assert len(runs.made) == 3


@pytest.mark.parametrize("answer, status, stderr, words",
                         [({"reason": "dQ differs from that of the portable kernels by 0.5"}, 0, b"", "dQ differs"),
                          ({"reason": "CompilationError: no wgmma"}, 0, b"", "CompilationError: no wgmma"),
                          (None, -11, b"", "ended with status -11: no message"),
                          (None, 1, b"Traceback\nModuleNotFoundError: no triton\n", "ModuleNotFoundError: no triton"),
                          (subprocess.TimeoutExpired("trial", 600), 0, b"", "not over after 600 seconds")],
                         ids=["mismatch", "compile error", "crash", "traceback", "endless"])  # fmt: skip
def test_a_trial_that_fails_leaves_the_portable_kernels(runs, answer, status, stderr, words, capsys, monkeypatch):
    monkeypatch.setattr("s2_megatron.printing._printed", set())
    runs.answer, runs.status, runs.stderr = answer, status, stderr
    assert chosen() is None and chosen() is None
    new_process()
    assert chosen() is None and len(runs.made) == 1, "the verdict was not stored"
    printed = [line for line in capsys.readouterr().err.splitlines() if "portable" in line]
    assert len(printed) == 1 and words in printed[0] and "measured on Triton 3.6 and 3.9, this is 3.11.0" in printed[0]
    with pytest.raises(ValueError, match=r"backend=gluon: .*; use backend=auto or triton"):
        chosen(backend="gluon")


def test_a_cache_folder_that_cannot_be_written_is_no_obstacle(runs, monkeypatch):
    def refuse(key):
        raise OSError("read-only file system")

    monkeypatch.setattr(trial, "get_cache_manager", refuse)
    assert chosen() is hopper and chosen() is hopper and len(runs.made) == 1


def test_half_a_verdict_is_none(runs, monkeypatch, tmp_path):
    chosen()
    (path,) = tmp_path.rglob(trial.FILE)
    path.write_text("{")
    new_process()
    assert chosen() is hopper and len(runs.made) == 2


def test_calls_that_the_hopper_kernels_refuse_are_not_tried(runs):
    float32 = [tensor.float() for tensor in (QUERY, KEY, KEY)]
    assert dispatch._hopper(*float32, call_with()) is None and runs.made == []


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0", "3.9.1+git1234"])
def test_versions_that_were_measured_are_not_tried(runs, monkeypatch, version):
    monkeypatch.setattr(trial.triton, "__version__", version)
    assert chosen() is hopper and runs.made == []


@pytest.mark.parametrize("version", ["3.7.1", "3.8.0", "3.10.0"])
def test_other_versions_are_tried(runs, monkeypatch, version):
    monkeypatch.setattr(trial.triton, "__version__", version)
    assert chosen() is hopper and len(runs.made) == 1


def test_an_older_version_has_the_portable_kernels(runs, monkeypatch, capsys):
    monkeypatch.setattr("s2_megatron.printing._printed", set())
    monkeypatch.setattr(trial.triton, "__version__", "3.5.1")
    assert chosen() is None and runs.made == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("the kernels for Hopper need Triton 3.6 or newer, and this is Triton 3.5.1")


def test_a_version_without_what_the_kernels_import(runs, monkeypatch, capsys):
    monkeypatch.setattr("s2_megatron.printing._printed", set())
    monkeypatch.setitem(sys.modules, "s2_megatron.kernels.hopper.launch", None)
    assert chosen() is None and runs.made == []
    assert "the Gluon of Triton 3.11.0 lacks what the kernels for Hopper need" in capsys.readouterr().err


def test_the_process_of_a_trial_starts_and_answers():
    """Without a GPU its answer is that there is none."""
    kind = trial._kind(QUERY, call_with())
    answer = trial._try(torch.device("cpu"), kind, PATTERN)
    assert "cpu is not a Hopper GPU" in answer["reason"]
