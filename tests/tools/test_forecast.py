"""The forecast of step time and memory, against measured steps that it was not fitted to, and against arithmetic."""

import json
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import forecast_tables
from s2_megatron.config.load import SparsityConfig
from s2_megatron.patterns.ranges import make_range_pattern
from s2_megatron.tools.forecast.flags import FLAGS, destination, read_flags, reasons, vocabulary
from s2_megatron.tools.forecast.flops import token_flops
from s2_megatron.tools.forecast.memory import GIB, _checkpoints, memory, rank_parameters
from s2_megatron.tools.forecast.run import dense_sparsity, sparsity_of, training_run
from s2_megatron.tools.forecast.step_time import step_time
from s2_megatron.tools.forecast.tables import Tables, known_gpus, load_tables

SMALL = [
    "--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16", "--ffn-hidden-size", "2816",
    "--swiglu", "--seq-length", "8192", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights",
    "--vocab-size", "32000", "--hidden-dropout", "0", "--bf16", "--micro-batch-size", "1",
    "--use-distributed-optimizer",
]  # fmt: skip
S2 = {"block_size": 64, "layers": "DSSS", "specs": {"S": {"local_tokens": 1024, "stride": 16}}}
TABLES = load_tables("H200")


def run_of(*flags: str, gpus: int | None = None, sparsity: dict | None = S2):
    args = read_flags([*SMALL, *flags])
    if sparsity is None:
        return training_run(args, dense_sparsity(args), gpus)
    return training_run(args, sparsity_of(SparsityConfig.from_data(sparsity), args), gpus)


@pytest.fixture(scope="module")
def built() -> dict:
    return forecast_tables.build()


def test_the_tables_are_those_of_the_results(built):
    """After a new measurement: python benchmarks/forecast_tables.py"""
    assert json.loads(forecast_tables.OUT.read_text()) == json.loads(forecast_tables.as_json(built))


def test_every_measured_step_is_forecast_by_a_fit_without_it(built):
    """Step time within 15 %, peak memory within 10 %."""
    rows = built["checked"]
    for row in rows:
        assert abs(forecast_tables.error(row["forecast_ms"], row["step_ms"])) < 0.15, row
        assert abs(forecast_tables.error(row["forecast_gib"], row["peak_gib"])) < 0.10, row
    names = " ".join(row["row"] for row in rows)
    for part in ("8k-none-s2", "8k-none-mixed", "8k-none-dense", "32k-none-s2", "32k-none-mixed", "32k-none-dense",
                 "128k-full-keep-s2", "128k-full-keep-mixed", "128k-full-dense", "cp2-full-keep-s2",
                 "cp2-full-p2p-dense", "cp4-full-keep-s2", "cp4-full-p2p-dense",
                 "128k-block18-keep-s2", "7b-"):  # fmt: skip
        assert part in names, part


def test_the_page_shows_these_numbers(built):
    page = " ".join((forecast_tables.ROOT / "docs/inspect.md").read_text().split())
    rows = built["checked"]
    times = [100 * forecast_tables.error(row["forecast_ms"], row["step_ms"]) for row in rows]
    peak = max(abs(100 * forecast_tables.error(row["forecast_gib"], row["peak_gib"])) for row in rows)
    half = np.median(np.abs(times))
    assert f"Of {len(rows)} measured steps" in page
    assert f"| {min(times):+.1f} % to {max(times):+.1f} %; half of them within {half:.1f} % |" in page
    assert f"| at most {peak:.1f} % |" in page
    fit = built["fit"]
    assert f"{fit['tflops']:.0f} TFLOP/s" in page and f"{fit['gb_per_s'] / 1e3:.1f} TB/s" in page


@pytest.mark.parametrize(
    "known", [lambda row: "cp" not in row, lambda row: "128k" not in row, lambda row: "32k" in row]
)
def test_steps_of_one_kind_are_forecast_from_the_others(built, known):
    """Context parallelism from one GPU; 128K from 8K and 32K; all from 32K."""
    steps = forecast_tables.measured_steps()
    tables = Tables({**built, "fit": forecast_tables.fit([step for step in steps if known(step[0]["row"])], built)})
    others = [step for step in steps if not known(step[0]["row"])]
    assert len(others) > 4
    for named, run in others:
        assert step_time(run, tables).total * 1e3 == pytest.approx(named["step_ms"], rel=0.15), named


