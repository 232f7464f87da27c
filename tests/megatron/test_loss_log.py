"""The log of exact losses: one writer, cut back to a checkpoint, damaged lines named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from s2_megatron.megatron.loss_log import HEADER, LossLog, _locked, read_loss_log, read_records, truncate_loss_log


def record(iteration: int, loss: float) -> dict:
    return {"iteration": iteration, "lm loss": loss}


def evaluation(iteration: int, loss: float) -> dict:
    return {"iteration": iteration, "validation": f"iteration {iteration} on validation set", "lm loss": loss}


def write_log(path: Path, records: list[dict], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in records) + tail)
    return path


def test_the_log_of_a_killed_run_is_cut_back_to_its_checkpoint(tmp_path):
    records = [record(iteration, 8.0 - iteration) for iteration in range(1, 8)]
    log = write_log(tmp_path / "log", records, tail='{"iteration": 8, "lm lo')
    truncate_loss_log(log, 5)
    assert read_loss_log(log)[0] == {entry["iteration"]: entry for entry in records[:5]}
    assert len(log.read_text().splitlines()) == 5


def test_a_shorter_runs_last_evaluation_goes_when_it_is_continued(tmp_path):
    log = write_log(tmp_path / "log", [record(1, 5.0), evaluation(1, 5.5), record(2, 4.0), evaluation(2, 4.5)])
    truncate_loss_log(log, 2)
    records, evaluations = read_loss_log(log)
    assert list(records) == [1, 2]
    assert list(evaluations) == ["iteration 1 on validation set"]


def test_the_headers_of_processes_that_left_nothing_are_cut(tmp_path):
    header = {HEADER: {"arguments": {}}, "time": 1.0}
    first, resumed = header | {"iteration": 1}, header | {"iteration": 4}
    records = [
        first,
        *(record(number, 5.0) for number in (1, 2, 3)),
        resumed,
        *(record(number, 4.0) for number in (4, 5)),
    ]
    log = write_log(tmp_path / "log", records)
    truncate_loss_log(log, 4)
    assert read_records(log) == records[:-1]
    truncate_loss_log(log, 3)
    assert read_records(log) == records[:4]


def test_a_log_in_use_is_not_cut(tmp_path):
    log = write_log(tmp_path / "log", [record(1, 5.0), record(2, 4.0)])
    with _locked(log), pytest.raises(ValueError, match="being written by another process"):
        truncate_loss_log(log, 1, wait_seconds=0.0)
    assert len(read_loss_log(log)[0]) == 2


def test_a_log_has_one_writer(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    writer = LossLog(tmp_path / "log", dict)
    with pytest.raises(ValueError, match="being written by another process"):
        LossLog(tmp_path / "log", dict)
    writer.append(record(1, 5.0))
    assert read_loss_log(tmp_path / "log")[0] == {1: record(1, 5.0)}  # on disk before the file is closed
    monkeypatch.setenv("RANK", "0")  # the losses are not there
    LossLog(tmp_path / "log", dict).append(record(2, 5.0))
    assert list(read_loss_log(tmp_path / "log")[0]) == [1]


def test_a_process_whose_torchrun_was_killed_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    writer = LossLog(tmp_path / "log", dict)
    writer.append(record(1, 5.0))
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(RuntimeError, match="torchrun"):
        writer.append(record(2, 5.0))


def test_a_damaged_log_is_named(tmp_path):
    (tmp_path / "log").write_text('{"iteration": 1}\nnonsense\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_loss_log(tmp_path / "log")
