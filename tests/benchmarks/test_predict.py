"""benchmarks/predict.py: what `sparse` would take on more ranks, from made-up rows."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks import context_parallel as benchmark
from benchmarks import predict as script
from benchmarks.one_layer import pattern_of
from benchmarks.predict import Layer, explained, predict
from s2_megatron.context_parallel.plan import zigzag_blocks

TOKENS, RATE = 131072, 260.0
SETTINGS = vars(benchmark.parse([])) | dict(json=None)
WAYS = ("forward", "backward")
SLOWEST = {2: 0.515, 4: 0.2575, 8: 0.1317}  # of one GPU's time
EACH = [
    dict(
        ranks=ranks,
        rank=rank,
        tokens=TOKENS,
        forward_ms=17.0 * share * (1 - 0.001 * rank),
        one_gpu_forward_ms=17.0,
        step_ms=75.0 * share * (1 - 0.001 * rank),
        one_gpu_step_ms=75.0,
    )
    for ranks, share in SLOWEST.items()
    for rank in range(ranks)
]


@pytest.fixture(scope="module")
def layer():
    return Layer(pattern_of(argparse.Namespace(**SETTINGS)), TOKENS, 128, 2)


@pytest.fixture
def sparse(layer):
    """The row of four ranks, none of whose communication is exposed."""
    costs = layer.costs(4)
    sent = dict(forward=max(costs.sent_forward), backward=max(costs.sent_backward))
    row = dict(exchange="sparse", tokens=TOKENS, ranks=4, one_gpu_forward_ms=17.1, one_gpu_step_ms=74.9)
    row |= {f"{kind}_{way}": count for kind in ("sent", "planned") for way, count in sent.items()}
    row |= dict(all_gather_forward=max(layer.costs(4, "all_gather").sent_forward), work=costs.balance, transfer_ms=0.7)
    return row | dict(forward_ms=4.7, no_comm_forward_ms=4.7, step_ms=19.4, no_comm_step_ms=19.4)


def test_the_prediction_for_as_many_ranks_is_what_was_measured(sparse, layer):
    measured = sparse | dict(forward_ms=4.76, step_ms=20.1)
    found = predict([measured], EACH, layer, 4, RATE)
    for field in ("tokens", "ranks", "sent_forward", "sent_backward", "planned_backward", "all_gather_forward"):
        assert found[field] == measured[field]
    for field in ("forward_ms", "step_ms", "no_comm_step_ms", "work"):
        assert found[field] == pytest.approx(measured[field])
    assert found["speed_up"] == pytest.approx(74.9 / 20.1)


def test_the_prediction_follows_from_its_parts(sparse, layer):
    costs, found = layer.costs(8), predict([sparse], EACH, layer, 8, RATE)
    assert found["predicted"] and (found["ranks"], found["measured_ranks"]) == (8, 4)
    assert (found["sent_forward"], found["sent_backward"]) == (max(costs.sent_forward), max(costs.sent_backward))
    pairs = layer.pattern.attended_pairs(TOKENS)
    assert sum(costs.pairs) == pairs
    assert found["work_ms"] == pytest.approx(sparse["one_gpu_step_ms"] * max(costs.pairs) / pairs)
    # Every transfer is hidden ...
    assert found["step_ms"] == pytest.approx(sparse["step_ms"] * SLOWEST[8] / SLOWEST[4])
    assert found["step_ms"] == pytest.approx(found["work_ms"] + found["overhead_ms"])
    assert all(transfer < beside for transfer, beside in zip(found["transfers_ms"], found["beside_ms"]))
    # ... but not at a tenth of the rate.
    later = predict([sparse], EACH, layer, 8, RATE / 10)
    assert later["rate_gb_per_s"] == pytest.approx(RATE / 10)
    waits = [transfer - beside for transfer, beside in zip(later["transfers_ms"], later["beside_ms"])]
    assert later["step_ms"] - found["step_ms"] == pytest.approx(sum(max(0.0, wait) for wait in waits))
    assert max(waits) > 0


def test_what_was_exposed_grows_with_the_bytes(sparse, layer):
    found = predict([sparse], EACH, layer, 8, RATE)
    grown = sum(found[f"sent_{way}"] for way in WAYS) / sum(sparse[f"sent_{way}"] for way in WAYS)
    exposed = predict([sparse | dict(step_ms=19.4 + 0.5)], EACH, layer, 8, RATE)
    assert exposed["step_ms"] - found["step_ms"] == pytest.approx(0.5 * grown)
    assert f"exposed {0.5 * grown:.2f} ms" in explained(exposed)
    # No more than transfers take.
    most = predict([sparse | dict(step_ms=19.4 + 50)], EACH, layer, 8, RATE)
    assert most["step_ms"] - found["step_ms"] == pytest.approx(sum(found["transfers_ms"]))
    # A step that sends is not the faster one: noise.
    quick = predict([sparse | dict(step_ms=19.2)], EACH, layer, 8, RATE)
    assert quick["step_ms"] == quick["no_comm_step_ms"] == pytest.approx(19.2 * SLOWEST[8] / SLOWEST[4])


def test_own_share_by_counting():
    pattern = pattern_of(
        argparse.Namespace(
            local_tokens=32, block=16, stride=4, window=None, sink_tokens=0, heads=4, kv_heads=2, dense_heads=1
        )
    )
    layer, n_blocks, shares = Layer(pattern, 16 * 32, 16, 2), 32, []
    for rank in range(4):
        own = set(zigzag_blocks(rank, 4, n_blocks).tolist())
        keys = [key for head in range(4) for query in own for key in pattern.key_blocks(head, query).tolist()]
        shares.append(sum(key in own for key in keys) / len(keys))
    assert layer.own_share(4) == pytest.approx(min(shares))


def test_what_a_prediction_needs(sparse, layer):
    with pytest.raises(ValueError, match="transfer_ms above 0; measure again, or give --rate"):
        predict([sparse | dict(transfer_ms=0.0)], EACH, layer, 8)
    with pytest.raises(ValueError, match="no row of sparse at 131072"):
        predict([sparse | dict(exchange="a2a")], EACH, layer, 8)
    for known in (EACH[:-1], EACH[2:]):  # without the last of 8 ranks, without those of 2
        with pytest.raises(
            ValueError, match=r"what each of [28] ranks computes of 131072 tokens is not known; measure"
        ):
            predict([sparse | dict(ranks=2)], known, layer, 8, RATE)


@pytest.fixture
def files(sparse, tmp_path):
    """write(changes of the rows' settings, hardware of each rank's) -> what the command line gets"""

    def write(settings=(), gpu="NVIDIA H200"):
        common = dict(commit="abc1234", settings=SETTINGS | dict(settings), hardware=dict(gpu="NVIDIA H200"))
        short = sparse | dict(tokens=32768)
        (tmp_path / "rows.json").write_text(json.dumps(common | dict(dtype="bfloat16", rows=[short, sparse])))
        each = dict(commit="abc1234", settings=SETTINGS, hardware=dict(gpu=gpu), rows=EACH)
        (tmp_path / "each.json").write_text(json.dumps(each))
        return ["--ranks", "8", "--rows", str(tmp_path / "rows.json"), "--each-rank", str(tmp_path / "each.json")]

    return write


def test_from_the_command_line(files, tmp_path, capsys):
    """One length of two that cannot be predicted is said."""
    out = tmp_path / "predicted.json"
    script.main([*files(), "--json", str(out)])
    printed = capsys.readouterr().out
    assert "rows.json: NVIDIA H200, commit abc1234" in printed and "predicted for 8 ranks" in printed
    assert "not predicted: 32768 tokens: what each of 4 ranks computes of 32768 tokens is not known" in printed
    content = json.loads(out.read_text())
    assert [(row["tokens"], row["ranks"], row["predicted"]) for row in content["rows"]] == [(TOKENS, 8, True)]
    assert [source.rpartition("/")[2] for source in content["sources"]] == ["rows.json", "each.json"]


@pytest.mark.parametrize(
    "made, more, message",
    [
        (dict(settings=dict(two_pass_heads=32)), [], "measured with --two-pass-heads"),
        (dict(settings=dict(documents=16)), [], "measured with --documents"),
        (dict(settings=dict(stride=8)), [], "stride is 8 in the rows, and 16 in those of each rank"),
        (dict(settings=dict(backend="triton")), [], "backend is triton in the rows, and auto"),
        (dict(gpu="another"), [], "GPU is NVIDIA H200 in the rows, and another in those of each rank"),
        (dict(), ["--seq-lengths", "32768"], "32768 tokens: what each of"),
        (dict(), ["--seq-lengths", "65536"], "no row has one of the lengths [65536]"),
        (dict(), ["--rows", "no such file"], "no such file"),
    ],
)
def test_errors_are_one_line_and_status_2(files, made, more, message, capsys):
    with pytest.raises(SystemExit) as end:
        script.main([*files(**made), *more])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_rows_of_an_older_script_are_refused(files, tmp_path, capsys):
    arguments = files()
    content = json.loads((tmp_path / "rows.json").read_text())
    for row in content["rows"]:
        row["silent_step_ms"] = row.pop("no_comm_step_ms")
    (tmp_path / "rows.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as end:
        script.main(arguments)
    assert end.value.code == 2 and "lacks 'no_comm_step_ms'; expected rows of the present" in capsys.readouterr().err
