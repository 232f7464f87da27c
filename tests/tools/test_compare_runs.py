"""Runs as `s2-megatron compare` reads them: every kind of log, joined at resumes, grouped into arms and paired."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from s2_megatron.tools.compare.readers import read_run, read_runs
from s2_megatron.tools.compare.runs import TRAINING_LOSS, Piece, join
from s2_megatron.tools.compare.settings import DENSE, check_comparable, make_arms, pair_by_seed, sparsity_of
from tests.tools.logged_runs import ARGUMENTS, BATCH, SEQ_LENGTH, losses, s2_arguments, write_loss_log


def write_events(folder, values, first=1, start=1000.0, throughput=None):
    """One process's event file, as Megatron writes it: scalars with the time of the clock, arguments as texts."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=f".{first}.{start}")

    def scalar(tag, step, value):
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(Event(wall_time=start + step, step=step, summary=summary))

    for name, value in ARGUMENTS.items():
        text = TensorProto(dtype="DT_STRING", string_val=[str(value).encode()])
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        summary = Summary(value=[Summary.Value(tag=f"{name}/text_summary", tensor=text, metadata=metadata)])
        writer.add_event(Event(wall_time=start, step=0, summary=summary))
    for step, value in enumerate(values, first):
        scalar("lm loss", step, value)
        scalar("lm loss vs samples", step * BATCH, value)
        scalar("batch-size", step, BATCH)
        if throughput:
            scalar("throughput", step, throughput)
            scalar("throughput-dense-equivalent", step, 2 * throughput)
    scalar("lm loss validation", first + len(values) - 1, 3.5)
    scalar("lm loss validation", first + len(values) - 1, 9.0)  # the test set, under the same name
    writer.close()
    return folder


def test_a_loss_log(tmp_path):
    values = losses(1, 2)
    run, named = read_run(str(write_loss_log(tmp_path / "quickstart/losses.jsonl", values, seed=7)))
    assert not named and run.name == "quickstart" and run.remarks == ()
    np.testing.assert_array_equal(run.series["lm loss"].values, values)
    np.testing.assert_array_equal(run.steps, np.arange(1, 301))
    assert run.arguments["seed"] == 7
    assert run.axis("tokens")[-1] == 300 * BATCH * SEQ_LENGTH
    assert run.axis("hours")[-1] == pytest.approx(300 * 0.5 / 3600)
    assert run.axis("flops")[-1] == 5e6 * run.axis("tokens")[-1] and run.devices == ()
    assert run.axis("dense-flops")[-1] == 6e6 * run.axis("tokens")[-1]
    assert list(run.series["lm loss validation"].steps) == [100, 200, 300]
    assert set(run.series) >= {"grad-norm", "learning-rate"}


def test_a_resumed_loss_log_keeps_what_reached_the_weights(tmp_path):
    log = tmp_path / "log.jsonl"
    write_loss_log(log, np.full(50, 9.0))
    # Resumed from the checkpoint of iteration 40; then nothing between 60 and 71.
    write_loss_log(log, np.full(20, 5.0), first=41, start=5000.0, append=True)
    write_loss_log(log, np.full(10, 4.0), first=72, start=9000.0, append=True)
    run, _ = read_run(f"name={log}")
    assert run.name == "name"
    assert run.series["lm loss"].values.tolist() == [9.0] * 40 + [5.0] * 20 + [4.0] * 10
    assert run.remarks == (
        f"iterations 41-50 were repeated after a resume: the later ones count ({log})",
        "gap: nothing is logged between iterations 60 and 72",
    )
    # The hours between the pieces are not the training's.
    assert run.axis("hours")[-1] == pytest.approx(70 * 0.5 / 3600)


def test_a_log_of_an_older_release_has_no_arguments_and_no_headers(tmp_path):
    log = tmp_path / "log.jsonl"
    write_loss_log(log, np.full(50, 9.0), header=False)
    write_loss_log(log, np.full(20, 5.0), header=False, first=41, append=True, start=5000.0)
    run, _ = read_run(str(log))
    assert run.arguments is None and "tokens" not in run.axes
    assert run.series["lm loss"].values.tolist() == [9.0] * 40 + [5.0] * 20
    assert "iterations 41-50 were repeated" in run.remarks[0]
    with pytest.raises(ValueError, match="its arguments were not logged"):
        check_comparable([run, run], [])
    with pytest.raises(ValueError, match=r"--x tokens: run log .* expected the arguments global_batch_size"):
        run.axis("tokens")


