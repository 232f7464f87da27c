"""`make pretrain`: its corpus, its data, its logs, and, in real runs of a few iterations, that a killed run joins
without a seam."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from examples.quickstart import dataset, launch, run, summary
from examples.quickstart.corpus import (
    Document,
    collect_documents,
    corpus_hash,
    docstring_document,
    document_hashes,
    source_documents,
)
from examples.quickstart.dataset import END_OF_TEXT, prepare_corpus, shuffled
from examples.quickstart.failures import QuickstartError
from examples.quickstart.progress import OutputFollower, Speed
from s2_megatron.config.load import load_config
from s2_megatron.megatron.records.loss_log import HEADER, read_loss_log, read_records
from tests.megatron.test_loss_log import evaluation, record
from tests.megatron.without_gpt import require_gpt_model

ROOT = Path(__file__).resolve().parents[1]


def resolve(path: Path):
    model = launch.MODEL
    return load_config(path).resolve(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        seq_length=model.seq_length,
    )


# The corpus


def test_the_corpus_is_the_same_every_time_and_sorted():
    first, second = collect_documents(), collect_documents()
    names = [document.name for document in first]
    assert names == sorted(set(names))
    assert corpus_hash(document_hashes(first)) == corpus_hash(document_hashes(second))
    assert sum(len(document.text) for document in first) > 2_000_000
    assert "lib/dataclasses.py" in names
    assert not [name for name in names if "site-packages" in name or "/test/" in name]


def test_c_modules_are_there_as_their_docstrings():
    document = docstring_document("_bisect")
    assert document.name == "docs/_bisect"
    assert "insort" in document.text


def test_sources_leave_out_tests_and_what_is_no_text(tmp_path):
    for name, content in {
        "a.py": b"x = 1\n",
        "test/b.py": b"y\n",
        "empty.py": b" \n",
        "latin.py": b"# \xe9\n",
        "p/c.py": b"z\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert [document.name for document in source_documents(tmp_path)] == ["lib/a.py", "lib/p/c.py"]


# The tokenizer and the indexed dataset

DOCUMENTS = [
    Document(f"lib/{index}.py", f"def function_{index}(argument):\n    return {index} * argument\n" * 5)
    for index in range(12)
]


def small_corpus(root: Path, seed: int = 1, **settings):
    return prepare_corpus(root, seed, vocabulary_size=300, documents=DOCUMENTS, tell=lambda text: None, **settings)


def test_the_indexed_dataset_holds_every_document(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    corpus = small_corpus(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(corpus.tokenizer / "tokenizer.json"))
    data = IndexedDataset(str(corpus.data_prefix))
    texts = [tokenizer.decode(data[index].tolist(), skip_special_tokens=False) for index in range(len(data))]
    assert texts == [document.text + END_OF_TEXT for document in shuffled(DOCUMENTS, 1)]
    assert corpus.description["tokens"] == sum(len(data[index]) for index in range(len(data)))
    assert corpus.description["file_sha256"] == document_hashes(DOCUMENTS)


def test_the_tokenizer_is_what_megatron_loads(tmp_path):
    transformers = pytest.importorskip("transformers")
    corpus = small_corpus(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpus.tokenizer)
    assert len(tokenizer) == 300
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.decode(tokenizer(DOCUMENTS[3].text).input_ids) == DOCUMENTS[3].text


def test_a_corpus_is_prepared_once_and_for_its_seed(tmp_path):
    first = small_corpus(tmp_path)
    before = (first.folder / "text.bin").stat().st_mtime_ns
    again = small_corpus(tmp_path)
    assert again == first
    assert (again.folder / "text.bin").stat().st_mtime_ns == before
    other = small_corpus(tmp_path, seed=2)
    assert other.folder != first.folder
    # The same tokens in another order of documents.
    assert (other.folder / "text.bin").read_bytes() != (first.folder / "text.bin").read_bytes()
    assert (other.tokenizer / "tokenizer.json").read_bytes() == (first.tokenizer / "tokenizer.json").read_bytes()


def test_an_interrupted_preparation_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(dataset, "write_dataset", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small_corpus(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_that_the_corpus_cannot_fill_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"vocabulary 5000: .*use a smaller vocabulary"):
        prepare_corpus(tmp_path, 1, vocabulary_size=5000, documents=DOCUMENTS, tell=lambda text: None)


# What the shipped configs must be


def test_the_shipped_config_is_a_real_s2_run():
    sparsity = resolve(run.DEFAULT_CONFIG)
    assert summary.s2_run_problems(sparsity) == []
    assert sparsity.n_blocks >= 16
    s2 = [layer.pattern for layer in sparsity.layers if layer.kind == "s2"]
    assert 2 * len(s2) >= len(sparsity.layers)
    assert all(pattern.density(launch.MODEL.seq_length) <= 0.6 for pattern in s2)
    assert all(summary.window_tokens(pattern) <= launch.MODEL.seq_length / 4 for pattern in s2)
    assert dataset.VOCABULARY_SIZE >= 2048


def test_the_dense_config_differs_in_the_sparsity_alone():
    sparsity = resolve(ROOT / "configs" / "quickstart_dense.yaml")
    assert {layer.kind for layer in sparsity.layers} == {"dense"}
    assert sparsity.softmax_scale == resolve(run.DEFAULT_CONFIG).softmax_scale


@pytest.mark.parametrize(
    "text, problem",
    [
        ("block_size: 64\nlayers: DS\nspecs: {S: {local_blocks: 1, stride: 4}}", "8 blocks a sequence"),
        ("block_size: 32\nlayers: DDDS\nspecs: {S: {local_blocks: 2, stride: 4}}", "1 of 4 layers are S2"),
        ("block_size: 32\nlayers: DS\nspecs: {S: {local_blocks: 5, stride: 8}}", "window of 160 tokens"),
        ("block_size: 32\nlayers: DS\nspecs: {S: {local_blocks: 4, stride: 2}}", "of the causal pairs, expected 60%"),
    ],
)
def test_a_config_that_is_none_is_told_why(tmp_path, text, problem):
    (tmp_path / "config.yaml").write_text(text)
    problems = summary.s2_run_problems(resolve(tmp_path / "config.yaml"))
    assert any(problem in found for found in problems), problems


# Summaries


def without_clock(path: Path) -> list[dict]:
    """The records of a loss log but for what the clock decides: the headers of its processes and the times."""
    records = [entry for entry in read_records(path) if HEADER not in entry]
    return [{name: value for name, value in entry.items() if name != "time"} for entry in records]


def test_the_summarys_losses():
    records = {iteration: record(iteration, 10.0 - iteration / 10) for iteration in range(1, 51)}
    evaluations = {entry["validation"]: entry for entry in (evaluation(40, 9.0), evaluation(50, 4.5))}
    content = summary.make_summary(records, evaluations, resolve(run.DEFAULT_CONFIG), seed=7)
    assert content["first_loss"] == records[1]["lm loss"]
    assert content["last_loss"] == pytest.approx(sum(10.0 - iteration / 10 for iteration in range(31, 51)) / 20)
    assert content["validation_loss"] == 4.5
    assert content["iterations"] == 50
    assert sum(content["layers"].values()) == launch.MODEL.num_layers
    assert content["seed"] == 7


def test_a_gap_in_the_log_is_no_summary():
    records = {iteration: record(iteration, 5.0) for iteration in (1, 2, 4)}
    with pytest.raises(ValueError, match="lacks iterations"):
        summary.make_summary(records, {}, resolve(run.DEFAULT_CONFIG))
    with pytest.raises(ValueError, match="no evaluation"):
        summary.make_summary({1: record(1, 5.0)}, {}, resolve(run.DEFAULT_CONFIG))


def test_another_sparsity_does_not_continue_a_run(tmp_path):
    (tmp_path / "other.yaml").write_text("block_size: 32\nlayers: DS\nspecs: {S: {local_blocks: 2, stride: 8}}")
    run.check_settings(tmp_path, {"sparsity": resolve(run.DEFAULT_CONFIG).canonical_json()})
    with pytest.raises(run.QuickstartError, match="stride 4 -> 8"):
        run.check_settings(tmp_path, {"sparsity": resolve(tmp_path / "other.yaml").canonical_json()})


def test_the_backend_is_what_the_last_run_said():
    assert (
        run.backend_in("noise\nS2 attention backend: triton (chosen for cuda)\nS2 attention backend: reference (set)\n")
        == "reference"
    )
    assert run.backend_in("noise\n") is None


def test_the_attention_table_is_picked_from_megatrons_output(tmp_path):
    log = tmp_path / "log"
    log.write_text("from an earlier run\n")
    follower = OutputFollower(log, caption_lines=1)
    table = ["Attention of 4 layers", "┏━━┓", "│ 0 │", "└──┘", "attended pairs a sequence: 3"]
    with log.open("a") as file:
        file.write("\n".join(["using world size: 1", *table, "noise", "S2 dense layers: stock", "half a li"]))
    assert list(follower.new_lines()) == [*table, "S2 dense layers: stock"]
    assert follower.table_seen


def test_speed_leaves_the_start_out(monkeypatch):
    speed = Speed(tokens_per_iteration=100)
    for iteration, seconds in ((1, 0.0), (2, 50.0), (4, 60.0), (6, 62.0)):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: seconds)
        speed.update(iteration)
    assert speed.tokens_per_second() == 100.0


# Real runs

ITERATIONS, SAVE_INTERVAL = 16, 4  # enough of them that a run is killed long before its end


def command(runs: Path, *extra: str) -> list[str]:
    return [
        *(sys.executable, "-m", "examples.quickstart.run", "--runs", str(runs)),
        *(f"--iterations={ITERATIONS}", f"--save-interval={SAVE_INTERVAL}", *extra),
    ]


def environment() -> dict[str, str]:
    # The run is a user's: without a GPU it takes the CPU, and Triton is not interpreted.
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}


def finish(runs: Path, *extra: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(runs, *extra), cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, str]:
    """(folder of the runs, what the command printed)"""
    require_gpt_model()
    runs = tmp_path_factory.mktemp("uninterrupted")
    result = finish(runs)
    assert result.returncode == 0, result.stdout + result.stderr
    return runs, result.stdout


# The command with a tenth of the corpus, whose preparation takes half a minute.
SHORT = """
from examples.quickstart import dataset, run
documents = dataset.collect_documents()[::10]
dataset.collect_documents = lambda: documents
run.main()
"""


def test_a_short_run(tmp_path):
    require_gpt_model()
    flags = command(tmp_path, "--iterations=2", "--save-interval=2")[3:]
    done = subprocess.run(
        [sys.executable, "-c", SHORT, *flags], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index("Attention of 4 layers") < done.stdout.index("iteration 2/2")
    content = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    assert content["iterations"] == 2 and content["layers"]["s2"] == 2 and Path(content["checkpoint"]).is_dir()
    assert sorted(read_loss_log(tmp_path / "quickstart" / "losses.jsonl")[0]) == [1, 2]


@pytest.mark.slow
def test_a_run_says_what_it_does_and_sums_up(uninterrupted):
    runs, printed = uninterrupted
    assert "Attention of 4 layers" in printed
    assert printed.index("Attention of 4 layers") < printed.index(f"iteration {ITERATIONS}/{ITERATIONS}")
    content = json.loads((runs / "quickstart" / "summary.json").read_text())
    assert content["iterations"] == ITERATIONS
    assert content["backend"] in ("reference", "triton")
    assert content["layers"]["s2"] >= content["layers"]["dense"]
    assert content["last_loss"] < content["first_loss"]
    assert content["tokens_per_second"] > 0
    assert Path(content["checkpoint"]).is_dir()
    assert not [name for name in content if "sha256" in name] and len(json.dumps(content)) < 4000
    corpus = json.loads((runs / "quickstart" / "corpus.json").read_text())
    assert corpus["file_sha256"]["lib/dataclasses.py"] and corpus["sha256"] == content["corpus"]["sha256"]
    assert len(read_loss_log(runs / "quickstart" / "losses.jsonl")[0]) == ITERATIONS


def test_a_folder_is_waited_for_and_then_refused(tmp_path):
    """The processes of a killed run hold its lock until the last of them has ended."""
    said = Console(file=io.StringIO(), width=200)
    dying = run.lock_run(tmp_path, said)
    assert said.file.getvalue() == ""
    with pytest.raises(QuickstartError, match=r"another `make pretrain` is working in .*; wait for it, or stop it"):
        run.lock_run(tmp_path, said, wait_seconds=0.0)
    end = threading.Timer(0.5, dying.close)
    end.start()
    run.lock_run(tmp_path, said).close()
    end.join()
    assert said.file.getvalue().count("waiting up to 30 s") == 1


def test_a_path_is_shown_as_one_would_type_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run._below_here(tmp_path / "runs" / "x") == "runs/x" and run._below_here(Path("/else/x")) == "/else/x"


@pytest.mark.slow
def test_make_generate_continues_a_prompt(uninterrupted):
    """The same words each time, the prompt as it was given, and nothing else on standard output."""
    runs, _ = uninterrupted
    command = ["make", "-s", "generate", "VENV=", f"PYTHON={sys.executable}", f"RUNS={runs}", "PROMPT=x = 'a b'"]
    printed = [
        subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert printed[0] == printed[1]
    assert printed[0].startswith("x = 'a b'")
    continued = printed[0].removeprefix("x = 'a b'")
    assert len(continued) > 20 and "\ufffd" not in continued


@pytest.mark.slow
def test_a_finished_run_is_left_alone(uninterrupted):
    runs, _ = uninterrupted
    path = runs / "quickstart" / "summary.json"
    before = path.stat().st_mtime_ns, path.read_bytes()
    result = finish(runs)
    assert result.returncode == 0, result.stderr
    assert "finished" in result.stdout
    assert "ITERATIONS=" in result.stdout
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before


@pytest.mark.slow
def test_a_killed_run_resumes_and_its_log_joins_bit_for_bit(uninterrupted, tmp_path):
    runs, _ = uninterrupted
    (tmp_path / "corpus").symlink_to(runs / "corpus")
    folder = tmp_path / "quickstart"
    killed = subprocess.Popen(
        command(tmp_path),
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 1200
    while max(read_loss_log(folder / "losses.jsonl")[0], default=0) <= SAVE_INTERVAL + 1:
        assert killed.poll() is None, (folder / "train.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    checkpoint = run.checkpoint_iteration(folder)
    assert 0 < checkpoint < ITERATIONS
    assert not (folder / "summary.json").exists()

    result = finish(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"continuing from the checkpoint of iteration {checkpoint}" in result.stdout
    joined, whole = (without_clock(parent / "quickstart" / "losses.jsonl") for parent in (tmp_path, runs))
    assert joined == whole


@pytest.mark.gpu
def test_on_a_gpu_the_same_command_takes_the_kernels_and_bf16(uninterrupted):
    runs, _ = uninterrupted
    content = json.loads((runs / "quickstart" / "summary.json").read_text())
    assert content["backend"] == "triton"
    assert re.search(r"\bbf16 \.+ True", (runs / "quickstart" / "train.log").read_text())
