"""The log of exact losses: one writer, cut back to a checkpoint, damaged lines named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from s2_megatron.megatron.records.loss_log import (
    HEADER,
    LossLog,
    _locked,
    read_loss_log,
    read_records,
    truncate_loss_log,
)


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


def test_an_unfinished_line_does_not_join_the_next_one(tmp_path):
    log = write_log(tmp_path / "log", [record(1, 5.0)], tail='{"iteration": 2, "lm loss": ' + "1" * 100_000)
    LossLog(log, dict).append(record(2, 4.0))
    assert list(read_loss_log(log)[0]) == [1, 2]
    LossLog(write_log(tmp_path / "piece", [], tail='{"iter'), dict).append(record(1, 4.0))
    assert list(read_loss_log(tmp_path / "piece")[0]) == [1]


def test_a_resumed_process_takes_back_what_came_after_its_checkpoint(tmp_path):
    """The first process came to 6, the second one goes on from 3 and ends at 5; evaluations follow."""
    header = {HEADER: {"arguments": {}}, "time": 1.0, "iteration": 1}
    first = [header, *(record(number, 5.0) for number in range(1, 7)), evaluation(3, 5.5), evaluation(6, 5.5)]
    second = [header | {"iteration": 4}, record(4, 4.0), record(5, 4.0)]
    records, evaluations = read_loss_log(write_log(tmp_path / "log", first + second))
    assert {number: entry["lm loss"] for number, entry in records.items()} == {1: 5, 2: 5, 3: 5, 4: 4, 5: 4}
    assert [entry["iteration"] for entry in evaluations.values()] == [3]
    # A process that only evaluates takes nothing back.
    log = write_log(tmp_path / "evaluated", [*first, header | {"iteration": 6}, evaluation(6, 4.0)])
    records, evaluations = read_loss_log(log)
    assert list(records) == [1, 2, 3, 4, 5, 6] and evaluations["iteration 6 on validation set"]["lm loss"] == 4.0


def test_a_full_disk_is_named(tmp_path):
    writer = LossLog(tmp_path / "log", dict)
    with open("/dev/full", "w") as full:
        writer.file = full
        with pytest.raises(ValueError, match="cannot be written: No space left on device"):
            writer.append(record(1, 5.0))
        full.buffer.raw.close()


def test_a_damaged_log_is_named(tmp_path):
    (tmp_path / "log").write_text('{"iteration": 1}\nnonsense\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_loss_log(tmp_path / "log")
