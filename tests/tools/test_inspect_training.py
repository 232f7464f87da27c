"""What `s2-megatron inspect` says of a training: its facts as JSON, the launch line, what the layers see."""

import io
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from s2_megatron.config.load import SparsityConfig
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import make_range_pattern
from s2_megatron.tools import commands
from s2_megatron.tools.forecast.flags import CHECKED, FLAGS, read_flags
from s2_megatron.tools.forecast.tables import NAMED, memory_gib
from s2_megatron.tools.inspect import layer_kinds
from tests.megatron.without_gpt import require_gpt_model

ROOT = Path(__file__).resolve().parents[2]
S2_YAML = str(ROOT / "configs/s2_1p3b_s2.yaml")
MODEL = [
    "--num-layers", "24", "--hidden-size", "2048", "--num-attention-heads", "16", "--ffn-hidden-size", "5632",
    "--swiglu", "--seq-length", "131072", "--position-embedding-type", "rope",
    "--untie-embeddings-and-output-weights", "--vocab-size", "32000", "--hidden-dropout", "0", "--bf16",
    "--micro-batch-size", "1", "--use-distributed-optimizer", "--recompute-granularity", "full",
    "--recompute-method", "uniform", "--recompute-num-layers", "1",
]  # fmt: skip
LINE = ["torchrun", "--nproc-per-node", "4", "pretrain_gpt_s2.py", "--s2-config", S2_YAML, *MODEL, "--lr", "3e-4"]
CP4 = [*LINE, "--context-parallel-size", "4", "--s2-keep-attention-output"]