def test_an_attention_row_is_forecast_from_the_others(built):
    """Interpolation over keys a query, head dim and KV heads: every case left out, total within 15 %. The only row of a
    head dim cannot be."""
    rows = [row for row in built["attention"] if row["tokens"] >= 8192]
    dims = [(row["kernels"], row["head_dim"]) for row in rows]
    checked = 0
    for row in rows:
        if dims.count((row["kernels"], row["head_dim"])) == 1:
            continue
        rest = [other for other in built["attention"] if other["case"] != row["case"]]
        time = Tables({**built, "attention": rest}).attention(
            row["kernels"], row["keys"] * row["heads"] * row["tokens"], tokens=row["tokens"], heads=row["heads"],
            kv_heads=row["kv_heads"], head_dim=row["head_dim"], notes=set())  # fmt: skip
        measured = (row["forward_ms"] + row["backward_ms"]) / 1e3
        assert time.forward + time.backward == pytest.approx(measured, rel=0.15), row
        checked += 1
    assert checked > 30


def attention(notes, kernels="S2", **changes):
    shape = dict(tokens=131072, heads=32, kv_heads=32, head_dim=128) | changes
    keys = shape.pop("keys", 5023)
    return TABLES.attention(kernels, keys * shape["heads"] * shape["tokens"], notes=notes, **shape)


@pytest.mark.parametrize("changes, word", [
    (dict(head_dim=80), "head dim 80: measured at 64, 96, 128, 192, 256, taken as at 96"),
    (dict(head_dim=512), "taken as at 256"),
    (dict(keys=200), "at 200 keys a query: measured from"),
    (dict(keys=400_000), "the rate of 33,698 is taken"),
    (dict(kernels="dense", head_dim=64, keys=65536), "dense attention at head dim 64"),
    (dict(kernels="dense", kv_heads=2, keys=65536), "dense attention with 2 KV heads a GPU: measured with 8 or more"),
])  # fmt: skip
def test_what_lies_outside_of_the_tables_is_said(changes, word):
    notes = set()
    time = attention(notes, **changes)
    assert time.forward > 0 and len(notes) == 1 and word in notes.pop()


@pytest.mark.parametrize("tokens, nearest", [(8192, "32,768"), (1 << 20, "131,072")])
def test_an_exchange_over_lengths_that_were_not_measured_is_said(tokens, nearest):
    notes = set()
    rate = TABLES.exchange("sparse", 4, tokens, notes)
    assert rate == TABLES.exchange("sparse", 4, int(nearest.replace(",", "")), inside := set()) and not inside
    (note,) = notes
    assert f"over {tokens:,} tokens: measured from 32,768 to 131,072, the rate of {nearest} is taken" in note


def test_inside_of_the_tables_nothing_is_said_and_the_rows_come_back():
    notes = set()
    time = attention(notes)
    assert not notes
    assert time.forward * 1e3 == pytest.approx(18.2, rel=0.05) and time.backward * 1e3 == pytest.approx(59, rel=0.05)
    # Twice the heads, twice the time; a call of few tokens takes as long as its launches.
    assert attention(notes, heads=64).forward == pytest.approx(2 * time.forward)
    assert attention(notes, tokens=1024, keys=800).backward >= 0.15e-3
    assert attention(notes, kv_heads=1, heads=8).backward > 1.15 * attention(notes, heads=8).backward


def test_an_unknown_gpu_has_no_tables():
    assert load_tables("A100") is None and load_tables("") is None and load_tables("NVIDIA H200") is not None
    assert list(known_gpus()) == ["NVIDIA H200"]
    assert {"torch", "triton"} <= TABLES.content["sources"][0]["versions"].keys() and TABLES.content["hardware"][
        "driver"
    ]
    commands = [command for source in TABLES.content["sources"] for command in source["commands"]]
    assert len(commands) > 10 and all("benchmarks/" in command for command in commands)


def test_flops_are_those_of_the_shapes():
    run = run_of()
    flops = token_flops(run)
    layer = 4 * 1024**2 + 3 * 1024 * 2816
    assert flops.linear == 6 * (8 * layer + 1024 * 32000)
    pattern = make_range_pattern(block_size=64, num_heads=16, num_kv_heads=16, ranges=((16, 1), (None, 16)))
    dense = 16 * 8192 * 8193 // 2
    assert flops.attention == pytest.approx(12 * 64 * (2 * dense + 6 * pattern.attended_pairs(8192)) / 8192)
    assert flops.dense_attention == pytest.approx(12 * 64 * 8 * dense / 8192)
    assert token_flops(run.dense()).attention == flops.dense_attention


def test_memory_is_counted_tensor_by_tensor():
    """A layer of 8, without recomputation, by hand; dense layers copy V and keep no second Q and K."""
    run = run_of(gpus=1)
    found = memory(run)
    parameters = 8 * (4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024) + 2 * 32000 * 1024 + 1024
    assert found.parts["weights"] == 2 * parameters and found.parts["gradients"] == 4 * parameters
    assert found.parts["optimizer"] == 12 * parameters
    norms, mlp, qkv, output = 2 * 4 * 1024, 2 * 3 * 2816, 2 * 3 * 1024, 2 * 1024 + 4 * 16
    s2, dense = norms + mlp + qkv + 2 * 2 * 1024 + output, norms + mlp + qkv + output
    assert found.parts["activations"] == 8192 * (6 * s2 + 2 * dense)
    assert found.at == "loss" and found.parts["logits and loss"] == 8192 * (4 * 1024 + 6 * 32000)
    assert memory(run_of("--recompute-granularity", "full")).parts["activations"] == 8192 * 8 * 2 * 1024


