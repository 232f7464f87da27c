"""The command that shows what a sparsity YAML means."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from s2_megatron.config.load import load_config
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import make_range_pattern
from s2_megatron.tools import commands
from s2_megatron.tools.inspect import command, pictures
from tests.tools.test_inspect_training import LINE, S2_YAML, inspected

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["--num-layers", "4", "--num-attention-heads", "4", "--num-query-groups", "2", "--seq-length", "512"]
HYBRID = [word for word in LINE if word not in ("--num-layers", "24")]
QUICKSTART = [str(ROOT / "configs/quickstart.yaml"), *FLAGS]
PATTERN = make_range_pattern(
    block_size=16, num_heads=8, num_kv_heads=2, ranges=((2, 1), (6, 2), (None, 4)), layer_index=1, layer_step=1
)


def inspect_command(*arguments) -> int:
    """The exit status of `s2-megatron inspect`."""
    return commands.main(["inspect", *arguments])


@pytest.mark.parametrize("heads", [[0], [5], range(8)])
def test_grid_is_the_pattern(heads):
    grid = pictures.block_grid(PATTERN, heads, 20)
    for query in range(20):
        attended = {int(key) for head in heads for key in PATTERN.key_blocks(head, query)}
        for key in range(20):
            distance = query - key
            if distance < 0:
                expected = pictures.FUTURE
            elif key not in attended:
                expected = pictures.SKIPPED
            else:
                expected = pictures.LOCAL + (0 if distance < 2 else 1 if distance < 6 else 2)
            assert grid[query, key] == expected, (query, key)


def test_grid_of_a_mask():
    rows = [np.array([query]) if query < 2 else np.array([1, query]) for query in range(5)]
    mask = BlockMaskPattern.from_csr(16, 4, 2, [np.cumsum([0, *map(len, rows)])], [np.concatenate(rows)])
    grid = pictures.block_grid(mask, [3], 5)
    assert grid[4].tolist() == [pictures.SKIPPED, pictures.LOCAL, pictures.SKIPPED, pictures.SKIPPED, pictures.LOCAL]
    assert len(pictures.distinct_heads(mask)) == 2


def test_heads_that_share_their_blocks_are_shown_once():
    assert [head for head, _ in pictures.distinct_heads(PATTERN)] == [0, 4]
    by_query = make_range_pattern(block_size=16, num_heads=8, num_kv_heads=2, ranges=((2, 1), (None, 8)), slide="query")
    assert [head for head, _ in pictures.distinct_heads(by_query)] == list(range(8))


def test_shown_layers_cover_the_context():
    sparsity = load_config(QUICKSTART[0]).resolve(num_layers=4, num_heads=4, num_kv_heads=2, seq_length=512)
    assert pictures.shown_layers(sparsity) == [1, 3]


def test_command_prints_the_table_and_draws(tmp_path):
    """As the docstring has it, in a process of its own: no Megatron, no Triton and no torch are imported."""
    picture = tmp_path / "new_folder" / "pattern.png"
    code = (
        "import sys; from s2_megatron.tools.commands import main; status = main(['inspect', *sys.argv[1:]]); "
        "print([name for name in ('megatron', 'triton', 'torch') if name in sys.modules]); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *QUICKSTART, "--tensor-model-parallel-size", "2", "--png", str(picture)],
        capture_output=True, text=True, cwd=ROOT, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (
        "│ 0, 2 " in done.stdout
        and "64.0%" in done.stdout
        and "2 consecutive S layers together cover 100.0%" in done.stdout
    )
    assert "max / mean: 1.0" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
    assert picture.read_bytes().startswith(b"\x89PNG") and 10_000 < picture.stat().st_size < 150_000


def test_docstring_shows_what_is_printed(capsys):
    assert inspect_command(*QUICKSTART) == 0
    printed = capsys.readouterr().out.replace("│", " ")
    for line in command.__doc__.splitlines():
        # The frame of the table is left out there.
        if line.startswith("    ") and not line.lstrip().startswith(("s2-megatron", "--", "layer ", "DRY_RUN")):
            assert " ".join(line.split()) in " ".join(printed.split()), line


@pytest.mark.parametrize("change, word", [
    (["--layers", "0"], "expected an S2 layer; they are [1, 3]"),
    (["--layers", "9"], "expected an S2 layer"),
    (["--num-layers", "5"], "layers (line"),
    (["--num-query-groups", "3"], "--num-query-groups 3"),
    (["--num-query-groups", "0"], "--num-query-groups=0: expected 1 to 4096; use --num-query-groups 1"),
    (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size=0: expected 1 to 65536; use"),
    (["--tensor-model-parallel-size", "3"], "--tensor-model-parallel-size 3: "),
    (["--context-parallel-size", "-1"], "--context-parallel-size=-1: expected 1 to 65536; use"),
    (["--context-parallel-size", "1024", "--seq-length", "10485760"], "use fewer, or a shorter --seq-length"),
    (["--num-layers", "1e9"], "--num-layers: invalid int value: '1e9'; see s2-megatron inspect --help"),
    (["--transformer-impl", "x"], "--transformer-impl: invalid choice: 'x' (choose from "),
    (["--hidden-dropout", "nan"], "--hidden-dropout=nan: expected a number"),
    (["--fp16", "--bf16"], "--fp16 with --bf16: two precisions"),
    (["--kv-channels", "512"], "--s2-config: --kv-channels 512: S2 attention computes head dims up to 256"),
    (["--recompute-granularity", "full"], "--recompute-granularity=full without --recompute-method"),
    (["--recompute-activations", "--recompute-modules", "mlp", "x"], "--recompute-modules=mlp x: no such part"),
    (["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"], "--cross-entropy-fusion-impl native"),
    (["--blocks", "100000"], "expected an integer, 1 to 512"),
    (["--exchange-png", "/"], "a folder; expected a file name that ends in .png"),
    (["--context-png", f"{ROOT}/README.md/a.png"], "README.md is a file; expected a folder; name another one"),
    (["--context-png", "{png}"], "--png is written there; expected a file for each picture"),
    (["--exchange-png", "a.pgn"], "another kind of file; expected a file name"),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path, capsys, change, word):
    try:
        png = str(tmp_path / "a.png")
        status = inspect_command(*QUICKSTART, "--png", png, *(word.format(png=png) for word in change))
    except SystemExit as stop:  # argparse
        status = stop.code
    assert status == 2
    error = capsys.readouterr().err
    assert (
        word in error and error.startswith("error: ") and error.count("\n") == 1 and not (tmp_path / "a.png").exists()
    )


def test_nothing_to_draw(tmp_path, capsys):
    dense = [str(ROOT / "configs/quickstart_dense.yaml"), *FLAGS]
    assert inspect_command(*dense, "--png", str(tmp_path / "a.png")) == 2
    assert "no S2 layer" in capsys.readouterr().err


def test_readme_picture_is_small():
    picture = ROOT / "docs/pattern.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 150_000


def test_the_exchange_of_context_parallel_ranks(tmp_path, capsys):
    file = tmp_path / "exchange.png"
    assert inspect_command(*QUICKSTART, "--context-parallel-size", "2", "--exchange-png", str(file)) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "S over 2 context-parallel ranks: the busiest sends" in capsys.readouterr().out
    assert inspect_command(*QUICKSTART, "--exchange-png", str(file)) == 2
    assert "add --context-parallel-size" in capsys.readouterr().err
    assert inspect_command(*QUICKSTART, "--context-parallel-size", "3") == 2
    assert "use --seq-length 384 or 576" in capsys.readouterr().err


def test_ten_million_tokens_take_seconds(capsys):
    flags = ["--num-layers", "32", "--num-attention-heads", "32", "--seq-length", "10485760"]
    begin = time.process_time()
    assert inspect_command(str(ROOT / "configs/s2_7b_mixed.yaml"), *flags) == 0
    assert time.process_time() - begin < 10
    assert "(29.7%)" in capsys.readouterr().out


# Megatron's HybridModel (--hybrid-layer-pattern).


def test_a_hybrid_model_of_pairs_is_the_gpt(capsys):
    """Full recomputation keeps the input of each half, where a GPT keeps that of a layer."""
    gpt, hybrid = inspected(capsys, "--", *LINE), inspected(capsys, "--", *HYBRID, "--hybrid-layer-pattern", "*-" * 24)
    note = "a HybridModel: no step with it was measured; its layers are taken as the halves of a GPT's"
    assert note in hybrid["forecast"]["run"]["notes"] and hybrid["no_forecast"] == []
    assert [hybrid[name] for name in ("model", "pairs", "layers")] == [
        gpt[name] for name in ("model", "pairs", "layers")
    ]
    assert hybrid["flops_per_token"] == pytest.approx(gpt["flops_per_token"])
    assert hybrid["forecast"]["run"]["parts_ms"] == pytest.approx(gpt["forecast"]["run"]["parts_ms"])
    ours, theirs = (facts["memory"]["by_recompute"] for facts in (hybrid, gpt))
    assert ours["none"] == theirs["none"] and ours["full"] > theirs["full"]
    kinds = {kind["symbol"]: kind["parameters"] for kind in hybrid["kinds"]}
    assert kinds == {"*": 24 * (4 * 2048**2 + 2048), "-": 24 * (3 * 2048 * 5632 + 2048)}
    given = inspected(capsys, "--hybrid-layer-pattern", "*-*-*-", S2_YAML, "--", *LINE)
    assert (
        given["model"]["layers"] == 3 and commands.main(["inspect", "--", *HYBRID, "--hybrid-layer-pattern=*-*-"]) == 0
    )
    assert "in the model" in capsys.readouterr().out


def test_layers_that_no_forecast_knows(capsys):
    pattern = "M*-E" * 6
    experts = ["--num-experts", "8", "--moe-ffn-hidden-size", "512", "--moe-router-topk", "2"]
    facts = inspected(capsys, "--", *HYBRID, "--hybrid-layer-pattern", pattern, *experts)
    reasons = [f"not measured with --hybrid-layer-pattern {pattern}: layers {kind}" for kind in (
        "E, mixture of experts", "M, Mamba")]  # fmt: skip
    assert facts["no_forecast"] == reasons and "memory" not in facts and "forecast" not in facts
    assert facts["model"]["layers"] == 6 and facts["flops_per_token"]["linear"] > 0
    kinds = {kind["symbol"]: kind for kind in facts["kinds"]}
    weights, norm_and_router = 3 * 2048 * 512, 2048 + 8 * 2048
    assert kinds["E"]["parameters"] == 6 * (8 * weights + norm_and_router)
    assert kinds["E"]["active_parameters"] == 6 * (2 * weights + norm_and_router)
    assert kinds["M"]["parameters"] is None and kinds["M"]["layers"] == 6
    dense = [word for word in HYBRID if word not in ("--s2-config", S2_YAML)]
    for pattern, reason in (("*-D-", "layers D"), ("*-/*-", "multi-token prediction"), ("*-*|-", "uneven pipeline")):
        facts = inspected(capsys, "--", *dense, "--hybrid-layer-pattern", pattern)
        assert any(reason in text for text in facts["no_forecast"]) and "memory" not in facts
        assert ("flops_per_token" in facts) == (reason == "uneven pipeline")


def test_a_plan_for_other_attention_layers(capsys, tmp_path):
    (yaml := tmp_path / "plan.yaml").write_text("layers: DDDD\n")
    assert commands.main(["inspect", str(yaml), "--", *HYBRID, "--hybrid-layer-pattern", "*-*--"]) == 2
    error = capsys.readouterr().err
    assert commands.main(["inspect", "--", *HYBRID, "--hybrid-layer-pattern=--"]) == 2
    assert commands.main(["inspect", "--", *HYBRID, "--hybrid-layer-pattern", "*-X"]) == 2
    assert "no layer is called X; expected some of * - E M G D +" in capsys.readouterr().err
    assert "for attention layers (*) among the 5 layers of --hybrid-layer-pattern *-*--: 2" in error