def inspected(capsys, *arguments) -> dict:
    assert commands.main(["inspect", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_launch_line_gives_everything(capsys):
    facts = inspected(capsys, "--", *CP4)
    model = facts["model"]
    assert (model["gpus"], model["cp"], model["dp"], model["hidden"], model["vocabulary"]) == (4, 4, 1, 2048, 32000)
    assert facts["pairs"]["density"] == pytest.approx(0.0766, abs=1e-4)
    assert facts["flops_per_token"]["model"] == pytest.approx(10.75e9, rel=1e-3)
    forecast = facts["forecast"]
    # 918 and 4204 ms were measured (h200_cp4_end_to_end.json), 23.7 and 20.7 GiB.
    assert forecast["gpu"] == "NVIDIA H200" and forecast["run"]["step_ms"] == pytest.approx(918, rel=0.15)
    assert forecast["dense"]["step_ms"] == pytest.approx(4204, rel=0.15)
    assert forecast["speed_up"] == forecast["dense"]["step_ms"] / forecast["run"]["step_ms"]
    assert sum(forecast["run"]["parts_ms"].values()) == pytest.approx(forecast["run"]["step_ms"])
    assert forecast["run"]["tokens_per_second"] == pytest.approx(131072e3 / forecast["run"]["step_ms"])
    held = facts["memory"]
    assert held["run"]["total_gib"] == pytest.approx(23.7, abs=0.1)
    assert held["dense"]["total_gib"] == pytest.approx(20.7, abs=0.1)
    assert held["by_recompute"]["full, --s2-keep-attention-output"] == held["run"]["total_gib"]
    assert held["by_recompute"]["none"] > 70 and held["by_recompute"]["full"] == pytest.approx(20.7, abs=0.1)
    steps = forecast["step_ms_by_recompute"]
    assert steps["none"] < steps["full, --s2-keep-attention-output"] < steps["full"]
    (exchange,) = facts["exchange"]
    sent = exchange["bytes"]
    assert exchange["used"] == "sparse" and set(sent) == {"sparse", "all_gather", "a2a"}
    # Half of the heads of h200_cp4_collective.json.
    assert sent["sparse"]["forward"] == 115408896 // 2 and sent["all_gather"]["forward"] == 1610612736 // 2
    assert facts["no_forecast"] == [] and facts["balance"]["context_parallel"] == pytest.approx(1.001, abs=1e-3)


def test_flags_before_the_line_win(capsys):
    facts = inspected(capsys, S2_YAML, "--seq-length", "32768", "--gpus", "8", "--num-query-groups", "4", "--", *LINE)
    model = facts["model"]
    assert (model["seq_length"], model["gpus"], model["kv_heads"]) == (32768, 8, 4)
    mixed = inspected(capsys, str(ROOT / "configs/s2_1p3b_mixed.yaml"), "--", *LINE)
    assert [layer["spec"] for layer in mixed["layers"]] == ["S", "D"]


@pytest.mark.parametrize("before, behind", [
    (["--fp16"], []),
    (["--recompute-granularity", "selective"], ["--recompute-method", "block"]),
    (["--recompute-activations"], []),
    (["--recompute-granularity", "full"], ["--recompute-activations"]),
    (["--seq-length", "262144"], ["--max-position-embeddings", "131072"]),
    (["--pipeline-model-parallel-size", "1"],
     ["--pipeline-model-parallel-size", "4", "--num-virtual-stages-per-pipeline-rank", "3"]),
    (["--pipeline-model-parallel-size", "1"],
     ["--pipeline-model-parallel-size", "4", "--num-layers-per-virtual-pipeline-stage", "2"]),
    (["--num-layers-per-virtual-pipeline-stage", "2"],
     ["--pipeline-model-parallel-size", "4", "--num-virtual-stages-per-pipeline-rank", "3"]),
])  # fmt: skip
def test_flags_before_the_line_replace_what_does_not_go_with_them(capsys, before, behind):
    """A "what if" is no mistake: nobody can take a flag out of the line."""
    method = LINE.index("--recompute-method")
    line = (
        [*LINE, *behind] if "--recompute-activations" not in behind else [*LINE[:method], *LINE[method + 4 :], *behind]
    )
    if before == ["--recompute-granularity", "full"]:
        before = [*before, "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    assert inspected(capsys, *before, "--", *line)["no_forecast"] == []


def test_lists_for_each_layer_beside_another_number_of_layers(capsys):
    """One word stands for all layers; of several, nobody can say which layers are gone."""
    sizes = ["--num-layers", "24", "--context-parallel-size", "2"]
    for flag, name in (("--cp-comm-type", "cp_comm_type"), ("--s2-cp-comm-type", "s2_cp_comm_type")):
        default = getattr(read_flags([]), name)
        for words, expected in ((["a2a"] * 24, ["a2a"]), (["a2a"] * 12 + ["all_gather"] * 12, default)):
            line = [*sizes, flag, *words]
            assert getattr(read_flags(line, Namespace(num_layers=4)), name) == expected
            assert getattr(read_flags(line, Namespace(num_layers=24)), name) == words
            assert getattr(read_flags(line, Namespace(seq_length=4096)), name) == words
        line = [*LINE, "--context-parallel-size", "2", flag, *["a2a"] * 24]
        assert inspected(capsys, "--num-layers", "4", "--gpus", "2", "--", *line)["model"]["layers"] == 4


def test_an_exchange_that_was_meant_for_the_s2_layers(capsys):
    """It is refused without a dense layer, too: nothing would read it."""
    line = [*LINE, "--context-parallel-size", "2", "--cp-comm-type", "sparse"]
    assert commands.main(["inspect", "--gpus", "2", "--", *line]) == 2
    error = capsys.readouterr().err
    assert "--cp-comm-type=sparse: Transformer Engine knows no such exchange for dense layers (S2's take" in error


def test_another_context_parallel_size_replaces_its_levels():
    levels = ["--context-parallel-size", "4", "--hierarchical-context-parallel-sizes", "2", "2"]
    assert commands.main(["inspect", "--context-parallel-size", "2", "--", *LINE, *levels]) == 0


CHOICES = {flag: settings for flag, (_, settings) in FLAGS.items()} | CHECKED


@pytest.mark.parametrize("flag", [flag for flag, settings in CHOICES.items() if "choices" in settings])
def test_a_word_that_is_no_choice(capsys, flag):
    assert commands.main(["inspect", "--", *LINE, f"{flag}=x"]) == 2
    error = capsys.readouterr().err
    first = CHOICES[flag]["choices"][0]
    assert error.startswith(f"error: launch line: {flag}: invalid choice: 'x' (choose from ") and first in error
    assert error.endswith("; expected what pretrain_gpt_s2.py --help says\n") and error.count("\n") == 1


def test_a_line_without_s2_is_dense(capsys):
    at = LINE.index("--s2-config")
    facts = inspected(capsys, "--", *LINE[:at], *LINE[at + 2 :])
    assert facts["pairs"]["density"] == 1 and facts["forecast"]["speed_up"] == 1
    assert facts["layers"][0]["cache_tokens"] == 131072


def test_flags_alone_are_a_line(capsys):
    facts = inspected(capsys, S2_YAML, "--", *MODEL, "--tensor-model-parallel-size", "2")
    assert facts["model"]["gpus"] == 2 and facts["forecast"]["run"]["parts_ms"]["tensor-parallel exchange"] > 0


@pytest.mark.slow
def test_what_a_launcher_prints_is_read_from_the_standard_input(capsys, monkeypatch):
    """DRY_RUN=1 examples/pretrain_1p3b.sh | s2-megatron inspect -- -"""
    require_gpt_model()
    variables = {**os.environ, "DRY_RUN": "1", "MOCK_DATA": "1", "SEQ_LENGTH": "32768", "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "examples/pretrain_1p3b.sh"], capture_output=True, text=True, cwd=ROOT, env=variables, check=True
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO(done.stdout))
    facts = inspected(capsys, "--", "-")
    assert facts["model"]["seq_length"] == 32768 and facts["model"]["gpus"] == facts["model"]["dp"] == 8
    assert facts["forecast"]["run"]["step_ms"] > 100
    for text in (" ".join(LINE), " \\\n    ".join(LINE) + "\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert inspected(capsys, "--", "-")["model"]["gpus"] == 4


@pytest.mark.parametrize("flags, reason", [
    (["--num-experts", "8"], "not measured with --num-experts: mixture of experts"),
    (["--fp8-format", "hybrid"], "not measured with --fp8-format: FP8"),
    (["--pipeline-model-parallel-size", "4", "--decoder-first-pipeline-num-layers", "3", "--num-layers", "27"],
     "not measured with --decoder-first-pipeline-num-layers: uneven pipeline stages"),
    (["--mtp-num-layers", "1"], "not measured with --mtp-num-layers: multi-token prediction"),
])  # fmt: skip
def test_what_was_never_measured_has_no_forecast(capsys, tmp_path, flags, reason):
    yaml = tmp_path / "dense.yaml"
    yaml.write_text("block_size: 64\nlayers: D\n" + "mtp_layers: D\n" * ("--mtp-num-layers" in flags))
    for in_line in (True, False) if flags[0] in ("--mtp-num-layers", "--num-experts") else (True,):
        # Before the line or in it.
        facts = inspected(capsys, str(yaml), *(flags * (not in_line)), "--", *LINE, *(flags * in_line))
        assert facts["no_forecast"] == [reason] and "forecast" not in facts and "memory" not in facts
        known = {"--fp8-format", "--decoder-first-pipeline-num-layers"} & set(flags)
        assert ("flops_per_token" in facts) == bool(known) and facts["pairs"]["density"] == 1
    if "--mtp-num-layers" in flags:
        assert inspected(capsys, str(yaml), "--", *LINE, "=".join(flags))["no_forecast"] == [reason]


def test_a_launch_line_whose_tokenizer_is_not_here(capsys, tmp_path):
    """The vocabulary is missing: the reason names the tokenizer's folder and where the flag goes."""
    line = " ".join(LINE).replace("--vocab-size 32000", f"--tokenizer-model {tmp_path}").split()
    assert inspected(capsys, "--", *line)["no_forecast"] == [
        f"--vocab-size not given, and no tokenizer.json in {tmp_path}; add --vocab-size before the --"
    ]
    assert inspected(capsys, "--vocab-size", "32000", "--", *line)["no_forecast"] == []
    line = " ".join(LINE).replace("--vocab-size 32000", "").split()
    assert inspected(capsys, "--", *line)["no_forecast"] == ["--vocab-size not given; add --vocab-size before the --"]


def test_an_unknown_gpu_is_named(capsys):
    facts = inspected(capsys, "--gpu", "NVIDIA A100", "--", *LINE)
    assert "forecast" not in facts and facts["memory"]["run"]["total_gib"] > 10
    memory = "whether it fits into 'NVIDIA A100': the memory of that GPU is not known; it is of "
    assert facts["no_forecast"] == [
        f"{memory}H200, H100, A100 80GB, A100 40GB",
        "step time on 'NVIDIA A100': not measured; there are tables of NVIDIA H200",
    ]
    assert commands.main(["inspect", "--gpu", "NVIDIA A100", "--", *LINE]) == 0
    printed = capsys.readouterr().out
    assert f"no forecast: {memory}" in printed and "no forecast: step time on 'NVIDIA A100'" in printed


def test_the_memory_of_the_gpus_that_are_named():
    assert [memory_gib(name) for name in NAMED] == [139.8, 79.1, 79.1, 39.4]


def test_what_does_not_fit_is_said(capsys):
    """Of a GPU whose speed was not measured, too."""
    line = " ".join(LINE).replace("--micro-batch-size 1", "--micro-batch-size 8").split()
    said = {}
    large, medium, small = (139.8, 2), (79.1, 2), (39.4, 2)
    expected = {"H200": large, "NVIDIA H100": medium, "NVIDIA H100 80GB HBM3": medium, "NVIDIA A100 80GB PCIe": medium,
        "NVIDIA A100-SXM4-40GB": small, "A100": (None, 0)}  # fmt: skip
    for gpu in expected:
        facts = inspected(capsys, "--gpu", gpu, "--", *line)
        assert commands.main(["inspect", "--gpu", gpu, "--", *line]) == 0
        peak = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("│ peak"))
        said[gpu] = facts["memory"].get("gpu_gib"), peak.count("does not fit")
        assert facts["memory"]["run"]["total_gib"] > 140
    assert said == expected


@pytest.mark.parametrize("arguments, word", [
    ([], "--num-layers, --num-attention-heads, --seq-length: not given"),
    (["--", "bash", "train.sh"], "is a shell script"),
    (["--", "torchrun", "--nproc-per-node", "3", *LINE[3:], "--context-parallel-size", "2"], "use 4 processes"),
    (["--", "torchrun", "--nproc-per-node", "gpu", *LINE[3:]], "give --nproc-per-node 8"),
    (["--num-layers", "24", "--num-attention-heads", "16", "--seq-length", "8192"], "CONFIG: not given"),
    (["--context-png", "a.jpg", "--", *LINE], "expected a file name that ends in .png"),
    (["--global-batch-size", "6", "--", *LINE], "use 8"),
])  # fmt: skip
def test_mistakes_are_one_line(capsys, arguments, word):
    assert commands.main(["inspect", *arguments]) == 2
    error = capsys.readouterr().err
    assert word in error and error.startswith("error: ") and error.count("\n") == 1


def test_tables_name_the_gpu_and_the_parts(capsys):
    assert commands.main(["inspect", "--", *CP4]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "Forecast of a step on 4 x NVIDIA H200, ms",
        "Memory of the fullest GPU, GiB allocated",
        "times dense",
        "The query at the end of 131,072 tokens",
        "A layer on 4 context-parallel ranks",
        "optimizer",
        "The same run by recomputation",
        "Forecast from measurements on NVIDIA H200 (torch 2.11",
    ):
        assert words in printed, words


def test_a_million_tokens_take_seconds(tmp_path):
    """In a process of its own, with the whole forecast, context parallelism and the picture: no GPU, no torch. The
    processor's seconds count, which other work on the machine does not change."""
    line = [*LINE, "--seq-length", "1048576", "--context-parallel-size", "4"]
    code = (
        "import sys; from s2_megatron.tools.commands import main; status = main(sys.argv[1:]); "
        "print([name for name in ('megatron', 'triton', 'torch') if name in sys.modules]); sys.exit(status)"
    )
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", "--context-png", str(tmp_path / "a.png"), "--", *line],
        capture_output=True, text=True, cwd=ROOT, check=False)  # fmt: skip
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]" and "1,048,576" in done.stdout
    assert used < 10, f"{used:.1f} s"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


PATTERN = make_range_pattern(block_size=16, num_heads=8, num_kv_heads=2, ranges=((4, 1), (12, 2), (None, 4)))


def brute_kept(pattern, n_blocks, later):
    """The blocks of the first n_blocks that the queries n_blocks - 1 .. later attend, by looking at each."""
    ratio = pattern.num_heads // pattern.num_kv_heads
    kept = np.zeros((pattern.num_kv_heads, n_blocks), dtype=bool)
    for head in range(pattern.num_heads):
        for query in range(n_blocks - 1, later):
            keys = pattern.key_blocks(head, query)
            kept[head // ratio, keys[keys < n_blocks]] = True
    return kept


@pytest.mark.parametrize("ranges", [((4, 1), (12, 2), (None, 4)), ((4, 1), (9, 3), (None, 2)), ((5, 1),), ((None, 1),)])
@pytest.mark.parametrize("slide", ["kv", "query"])
def test_the_cache_holds_what_later_queries_attend(ranges, slide):
    pattern = make_range_pattern(block_size=16, num_heads=8, num_kv_heads=2, ranges=ranges, slide=slide)
    assert np.array_equal(layer_kinds.kept_blocks(pattern, 40), brute_kept(pattern, 40, 120))


def test_what_the_last_query_sees():
    config = {"block_size": 16, "layers": "DS", "specs": {"S": {"local_blocks": 4, "stride": 4}}}
    sparsity = SparsityConfig.from_data(config).resolve(num_layers=4, num_heads=8, num_kv_heads=2, seq_length=640)
    dense, sparse = layer_kinds.layer_kinds(sparsity)
    assert (dense.spec, dense.window, dense.cache_tokens, dense.layers) == ("D", 640, 640, "0, 2")
    pattern = sparsity.layers[1].pattern
    far = [[int(key) for key in pattern.key_blocks(head, 39) if key < 36] for head in range(8)]
    assert sparse.window == 64 and sparse.head_beyond == pytest.approx(16 * np.mean([len(keys) for keys in far]))
    assert sparse.all_beyond == 16 * len({key for keys in far for key in keys})
    assert sparse.layers == "1, 3"


@pytest.mark.parametrize("window, sink", [(100, 0), (96, 5), (16, 40), (7, 16)])
def test_windows_and_sinks_are_counted_to_the_token(window, sink):
    config = {"block_size": 16, "layers": "S", "specs": {"S": {"window": window, "sink_tokens": sink}}}
    sparsity = SparsityConfig.from_data(config).resolve(num_layers=1, num_heads=4, num_kv_heads=2, seq_length=320)
    (kind,) = layer_kinds.layer_kinds(sparsity)
    assert (kind.window, kind.head_beyond, kind.all_beyond) == (window, sink, sink)


@pytest.mark.parametrize(
    "window, sink, ranges",
    [(40, 0, ((3, 1),)), (20, 0, ((1, 2), (5, 1))), (70, 20, ((2, 2), (6, 1))), (None, 0, ((2, 1), (None, 3)))],
)
def test_the_window_ends_where_a_head_misses_a_token(window, sink, ranges):
    """Also where the ranges reach further than the window, or a stride happens to have the next block."""
    pattern = make_range_pattern(
        block_size=16, num_heads=2, num_kv_heads=1, ranges=ranges, window=window, sink_tokens=sink
    )
    for n_blocks in range(20, 32):
        seen = layer_kinds.tokens_beyond(pattern, 0, n_blocks, 0)
        run = layer_kinds.window_tokens(pattern, n_blocks)
        assert run >= max(16, window or 0)
        assert (seen[n_blocks - run // 16 :] == 16).all() and seen[n_blocks - 1 - run // 16] < 16
        assert layer_kinds.tokens_beyond(pattern, 0, n_blocks, run).sum() + run == seen.sum()


def test_windows_of_masks():
    rows = [np.arange(query + 1) if query < 3 else np.array([0, query - 1, query]) for query in range(8)]
    mask = BlockMaskPattern.from_csr(16, 4, 2, [np.cumsum([0, *map(len, rows)])], [np.concatenate(rows)])
    assert layer_kinds.window_tokens(mask, 8) == 32 and layer_kinds.head_groups(mask) == [[0, 1, 2, 3]]
    assert layer_kinds.kept_blocks(mask, 8).sum() == 2 * 3


WINDOWS = ["--s2-config", "window-size", "--window-size", "1023,0", "--window-attn-skip-freq", "4"]


def test_megatrons_windows_are_inspected_without_a_yaml(tmp_path, capsys):
    at = LINE.index("--s2-config")
    line = [*LINE[:at], *LINE[at + 2 :]]
    (tmp_path / "same.yaml").write_text("layers: SSSD\nspecs:\n  S: {window: 1024}\n")
    found = []
    for flags in (WINDOWS, ["--s2-config", str(tmp_path / "same.yaml")]):
        assert commands.main(["inspect", "--json", "--", *line, *flags]) == 0
        found.append(capsys.readouterr().out.replace('"W"', '"S"'))
    assert found[0] == found[1]


def test_windows_are_named_in_place_of_a_yaml(tmp_path, capsys):
    shape = ["--num-layers", "8", "--num-attention-heads", "8", "--seq-length", "8192"]
    assert commands.main(["inspect", "window-size", *WINDOWS[2:], *shape]) == 0
    assert "window 1024" in capsys.readouterr().out
    yaml = tmp_path / "mine.yaml"
    yaml.write_text("layers: S\nspecs:\n  S: {window: 1024}\n")
    assert commands.main(["inspect", str(yaml), *WINDOWS[2:], *shape]) == 2
    assert f"--window-size 1023,0 beside the sparsity {yaml}" in capsys.readouterr().err


@pytest.mark.parametrize("flags, words", [
    (WINDOWS[2:], "--window-size without --s2-config: Megatron's own windows, which inspect does not know"),
    ([*WINDOWS, "--window-attn-skip-freq", "0"], "--window-attn-skip-freq 0: expected a number N from 1"),
    ([*WINDOWS, "--window-size", "x"], "launch line: --window-size: invalid tuple_type value: 'x'"),
    (WINDOWS[:2], "--s2-config window-size without --window-size; expected"),
])  # fmt: skip
def test_what_is_no_window_is_one_line(flags, words, capsys):
    at = LINE.index("--s2-config")
    assert commands.main(["inspect", "--", *LINE[:at], *LINE[at + 2 :], *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_windows_without_megatron_are_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "megatron.training", None)
    assert commands.main(["inspect", "--", *LINE, "--window-size", "1023,0"]) == 2
    assert "are read by megatron-core, which cannot be imported here" in capsys.readouterr().err


def test_a_sink_and_a_window_that_end_in_one_block_are_both_counted():
    pattern = make_range_pattern(
        block_size=64, num_heads=2, num_kv_heads=2, ranges=(), window=[100, 70], sink_tokens=10
    )
    assert layer_kinds.tokens_beyond(pattern, 0, 2, 70).tolist() == [
        10 + 30,
        0,
    ]  # of 128 tokens, the window sees 36 in block 0
    assert layer_kinds.tokens_beyond(pattern, 1, 2, 70).tolist() == [10, 0]