def test_parallelism_divides_memory():
    one = memory(run_of(gpus=1)).parts
    dp = memory(run_of(gpus=4)).parts
    assert dp["optimizer"] == one["optimizer"] // 4 and dp["weights"] == one["weights"]
    tp = memory(run_of("--tensor-model-parallel-size", "4", "--sequence-parallel")).parts
    assert tp["weights"] == pytest.approx(one["weights"] / 4, rel=0.01)
    assert tp["activations"] == pytest.approx(one["activations"] / 4, rel=0.01)
    without = memory(run_of("--tensor-model-parallel-size", "4")).parts
    assert without["activations"] > 1.3 * tp["activations"]
    cp = memory(run_of("--context-parallel-size", "4")).parts
    assert cp["activations"] == one["activations"] // 4 and cp["optimizer"] == one["optimizer"] // 4
    kept = memory(run_of("--context-parallel-size", "4", "--s2-cp-keep-received")).parts
    assert kept["received keys and values"] > 0 == cp["received keys and values"]
    # Half of the layers of two microbatches; the embedding on the first stage alone.
    pp = run_of("--pipeline-model-parallel-size", "2", "--global-batch-size", "8")
    assert memory(pp).parts["activations"] <= one["activations"]
    assert memory(pp).parts["weights"] == pytest.approx(one["weights"] / 2, rel=0.01)


def test_recomputation_trades_time_for_memory():
    plain = run_of(gpus=1)
    runs = {
        "none": plain,
        "selective": replace(plain, recompute="selective", recompute_modules=("core_attn",)),
        "mlp": replace(plain, recompute="selective", recompute_modules=("mlp",)),
        "block": replace(plain, recompute="full", recompute_method="block", recompute_layers=4),
        "keep": replace(plain, recompute="full", keep_attention_output=True),
        "full": replace(plain, recompute="full"),
    }
    held = {name: memory(run).total for name, run in runs.items()}
    time = {name: step_time(run, TABLES).total for name, run in runs.items()}
    assert held["none"] > held["selective"] > held["block"] > held["keep"] > held["full"]
    assert held["selective"] > held["mlp"] > held["full"]
    assert time["none"] < time["selective"] and time["block"] < time["keep"] < time["full"]
    assert time["none"] < time["mlp"] < time["full"]


def test_a_hybrid_model_is_counted_layer_by_layer():
    """More MLPs than attention layers; a pipeline; checkpoints of one and of two layers."""
    pairs = run_of("--hybrid-layer-pattern", "*-" * 8)
    assert memory(pairs).parts == memory(run_of()).parts
    more = run_of("--hybrid-layer-pattern", "*--" * 8)
    mlps = 8 * (3 * 1024 * 2816 + 1024)
    assert rank_parameters(more, 0) - rank_parameters(pairs, 0) == mlps
    assert token_flops(more).linear - token_flops(pairs).linear == 6 * (mlps - 8 * 1024)
    assert token_flops(more).attention == token_flops(pairs).attention
    times = [step_time(run, TABLES).seconds for run in (pairs, more)]
    assert times[1]["attention"] == times[0]["attention"] and times[1]["linear layers"] > times[0]["linear layers"]
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers")
    one, two = (memory(run_of("--hybrid-layer-pattern", "*-" * 8, *full, count)) for count in "12")
    gpt = memory(run_of(*full, "1"))
    assert two.parts == gpt.parts and one.parts["activations"] == 2 * gpt.parts["activations"]
    staged = run_of("--hybrid-layer-pattern", "*-*-|*-*-|*-*-|*-*-", "--pipeline-model-parallel-size", "2", gpus=2)
    assert staged.virtual == 2 and staged.stage_layers(1) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert [staged.attention(layer) for layer in (4, 5, 12)] == [2, None, 6]


@pytest.mark.parametrize(
    "layers, pp, virtual, group, firsts",
    [
        (8, 2, 1, 3, [[0, 3], [4, 7]]),
        (12, 4, 1, 2, [[0, 2], [3, 5], [6, 8], [9, 11]]),
        (12, 4, 1, 4, [[0], [3], [6], [9]]),
        (12, 2, 2, 2, [[0, 2, 6, 8], [3, 5, 9, 11]]),
    ],
)
def test_checkpoints_are_counted_from_the_first_layer_of_a_chunk(layers, pp, virtual, group, firsts):
    flags = ["--num-layers", layers, "--pipeline-model-parallel-size", pp, "--global-batch-size", 8]
    run = run_of(*map(str, flags), gpus=pp, sparsity=S2 | {"layers": "S"})
    run = replace(run, virtual=virtual, recompute="full", recompute_method="uniform", recompute_layers=group)
    assert [sorted(_checkpoints(run, stage)) for stage in range(pp)] == firsts
    assert memory(run).parts["activations"] > 0


