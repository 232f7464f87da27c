"""The files in configs/ and the launchers in examples/ fit each other, and Megatron's parser accepts the launchers."""

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.launch import MODEL
from s2_megatron.config.load import load_config
from s2_megatron.config.sparsity import tensor_parallel_balance
from s2_megatron.patterns.ranges import period_coverage
from tests.processes import found_by, python_path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
_QUICKSTART = (MODEL.num_layers, MODEL.num_heads, MODEL.num_kv_heads, MODEL.seq_length)
SHAPES = {"quickstart": _QUICKSTART, "quickstart_dense": _QUICKSTART, "phi3_small": (32, 32, 8, 8192)}
SHAPES |= {
    "window_sink": (32, 32, 8, 8192),
    "gpt_oss": (24, 64, 8, 8192),
    "gemma3": (48, 16, 8, 8192),
    "olmo3": (32, 32, 32, 8192),
}
for _kind in ("dense", "s2", "mixed"):
    SHAPES |= {
        f"s2_1p3b_{_kind}": (24, 16, 16, 8192),
        f"s2_7b_{_kind}": (32, 32, 32, 32768),
        f"s2_70b_{_kind}": (80, 64, 8, 32768),
    }


def shipped(name):
    layers, heads, kv_heads, length = SHAPES[name]
    return load_config(ROOT / "configs" / f"{name}.yaml").resolve(
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, seq_length=length
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_file_resolves(path):
    resolved = shipped(path.stem)
    kinds = [layer.kind for layer in resolved.layers]
    assert len(kinds) == SHAPES[path.stem][0]
    assert ("s2" in kinds) == ("dense" not in path.stem) and not resolved.notes
    if path.stem.endswith("mixed"):
        assert kinds.count("dense") * 4 == len(kinds) and kinds[3] == "dense"
    assert path.read_text().startswith("# yaml-language-server: $schema=s2.schema.json\n")
    assert tensor_parallel_balance(resolved, 2) < 1.1


def test_every_size_has_its_three_plans():
    assert {path.stem for path in CONFIGS} == set(SHAPES)


@pytest.mark.parametrize("name", ["s2_7b_s2", "s2_7b_mixed", "s2_70b_s2", "s2_70b_mixed", "s2_1p3b_s2", "quickstart"])
def test_coverage_within_the_fewest_layers(name):
    """ceil(stride / KV heads) consecutive S2 layers attend every causal block, wherever one starts."""
    resolved = shipped(name)
    patterns = [layer.pattern for layer in resolved.layers if layer.kind == "s2"]
    stride = patterns[0].heads[0].ranges[-1][1]
    span = -(-stride // resolved.num_kv_heads)
    for start in range(min(len(patterns) - span + 1, stride)):
        assert period_coverage(patterns[start : start + span], 64) == 1
    if span > 1:
        assert period_coverage(patterns[: span - 1], 64) < 1, "fewer layers cannot; the test would not notice"
    ((count, coverage),) = resolved.spec_coverage().values()
    assert (count, coverage) == (span, 1)


def test_quickstart_is_a_real_s2_run():
    for length in (512, 1024):
        resolved = load_config(ROOT / "configs/quickstart.yaml").resolve(
            num_layers=4, num_heads=4, num_kv_heads=2, seq_length=length
        )
        sparse = [layer for layer in resolved.layers if layer.kind == "s2"]
        assert length // resolved.block_size >= 16
        assert 2 * len(sparse) >= len(resolved.layers) and len(sparse) < len(resolved.layers)
        for layer in sparse:
            assert layer.pattern.heads[0].ranges[0][0] * resolved.block_size <= length // 4
            assert layer.pattern.density(length) <= 0.6
    dense = load_config(ROOT / "configs/quickstart_dense.yaml")
    assert dense.settings.block_size == resolved.block_size


def test_phi3_small_is_the_published_rule():
    resolved = shipped("phi3_small")
    assert [layer.kind for layer in resolved.layers] == ["s2", "dense"] * 16
    assert resolved.softmax_scale == 1 / 128
    for layer in resolved.layers[::2]:
        for head in (0, 3, 17, 31):
            for query in (0, 15, 16, 40):
                keys = [k for k in range(query + 1) if query - k < 16 or (k + head * max(1, 8 // 32) + 1) % 8 == 0]
                assert layer.pattern.key_blocks(head, query).tolist() == keys


@pytest.mark.parametrize(
    "name, dense, window, sink",
    [("window_sink", 4, 1024, 64), ("gpt_oss", 2, 128, 0), ("gemma3", 6, 1024, 0), ("olmo3", 4, 4096, 0)],
)
def test_windows_of_released_models(name, dense, window, sink):
    """Query i sees the keys i - window + 1 to i, and those of the sink; every so many-th layer sees all."""
    resolved = shipped(name)
    kinds = ["s2"] * (dense - 1) + ["dense"]
    assert [layer.kind for layer in resolved.layers] == kinds * (len(resolved.layers) // dense)
    keys = sum(min(query + 1, window) + min(max(query - window + 1, 0), sink) for query in range(8192))
    assert resolved.layers[0].pattern.attended_pairs(8192) == keys * resolved.num_heads


LAUNCHERS = sorted((ROOT / "examples").glob("pretrain_*.sh"))


def launched(script, *arguments, **environment):
    """The command that a launcher would run, one argument per item."""
    path = "/usr/bin:/bin"
    settings = {
        "PATH": path,
        "DRY_RUN": "1",
        "PREFLIGHT": "0",
        "MOCK_DATA": "1",
        "PYTHON": "python3",
        "TRANSFORMER_IMPL": "local",
        **environment,
    }
    done = subprocess.run(
        ["bash", script, *arguments], env=settings, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: path.stem)
def test_launcher_fits_its_configs(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    size, long, _ = script.stem.removeprefix("pretrain_").partition("_128k")
    names = [name for name in SHAPES if size in name]
    assert names
    for name in names:
        command = launched(script, "--train-iters", "5", CONFIG=f"configs/{name}.yaml")
        value = dict(itertools.pairwise(command))
        groups = value.get("--num-query-groups", value["--num-attention-heads"])
        shape = tuple(map(int, (value["--num-layers"], value["--num-attention-heads"], groups, value["--seq-length"])))
        assert shape == (*SHAPES[name][:3], 131072 if long else SHAPES[name][3])
        assert value["--s2-config"] == str(ROOT / "configs" / f"{name}.yaml")
        assert value["--attention-dropout"] == "0" and command[-2:] == ["--train-iters", "5"]
        assert "--use-distributed-optimizer" not in command
        assert value["--flight-recorder-dump-path"].endswith("/flight_recorder")


def test_the_launcher_for_long_context():
    """The exchange of blocks, no second attention under recompute; what is given wins, and the output is not that of
    shorter sequences."""
    script = ROOT / "examples/pretrain_7b_128k.sh"
    command = launched(script, "--global-batch-size", "8", TP="2", CP="4")
    expected = {
        "--tensor-model-parallel-size": ["2"],
        "--context-parallel-size": ["4"],
        "--s2-cp-comm-type": ["sparse"],
        "--recompute-granularity": ["full"],
        "--global-batch-size": ["128", "32", "8"],
    }
    for flag, values in expected.items():
        assert [command[place + 1] for place, name in enumerate(command) if name == flag] == values
    assert {"--s2-keep-attention-output", "--sequence-parallel"} <= set(command)
    flags = [
        dict(itertools.pairwise(launched(ROOT / f"examples/{name}.sh"))) for name in ("pretrain_7b", "pretrain_7b_128k")
    ]
    tokens = [int(value["--seq-length"]) * int(value["--global-batch-size"]) for value in flags]
    assert tokens[0] == tokens[1]
    value = dict(itertools.pairwise(launched(script)))
    assert (value["--context-parallel-size"], value["--tensor-model-parallel-size"]) == ("8", "1")
    assert value["--save"] == str(ROOT / "runs/s2_7b_s2_128k/checkpoints")


def test_launcher_says_what_is_missing():
    script = ROOT / "examples/pretrain_7b.sh"
    cases = [
        ({}, "DATA_PATH"),
        ({"DATA_PATH": "x"}, "TOKENIZER"),
        ({"MOCK_DATA": "1", "NNODES": "2"}, "NODE_RANK"),
        ({"MOCK_DATA": "1", "TRANSFORMER_IMPL": "te"}, "expected transformer_engine or local"),
    ]
    for environment, word in cases:
        settings = {
            "PATH": "/usr/bin:/bin",
            "TRANSFORMER_IMPL": "local",
            "DRY_RUN": "1",
            "PREFLIGHT": "0",
            **environment,
        }
        done = subprocess.run(["bash", str(script)], env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and word in done.stderr and done.stderr.count("\n") == 1
    data = launched(script, MOCK_DATA="0", DATA_PATH="0.3 /a 0.7 /b", TOKENIZER="/t")
    at = data.index("--data-path")
    assert data[at + 1 : at + 5] == ["0.3", "/a", "0.7", "/b"]


def test_launcher_looks_for_the_fused_gradients_of_apex(tmp_path):
    """Transformer Engine alone is not enough for Megatron's default. The extension can be imported after torch only."""
    flag, script = "--no-gradient-accumulation-fusion", str(ROOT / "examples/pretrain_1p3b.sh")
    settings = {
        "PATH": "/usr/bin:/bin",
        "DRY_RUN": "1",
        "PREFLIGHT": "0",
        "MOCK_DATA": "1",
        "PYTHON": sys.executable,
        "TRANSFORMER_IMPL": "transformer_engine",
    }
    for is_there in (False, True):
        (tmp_path / "torch.py").touch()
        source = (
            "import sys\nassert 'torch' in sys.modules\n"
            if is_there
            else "raise ImportError('built for another torch')\n"
        )
        (tmp_path / "fused_weight_gradient_mlp_cuda.py").write_text(source)
        environment = {**settings, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True)
        command = done.stdout.splitlines()
        assert "--use-distributed-optimizer" in command and (flag in command) == (not is_there)
        assert done.stderr.count("\n") == (not is_there) and done.stderr.startswith("" if is_there else flag)


@pytest.mark.parametrize(
    "flags, settings, overlapped",
    [
        ([], {"GPUS_PER_NODE": "1"}, False),
        ([], {"GPUS_PER_NODE": "2"}, True),
        ([], {"GPUS_PER_NODE": "gpu"}, True),
        ([], {"TP": "8"}, False),
        ([], {"TP": "4"}, True),
        ([], {"TP": "4", "PP": "2"}, False),
        (["--context-parallel-size", "2"], {"TP": "4"}, True),
        (["--tensor-model-parallel-size=8"], {}, False),
        ([], {"TP": "8", "NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a"}, True),
    ],
)
def test_launcher_overlaps_nothing_for_one_copy_of_the_model(flags, settings, overlapped):
    script = ROOT / "examples" / "pretrain_1p3b.sh"
    command = launched(script, *flags, TRANSFORMER_IMPL="transformer_engine", **settings)
    assert "--use-distributed-optimizer" in command
    assert {flag in command for flag in ("--overlap-grad-reduce", "--overlap-param-gather")} == {overlapped}


# In a process of its own: it makes torch.cuda land on the CPU, which no other test must see.
PARSE = """
import json, os, sys
from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu
install_if_no_gpu()
from megatron.training.arguments import parse_args, validate_args
from s2_megatron.megatron.arguments import add_s2_arguments, prepare_s2
results = []
for world_size, arguments in json.load(open(sys.argv[1])):
    os.environ["WORLD_SIZE"], sys.argv = str(world_size), arguments
    try:
        args = parse_args(add_s2_arguments)
        validate_args(args)
        results.append(prepare_s2(args).sparsity.density())
    except (AssertionError, ValueError, SystemExit) as error:
        results.append(f"{type(error).__name__}: {error}")
print("\\n" + json.dumps(results))
"""


def command_in_the_docs() -> list[str]:
    """The script and flags of docs/launch.md's first command, for eight processes."""
    text = (ROOT / "docs" / "launch.md").read_text()
    command = text.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    words = shlex.split(command.replace("configs/", f"{ROOT}/configs/"))
    assert words[1:4] == ["torchrun", "--nproc-per-node", "8"]
    return words[4:]


@pytest.mark.slow
def test_megatron_accepts_the_launchers(tmp_path):
    """Every flag is Megatron's, and Megatron's and our own validation have nothing against the whole. The command in
    docs/launch.md, too."""
    cases, names = [(8, command_in_the_docs())], [("docs/launch.md", "transformer_engine")]
    for script in LAUNCHERS:
        for implementation in ("local", "transformer_engine"):
            command = launched(script, TRANSFORMER_IMPL=implementation, OUTPUT=str(tmp_path / script.stem))
            entry = command.index(str(ROOT / "pretrain_gpt_s2.py"))
            cases.append((64 if "70b" in script.stem else 8, command[entry:]))
            names.append((script.stem, implementation))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    results = found_by("-c", PARSE, tmp_path / "cases.json", cwd=tmp_path, **environment)
    for (name, implementation), result in zip(names, results, strict=True):
        # A machine without Transformer Engine may refuse what only that can resume; nothing else is excused.
        excused = implementation == "transformer_engine" and "neither Transformer Engine nor NVIDIA Apex" in str(result)
        assert excused or (isinstance(result, float) and 0 < result < 1), (name, implementation, result)
