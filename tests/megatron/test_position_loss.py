"""The loss by position: what its sums are, and that in every layout they give Megatron's own loss."""

from __future__ import annotations

import pytest
import torch

from s2_megatron.megatron.records.loss_log import read_loss_log
from s2_megatron.megatron.records.position_loss import EVALUATE, TRAIN, PositionLoss, packed_positions
from tests.megatron.conftest import altered
from tests.tiers import mostly_slow

BUCKETS = 4
KEY = "lm loss by position/"
COUNT = "tokens by position/"
PACKED = "--dataloader-inter-document-masking"
CP2 = "--context-parallel-size 2"
LAYOUTS = {
    "micro_batch_2": (1, "--micro-batch-size 2"),
    "cp2": (2, CP2),
    "cp2_packed": (2, f"{CP2} {PACKED} --micro-batch-size 2 --s2-cp-comm-type all_gather"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "dp2": (2, ""),
    "pp2_vpp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "pp2_packed": (2, f"--pipeline-model-parallel-size 2 {PACKED}"),
    "cp2_pp2": (4, f"{CP2} --pipeline-model-parallel-size 2"),
}


def test_sums_by_bucket():
    sums = PositionLoss(4, 32)
    losses, mask = torch.arange(64.0).view(2, 32), torch.ones(2, 32)
    mask[0, 5] = 0.0
    positions = torch.arange(32).expand(2, 32)
    sums.add(losses, mask, positions)
    sums.add(losses + 1, mask, positions)
    with torch.no_grad():
        sums.add(losses * 0, mask, positions)
    found = sums.read(TRAIN)
    assert list(found) == ["00-07", "08-15", "16-23", "24-31", "trailing"]
    counted = torch.cat([losses[0, :5], losses[0, 6:8], losses[1, :8]]).double()
    assert found["00-07"] == (counted.mean().item() + 0.5, 30.0)
    assert found["trailing"] == (losses[:, 28:].double().mean().item() + 0.5, 16.0)
    assert sums.read(TRAIN) == {} and sums.read(EVALUATE)["08-15"] == (0.0, 16.0)


def test_sums_stay_where_a_graph_adds_to_them():
    """A CUDA graph of whole iterations repeats the addition without Python: into the tensor it was captured with."""
    sums = PositionLoss(2, 8)
    sums.add(torch.ones(8), torch.ones(8), torch.arange(8))
    captured = sums.sums[TRAIN]
    for number in range(2):
        assert list(sums.read(TRAIN).values()) == [(1.0, 4.0), (1.0, 4.0), (1.0, 1.0)], number
        captured += torch.tensor([[4.0, 4.0], [4.0, 4.0], [1.0, 1.0]])


def test_buckets_that_do_not_divide_the_context():
    sums = PositionLoss(3, 10)
    sums.add(torch.ones(10), torch.ones(10), torch.arange(10))
    counts = {name: count for name, (_, count) in sums.read(TRAIN).items()}
    assert counts == {"0-3": 4, "4-6": 3, "7-9": 3, "trailing": 1}
    for wrong in (0, 11, -1):
        with pytest.raises(ValueError, match=f"--s2-position-loss {wrong} with --seq-length 10; expected 1 to 10"):
            PositionLoss(wrong, 10)


def test_empty_buckets_are_left_out():
    sums = PositionLoss(4, 32)
    sums.add(torch.ones(8), torch.ones(8), torch.arange(8))
    assert list(sums.read(TRAIN)) == ["00-07"]


def test_positions_in_documents():
    borders = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    assert packed_positions(borders, 10).tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 1]


def by_position(record: dict, key: str = KEY) -> dict[str, float]:
    return {name.removeprefix(key): value for name, value in record.items() if name.startswith(key)}


def check_sum(record: dict) -> None:
    """The buckets, weighted by their tokens, are Megatron's loss."""
    losses, counts = by_position(record), by_position(record, COUNT)
    assert set(losses) == set(counts)
    buckets = [name for name in losses if name != "trailing"]
    mean = sum(losses[name] * counts[name] for name in buckets) / sum(counts[name] for name in buckets)
    assert mean == pytest.approx(record["lm loss"], rel=2e-6)


@pytest.fixture(scope="session")
def logged(lab, start, baseline):
    """Runs a layout for three steps and an evaluation from the common checkpoint; its records."""

    def run(name, processes, flags):
        flags = f"""--train-iters 20 --exit-interval 13 --load {start} --ckpt-step 10 --s2-position-loss {BUCKETS}
            --eval-iters 2 --eval-interval 12 {flags}"""
        lab.run(f"position_{name}", flags, processes=processes)
        return read_loss_log(lab.folder / f"position_{name}.jsonl")

    return run


@pytest.fixture(scope="session")
def references(logged):
    return {packed: logged(f"reference_{packed}", 1, PACKED if packed else "") for packed in (False, True)}


def test_the_buckets_of_one_process(references, baseline):
    for records, evaluations in references.values():
        assert sorted(records) == [11, 12, 13] and len(evaluations) == 1
        for record in [*records.values(), *evaluations.values()]:
            check_sum(record)
    records, _ = references[False]
    assert records[11]["lm loss"] == baseline.losses[11]  # looking changes nothing
    counts = by_position(records[11], COUNT)
    assert counts == {"000-031": 128, "032-063": 128, "064-095": 128, "096-127": 128, "trailing": 64}
    packed_counts = [count for name, count in by_position(references[True][0][11], COUNT).items() if name != "trailing"]
    # A document that has a position has all those before it.
    assert packed_counts == sorted(packed_counts, reverse=True) and packed_counts[0] > 1.5 * packed_counts[1]
    assert sum(packed_counts) == 4 * 128


@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, "cp2"))
def test_every_layout_has_the_same_buckets(logged, references, name):
    processes, flags = LAYOUTS[name]
    records, evaluations = logged(name, processes, flags)
    expected_records, expected_evaluations = references[PACKED in flags]
    assert sorted(records) == [11, 12, 13] and list(evaluations) == list(expected_evaluations)
    for record, expected in [
        *((records[step], expected_records[step]) for step in records),
        *((evaluations[name], expected_evaluations[name]) for name in evaluations),
    ]:
        check_sum(record)
        assert by_position(record, COUNT) == by_position(expected, COUNT)
        assert by_position(record) == pytest.approx(by_position(expected), rel=1e-5)


@pytest.mark.slow
def test_conversations_that_are_cut_one_by_one(lab, conversations):
    """--sft: every conversation is padded and cut over the ranks by itself."""
    path, tokenizer, stand_in = conversations
    flags = f"""--sft --sft-tokenizer-prompt-format default --tokenizer-type SFTTokenizer --tokenizer-model {tokenizer}
        --data-path {path} --split 100,0,0 --train-iters 2 --calculate-per-token-loss --seq-length 256
        --max-position-embeddings 256 --s2-position-loss {BUCKETS}"""
    options = dict(python_path=stand_in, **altered("padded"))
    found = []
    for name, layout, processes in (("one", "", 1), ("cp2", f"{CP2} --s2-cp-comm-type all_gather", 2)):
        lab.run(f"position_sft_{name}", f"{flags} {layout}", processes=processes, **options)
        found.append(read_loss_log(lab.folder / f"position_sft_{name}.jsonl")[0])
    one_process, cut = found
    assert sorted(cut) == [1, 2]
    for step, record in cut.items():
        check_sum(record)
        assert by_position(record, COUNT) == by_position(one_process[step], COUNT)
        assert by_position(record) == pytest.approx(by_position(one_process[step]), rel=1e-5)