def test_time_follows_the_work():
    one = step_time(run_of(gpus=1), TABLES)
    two = step_time(run_of("--global-batch-size", "2", gpus=1), TABLES)
    assert two.tokens == 2 * one.tokens and one.total < two.total < 2 * one.total  # one optimizer step
    assert step_time(run_of(gpus=4), TABLES).tokens_per_second > 3.5 * one.tokens_per_second
    stages = step_time(run_of("--pipeline-model-parallel-size", "2", "--global-batch-size", "4"), TABLES)
    assert stages.seconds["pipeline bubble"] > 0 and any("pipeline" in note for note in stages.notes)
    chunks = ("--num-virtual-stages-per-pipeline-rank", "2")
    interleaved = step_time(run_of("--pipeline-model-parallel-size", "2", *chunks, "--global-batch-size", "4"), TABLES)
    assert interleaved.seconds["pipeline bubble"] < 0.6 * stages.seconds["pipeline bubble"]
    dense = step_time(run_of(sparsity=None, gpus=1), TABLES)
    assert dense.total == step_time(run_of(gpus=1).dense(), TABLES).total > one.total
    ranks = step_time(run_of("--context-parallel-size", "8"), TABLES)
    assert any("exchange sparse over 8 ranks: measured on 2 and 4, taken as on 4" in note for note in ranks.notes)
    local = step_time(run_of("--transformer-impl", "local"), TABLES)
    assert any("Transformer Engine" in note for note in local.notes)
    assert any("more than one host" in note for note in step_time(run_of(gpus=16), TABLES).notes)


@pytest.mark.parametrize("flags, gpus, word", [
    (("--tensor-model-parallel-size", "2"), 3, "expected a multiple of 2; use 4 processes"),
    (("--global-batch-size", "6"), 4, "expected a multiple of 4; use 8"),
    (("--pipeline-model-parallel-size", "3"), None, "expected a multiple of 3; use --num-layers 9"),
    (("--context-parallel-size", "32", "--s2-cp-comm-type", "a2a"), None, "use --s2-cp-comm-type sparse"),
    (("--hidden-size", "1000", "--tensor-model-parallel-size", "16"), None, "--hidden-size 1000"),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(flags, gpus, word):
    with pytest.raises(ValueError, match=word):
        run_of(*flags, gpus=gpus)


def test_flags_of_a_launch_line(tmp_path):
    args = read_flags(["--num-layers", "4", "--lr", "3e-4", "--swiglu", "--num-query-groups", "2", "--mock-data"])
    assert args.num_layers == 4 and args.swiglu and args.cp_comm_type == ["p2p"] and args.hidden_dropout == 0.1
    assert args.num_query_groups == 1 and not args.group_query_attention  # as Megatron, without the flag
    args = read_flags(["--num-layers", "4"], Namespace(num_layers=6, num_query_groups=2, png=None))
    assert (args.num_layers, args.num_query_groups, args.group_query_attention) == (6, 2, True)
    assert set(vars(args)) == {destination(flag) for flag in FLAGS}
    with pytest.raises(ValueError, match="launch line: --num-layers: invalid int value: 'x'; expected what pretrain"):
        read_flags(["--num-layers", "x"])
    assert reasons(["--num-experts", "8", "--fp8-format=hybrid"], {"--num-experts": "a", "--fp8-format": "b"}) == [
        "--num-experts: a",
        "--fp8-format: b",
    ]
    assert vocabulary(read_flags(["--vocab-size", "32001", "--tensor-model-parallel-size", "2"])) == 32256
    assert vocabulary(read_flags(["--tokenizer-model", str(tmp_path)])) is None


def test_the_vocabulary_is_that_of_the_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({f"w{index}": index for index in range(300)}, "w0")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert vocabulary(read_flags(["--tokenizer-model", str(tmp_path)])) == 384
    (tmp_path / "tokenizer.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read .*or give --vocab-size"):
        vocabulary(read_flags(["--tokenizer-model", str(tmp_path)]))


def test_gib_of_a_7b_fits_where_it_should():
    """7B at 8K on one GPU: 18 bytes a parameter are 120 GB; over 8 with the distributed optimizer far less."""
    flags = ("--num-layers", "32", "--hidden-size", "4096", "--num-attention-heads", "32", "--ffn-hidden-size", "11008")
    one, eight = (memory(run_of(*flags, gpus=gpus)).total / GIB for gpus in (1, 8))
    assert one > 110 and 40 < eight < one - 60
