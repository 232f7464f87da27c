"""FLOPs against counts made from the attention masks themselves, packed and unpacked, on one and on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from s2_megatron.config.load import load_config
from s2_megatron.megatron.records.flops import PairTable
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern
from s2_megatron.testing.oracle import token_mask
from tests.megatron.arguments import ROOT, arguments
from tests.processes import free_port, python_path

BLOCK = 16
CONFIG = "block_size: 16\nlayers: DSSS\nmtp_layers: S\nspecs:\n  S: {local_blocks: 2, stride: 4}\n"


def mask_pairs(pattern, length: int) -> int:
    """Attended pairs of a document, from the token mask of every head."""
    return int(token_mask(pattern, length).sum()) if length else 0


def no_diagonal(head, query_block, key_blocks):
    """Blocks that are a multiple of three back, and the first; not always the own one."""
    return ((query_block - key_blocks) % 3 == 1 + head % 2) | (key_blocks == 0)


PATTERNS = {
    "range": make_range_pattern(block_size=BLOCK, num_heads=4, num_kv_heads=2, ranges=((2, 1), (None, 4))),
    "range_dense_head": make_range_pattern(
        block_size=BLOCK, num_heads=4, num_kv_heads=4, ranges=((1, 1), (3, 2), (6, 4)), dense_heads={"last": 1}
    ),
    "dense": RangePattern.dense(BLOCK, 4, 2),
    "tokens": make_range_pattern(
        block_size=BLOCK, num_heads=4, num_kv_heads=2, ranges=((None, 4),), window=[37, 9], sink_tokens=21
    ),
    "mask": BlockMaskPattern.from_function(BLOCK, 4, 2, 20, no_diagonal),
}


@pytest.mark.parametrize(
    "names",
    [
        ["range"],
        ["range_dense_head"],
        ["dense"],
        ["mask"],
        ["tokens"],
        [],
        ["range", "range", "mask", "range_dense_head", "tokens"],
    ],
)
def test_pair_table_equals_the_masks(names):
    patterns = [PATTERNS[name] for name in names]
    table = PairTable(patterns, BLOCK, 200)
    lengths = [0, 1, 15, 16, 17, 31, 32, 100, 191, 200]
    counted = table.pairs(torch.tensor(lengths, dtype=torch.int32))
    assert counted.tolist() == [sum(mask_pairs(pattern, length) for pattern in patterns) for length in lengths]
    assert counted.tolist() == [
        sum(pattern.attended_pairs(length) for pattern in patterns) if length else 0 for length in lengths
    ]


def test_pair_table_refuses_longer_documents_than_it_knows():
    with pytest.raises((IndexError, RuntimeError)):
        PairTable([PATTERNS["range"]], BLOCK, 64).pairs(torch.tensor([256]))


def megatron(requests: list[dict], ranks: int = 1) -> list:
    """The results of flops_in_megatron.py on some ranks."""
    port = free_port()
    processes = []
    for rank in range(ranks):
        variables = dict(
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            PYTHONPATH=python_path(),
            OMP_NUM_THREADS="1",
            CUDA_DEVICE_MAX_CONNECTIONS="1",
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "megatron" / "flops_in_megatron.py"), json.dumps(requests)],
                cwd=ROOT,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=600) for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(
        f"{out[-2000:]}\n{err[-3000:]}" for out, err in outputs
    )
    return json.loads(outputs[0][0].split("result:")[-1])


LENGTH = 256

# What changes in a command line, with (KV heads, MTP layers) of the model.
MODELS = {
    "gqa": ({}, 2, 0),
    "odd_length": ({"--seq-length": "250"}, 2, 0),
    "mha": ({"without": "--group-query-attention"}, 4, 0),
    "head_dim": ({"--kv-channels": "48", "--swiglu": None, "--attention-output-gate": None}, 2, 0),
    "moe": ({"--num-experts": "4", "--moe-layer-freq": "2", "--moe-shared-expert-intermediate-size": "64"}, 2, 0),
    "mtp": ({"--mtp-num-layers": "2"}, 2, 2),
    "mtp_repeated": ({"--mtp-num-layers": "2", "--mtp-use-repeated-layer": None}, 2, 1),
    "hybrid": ({"--hybrid-layer-pattern": "*-*E*--*", "--num-experts": "4"}, 2, 0),
    "hybrid_mtp": ({"--hybrid-layer-pattern": "*-*-*-*-/*-/*-"}, 2, 2),
    "moe_mtp": ({"--mtp-num-layers": "1", "--num-experts": "4"}, 2, 1),
}

# [iteration][data-parallel rank][micro-batch] -> documents
ITERATIONS = [[[[100, 156], [256]], [[17, 239], [1, 255]]], [[[64, 64, 128], [200, 56]], [[256], [30, 40, 50, 136]]],
              [[[256], [256]], [[128, 128], [100, 100, 56]]], [[[31, 225], [77, 179]], [[90, 166], [64, 192]]],
              [[[250, 6], [10, 246]], [[255, 1], [128, 128]]]]  # fmt: skip


def documents_of(iteration, ranks):
    return [length for rank in iteration[:ranks] for micro_batch in rank for length in micro_batch]


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("flops") / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture(scope="session")
def on_one_rank(config) -> dict:
    """{name: result} of everything that one process can do."""

    def line(changes):
        flags = {"--seq-length": str(LENGTH), **changes, "--s2-config": config}
        left_out = flags.pop("without", None)
        return arguments(flags, () if left_out is None else (left_out,))

    def loop(iterations=ITERATIONS, settings=None, **changes):
        return dict(task="packed", argv=line(changes), iterations=iterations, settings=settings or {})

    packed = {"--dataloader-inter-document-masking": None, "--log-interval": "2", "--train-iters": "100"}
    requests = {
        "models": dict(task="formula", argvs=[line(changes) for changes, _, _ in MODELS.values()]),
        "packed": loop(**packed),
        "virtual": loop(settings={"virtual_pipeline_model_parallel_size": 2}, **packed),
        "saved": loop(
            **{**packed, "--log-interval": "100", "--train-iters": "5", "--save": "run", "--save-interval": "3"}
        ),
        "unpacked": loop([[[]]] * 4, **{"--log-interval": "1"}),
        "seconds": dict(task="timing", argv=line({"--seq-length": str(2**20)})),
    }
    return dict(zip(requests, megatron(list(requests.values())), strict=True))


@pytest.fixture(scope="session")
def on_two_ranks(config) -> dict:
    """{tensor-parallel size: result} of the packed training loop."""
    flags = {
        "--seq-length": str(LENGTH),
        "--s2-config": config,
        "--dataloader-inter-document-masking": None,
        "--log-interval": "2",
    }
    requests = {
        size: dict(
            task="packed",
            iterations=ITERATIONS,
            settings={"train_iters": 100},
            argv=arguments({**flags, "--tensor-model-parallel-size": str(size)}),
        )
        for size in (1, 2)
    }
    return dict(zip(requests, megatron(list(requests.values()), ranks=2), strict=True))


def sparsity(config, length, kv_heads=2, mtp=0):
    return load_config(config).resolve(
        num_layers=4, num_heads=4, num_kv_heads=kv_heads, seq_length=length, mtp_num_layers=mtp
    )


@pytest.mark.parametrize("index, name", [*enumerate(MODELS)])
def test_unpacked_models(on_one_rank, config, index, name):
    """stock - counted = what the S2 layers do not compute of dense causal attention: 12 D FLOPs a pair, L^2/2 pairs a
    dense head."""
    result = on_one_rank["models"][index]
    changes, kv_heads, mtp = MODELS[name]
    length = int(changes.get("--seq-length", LENGTH))
    resolved = sparsity(config, length, kv_heads, mtp)
    layers = resolved.layers + resolved.mtp_layers * (2 if name == "mtp_repeated" else 1)
    attended = [mask_pairs(layer.pattern, length) for layer in layers if layer.pattern is not None]
    not_computed = sum(4 * length**2 / 2 - pairs for pairs in attended)
    assert result["counted"] == pytest.approx(
        result["stock"] - 3 * 12 * result["kv_channels"] * not_computed, rel=1e-12
    )
    assert result["dense"] == result["stock"]
    assert result["counted"] < 0.99 * result["stock"]


def matrix_flops(tokens: int) -> float:
    """6 FLOPs a weight and token for the matrices of the "gqa" model."""
    hidden, heads, kv_heads, dim, ffn, vocabulary = 128, 4, 2, 32, 512, 512
    return (
        6
        * tokens
        * (4 * (hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden + 2 * hidden * ffn) + hidden * vocabulary)
    )


def expected_flops(config, documents: list[int]) -> float:
    """Of a batch of these documents: the matrices, dense L^2/2 pairs in layer 0, and the masks in the others; 12 D a
    pair."""
    layers = sparsity(config, LENGTH).layers[1:]
    pairs = sum(mask_pairs(layer.pattern, length) for layer in layers for length in documents)
    return matrix_flops(sum(documents)) + 12 * 32 * (4 * sum(length**2 for length in documents) / 2 + pairs)


def test_megatrons_formula_is_what_is_assumed(on_one_rank, config):
    result = on_one_rank["models"][0]
    assert result["stock"] == pytest.approx(3 * (matrix_flops(LENGTH) + 4 * 12 * 32 * 4 * LENGTH**2 / 2), rel=1e-12)
    assert result["counted"] == pytest.approx(expected_flops(config, [LENGTH] * 3), rel=1e-12)


@pytest.mark.parametrize("name, ranks", [
    ("packed", 1), ("virtual", 1), pytest.param("data_parallel", 2, marks=pytest.mark.slow),
    pytest.param("tensor_parallel", 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_packed_training_loop(request, config, name, ranks):
    """ranks: of data parallelism."""
    if name in ("packed", "virtual"):
        result = request.getfixturevalue("on_one_rank")[name]
    else:
        result = request.getfixturevalue("on_two_ranks")[1 if name == "data_parallel" else 2]
    expected = [expected_flops(config, documents_of(iteration, ranks)) for iteration in ITERATIONS]
    # Read at the first iteration and then with the log, every second one; the fifth is still on the device.
    counted = [count for _, _, count in result["per_iteration"]]
    assert counted == pytest.approx([expected[0], expected[1], 0, expected[2] + expected[3], 0], rel=1e-12)
    assert result["so_far"] == pytest.approx(sum(expected[:4]), rel=1e-12)
    # The first log does not end an interval, so the second is the mean over iterations 1 and 2.
    means = [expected[0], (expected[0] + expected[1]) / 2, (expected[2] + expected[3]) / 2]
    assert [entry["iteration"] for entry in result["logged"]] == [1, 2, 4]
    assert [entry["flops"] for entry in result["logged"]] == pytest.approx(means, rel=1e-12)
    assert [entry["throughput"] for entry in result["logged"]] == pytest.approx([mean / 2 for mean in means], rel=1e-12)
    assert result["syncs"] == 3
    attended, dense = result["throughputs"]
    documents = documents_of(ITERATIONS[2], ranks) + documents_of(ITERATIONS[3], ranks)
    assert attended == pytest.approx(means[2] / 2, rel=1e-12)
    dense_flops = matrix_flops(sum(documents)) + 4 * 12 * 32 * 4 * sum(length**2 for length in documents) / 2
    assert dense == pytest.approx(dense_flops / 2 / 2, rel=1e-12)  # two iterations, two "seconds"


def test_packed_counts_are_read_before_a_checkpoint_and_at_the_end(on_one_rank, config):
    result = on_one_rank["saved"]
    expected = [expected_flops(config, documents_of(iteration, 1)) for iteration in ITERATIONS]
    counted = [count for _, _, count in result["per_iteration"]]
    assert counted == pytest.approx(
        [expected[0], 0, expected[1] + expected[2], 0, expected[3] + expected[4]], rel=1e-12
    )
    assert result["so_far"] == pytest.approx(sum(expected), rel=1e-12)


def test_unpacked_loop_never_waits(on_one_rank, config):
    result = on_one_rank["unpacked"]
    assert result["syncs"] == 0
    assert all(tokens is None and squares is None for tokens, squares, _ in result["per_iteration"])
    assert [count for _, _, count in result["per_iteration"]] == pytest.approx(
        [expected_flops(config, [LENGTH] * 4)] * 4, rel=1e-12
    )


def test_a_million_tokens_are_counted_in_a_moment(on_one_rank):
    assert on_one_rank["seconds"] < 2