def test_tensorboard_pieces_and_throughput(tmp_path):
    folder = tmp_path / "one/tensorboard"
    write_events(folder, np.full(50, 9.0), throughput=2.0)
    write_events(folder, np.full(30, 5.0), first=41, start=5000.0, throughput=2.0)
    run, _ = read_run(str(folder))
    assert run.name == "one"
    assert run.series["lm loss"].values.tolist() == [9.0] * 40 + [5.0] * 30
    assert "iterations 41-50 were repeated" in run.remarks[0]
    assert run.series["lm loss validation"].values[-1] == 3.5
    assert run.arguments["seq_length"] == str(SEQ_LENGTH)
    assert run.axis("tokens")[-1] == 70 * BATCH * SEQ_LENGTH
    assert run.axis("hours")[-1] == pytest.approx(70 / 3600)
    assert run.axis("flops")[-1] == pytest.approx(70 * 2e12)
    assert run.axis("dense-flops")[-1] == pytest.approx(70 * 4e12)


def test_a_second_log_of_the_run_fills_in(tmp_path):
    log = write_loss_log(tmp_path / "log.jsonl", np.full(50, 3.25), header=False)
    folder = write_events(tmp_path / "tensorboard", np.full(50, 3.3))
    run, _ = read_run(f"{log},{folder}")
    assert run.remarks == () and set(run.series["lm loss"].values) == {3.25}
    assert run.arguments["seed"] == "1" and run.axis("tokens")[-1] == 50 * BATCH * SEQ_LENGTH


WANDB_RUN = """
import json, sys, wandb
folder, config, first, last = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
wandb.init(project="p", name="n", id="same", resume="allow", dir=folder, config=config)
for step in range(first, last + 1):
    wandb.log({"lm loss": 5 - step / 100}, step)
    wandb.log({"grad-norm": 1.5}, step)
    wandb.log({"samples vs steps": step * 4}, step)
wandb.log({"lm loss validation": 3.5}, last)
wandb.finish()
"""


def test_the_first_entry_of_a_thinned_log_counts_all_its_steps():
    """Entries every ten iterations, the first at 8: its time is that of eight, without the start-up in front of it."""
    entries = range(8, 49, 10)
    piece = Piece("log", {TRAINING_LOSS: dict.fromkeys(entries, 1.0)}, {step: 100 + 0.5 * step for step in entries})
    run = join("run", [[piece]])
    assert run.axis("hours") * 3600 == pytest.approx([0.5 * step for step in entries])


def test_an_offline_wandb_folder(tmp_path, monkeypatch):
    """Two processes of one run, read back with wandb's own reader."""
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for first, last in ((1, 30), (21, 60)):
        command = [sys.executable, "-c", WANDB_RUN, str(tmp_path), json.dumps(ARGUMENTS), str(first), str(last)]
        subprocess.run(command, check=True, timeout=600, capture_output=True)
    run, _ = read_run(str(tmp_path / "wandb"))
    assert run.series["lm loss"].values.tolist() == pytest.approx([5 - step / 100 for step in range(1, 61)])
    assert "iterations 21-30 were repeated" in run.remarks[0]
    assert run.arguments["seq_length"] == SEQ_LENGTH and run.arguments["data_path"] == ["corpus/text"]
    assert run.axis("tokens")[-1] == 60 * BATCH * SEQ_LENGTH
    assert run.series["lm loss validation"].steps.tolist() == [60]
    assert len(run.axis("hours")) == 60


@contextmanager
def wandb_server(path: str, config: dict, rows: list[dict]):
    """The address of a stand-in for a wandb server, which answers the GraphQL queries with which wandb's public API
    reads its one run. path: entity/project/run. rows: of its history, with `_step`."""
    entity, _, name = path.split("/")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args) -> None:
            pass

        def do_POST(self) -> None:
            if self.path != "/graphql":  # telemetry
                self.send_error(404)
                return
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps({"data": answer(asked["query"], asked.get("variables") or {})}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def answer(query: str, variables: dict) -> dict:
        if "viewer" in query:
            return {"viewer": {"id": "1", "entity": entity, "username": entity, "email": "", "flags": "{}"}}
        if {variables.get("name"), variables.get("run"), variables.get("runName")} & {name} == set():
            return {"project": {"run": None}}
        if "parquetHistory" in query:
            run = {"parquetHistory": {"parquetUrls": [], "liveData": []}}
        elif "history(" in query:
            low, high = int(variables["minStep"]), int(variables["maxStep"])
            run = {"history": [json.dumps(row) for row in rows if low <= row["_step"] < high]}
        else:
            run = {
                "id": "1",
                "projectId": "1",
                "name": name,
                "displayName": name,
                "state": "finished",
                "tags": [],
                "user": {"name": entity, "username": entity},
                "config": json.dumps({key: {"value": value} for key, value in config.items()}),
                "summaryMetrics": "{}",
                "systemMetrics": "{}",
                "historyLineCount": len(rows),
                "historyKeys": {"lastStep": max(row["_step"] for row in rows)},
            }
        return {"project": {"run": run}}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_run_of_a_wandb_server(monkeypatch):
    pytest.importorskip("wandb")
    rows = [{"_step": step, "_timestamp": 1000.0 + step, "lm loss": 5 - step / 1000} for step in range(1, 1201)]
    config = ARGUMENTS | {"s2_flops_per_token": {"attended": 2.0, "dense": 3.0}}
    with wandb_server("entity/project/run1", config, rows) as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        run, _ = read_run("entity/project/run1")
        assert len(run.steps) == 1200 and run.series["lm loss"].values[-1] == pytest.approx(3.8)
        assert run.axis("flops")[-1] == 2 * run.axis("tokens")[-1]
        assert read_run("run1", "entity/project")[0].steps.tolist() == run.steps.tolist()
        with pytest.raises(ValueError, match="no such file or folder here, and as entity/project/run the wandb"):
            read_run("entity/project/other")


def test_places_that_hold_no_run(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        read_run(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="expected event files"):
        read_run(str(tmp_path))
    (tmp_path / "a.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"a\.jsonl: not a loss log, .*begins with 'nonsense'"):
        read_run(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text('{"iteration": 1, "lm loss": 3.0}\nnonsense\n')
    with pytest.raises(ValueError, match="line 2: expected one JSON object of a loss log"):
        read_run(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match="no series named 'lm loss'"):
        read_run(str(tmp_path))


def run_with(tmp_path, name="run", steps=30, **arguments):
    return read_run(str(write_loss_log(tmp_path / f"{name}.jsonl", np.full(steps, 3.0), **arguments)))[0]


@pytest.mark.parametrize(
    "changes, kind",
    [
        ({"data_path": ["other"]}, "data: data_path"),
        ({"tokenizer_type": "NullTokenizer"}, "tokenizer: tokenizer_type"),
        ({"global_batch_size": 8}, "batch: global_batch_size 4 and 8"),
        ({"lr": 0.001, "min_lr": 0.0}, "schedule: lr 0.004 and 0.001, min_lr 0.0002 and 0.0"),
        ({"hidden_size": 256}, "model: hidden_size"),
        ({"bf16": True}, "precision: bf16"),
    ],
)
def test_runs_that_differ_in_more_than_sparsity_are_refused(tmp_path, changes, kind):
    runs = [run_with(tmp_path, "one"), run_with(tmp_path, "two", **changes)]
    names = ",".join(changes)
    with pytest.raises(ValueError, match="runs one and two differ in") as refused:
        check_comparable(runs, [])
    assert kind in str(refused.value) and f"--vary {names}" in str(refused.value)
    check_comparable(runs, list(changes))
    check_comparable(runs, ["all"])


def test_megatrons_windows_are_a_part_of_an_s2_runs_sparsity(tmp_path):
    """Those of --s2-config window-size; without S2 they are a setting of the model."""
    windows = dict(window_size=[127, 0], window_attn_skip_freq=2)
    one, plain = run_with(tmp_path, "one"), run_with(tmp_path, "plain", **windows)
    s2_run = run_with(tmp_path, "two", **s2_arguments() | windows)
    check_comparable([one, s2_run], [])
    with pytest.raises(ValueError, match="model: window_size None and"):
        check_comparable([s2_run, plain], [])


def test_what_may_differ(tmp_path):
    one = run_with(tmp_path, "one")
    two = run_with(
        tmp_path, "two", tensor_model_parallel_size=2, save="elsewhere", seed=2, lr="0.004", **s2_arguments()
    )
    check_comparable([one, two], [])
    with pytest.raises(ValueError, match="--vary learning_rate: not among the settings"):
        check_comparable([one, two], ["learning_rate"])
    # A longer run of one schedule, and another schedule that follows from --train-iters.
    check_comparable([one, run_with(tmp_path, "longer", train_iters=600)], [])
    with pytest.raises(ValueError, match="lr_decay_iters 300 and 600"):
        check_comparable([one, run_with(tmp_path, "other", train_iters=600, lr_decay_iters=None)], [])


def test_arms_are_settings_and_pairs_are_seeds(tmp_path):
    dense = [run_with(tmp_path, f"dense{seed}", seed=seed) for seed in (1, 2, 3)]
    s2 = [run_with(tmp_path, f"s2{seed}", seed=seed, **s2_arguments()) for seed in (3, 1)]
    baseline, arm = make_arms([*dense, *s2], [], [False] * 5)
    assert (baseline.name, arm.name) == ("dense", "quickstart")
    assert [run.name for run in baseline.runs] == ["dense1", "dense2", "dense3"]
    pairs = pair_by_seed(arm, baseline, [])
    assert [(own.name, other.name) for own, other in pairs] == [("s23", "dense3"), ("s21", "dense1")]
    (other,) = make_arms([run_with(tmp_path, "s29", seed=9, **s2_arguments())], [], [False])
    with pytest.raises(ValueError, match="s29 has seeds 9 and dense has 1, 2, 3"):
        pair_by_seed(other, baseline, [])
    assert len(pair_by_seed(other, baseline, ["seed"])) == 1


def test_names_and_varied_settings_make_arms(tmp_path):
    low, high = run_with(tmp_path, "low"), run_with(tmp_path, "high", lr=0.01)
    arms = make_arms([low, high], ["lr"], [False, False])
    assert [arm.name for arm in arms] == ["low", "high"]  # as the user calls them
    more = [run_with(tmp_path, f"{name}2", seed=2, lr=lr) for name, lr in (("low", 0.004), ("high", 0.01))]
    arms = make_arms([low, high, *more], ["lr"], [False] * 4)
    assert [arm.name for arm in arms] == ["dense lr=0.004", "dense lr=0.01"]
    again = run_with(tmp_path, "again")
    with pytest.raises(ValueError, match="equal settings and seed 1; expected one run per seed"):
        make_arms([low, again], [], [False, False])
    named = [read_run(f"{name}={tmp_path / file}.jsonl")[0] for name, file in (("triton", "low"), ("gluon", "again"))]
    assert [arm.name for arm in make_arms(named, [], [True, True])] == ["triton", "gluon"]


def test_runs_in_folders_of_one_name_are_told_apart(tmp_path):
    places = [str(write_loss_log(tmp_path / f"{name}/run/losses.jsonl", np.full(30, 3.0))) for name in "ab"]
    assert [run.name for run, _ in read_runs(places)] == places
    assert [run.name for run, _ in read_runs([f"one={places[0]}", places[1]])] == ["one", "run"]


def test_a_dense_yaml_is_dense(tmp_path):
    form = {"format": 1, "layers": [0, 0], "mtp_layers": [], "patterns": [{"kind": "dense"}], "softmax_scale": None}
    assert sparsity_of(run_with(tmp_path, "one", s2_sparsity=json.dumps(form))) == DENSE
    assert sparsity_of(run_with(tmp_path, "two", s2_sparsity="None")) == DENSE
    scaled = json.dumps(form | {"softmax_scale": 0.1})
    assert sparsity_of(run_with(tmp_path, "three", s2_sparsity=scaled)) == scaled


def test_hybrid_models_in_other_pipeline_stages_are_one_model():
    runs = [
        SimpleNamespace(name=name, sources=(name,), arguments={"hybrid_layer_pattern": pattern, "num_layers": 4})
        for name, pattern in (("one", "*-*-"), ("staged", "*-|*-"), ("other", "**--"), ("gpt", None))
    ]
    check_comparable(runs[:2], ())
    for other in runs[2:]:
        with pytest.raises(ValueError, match=r"one and \w+ differ in model: hybrid_layer_pattern \*-\*- and"):
            check_comparable([runs[0], other], ())
