"""export-hf and import-hf: the logits of Megatron's model and of the exported one, round trips, memory, refusals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.patterns.ranges import make_range_pattern
from s2_megatron.tools import commands
from s2_megatron.tools.hf.torch_dist import TorchDistReader
from tests.huggingface.tiny import BLOCK, HEADS, KV_HEADS, model_of, random_mask, tokens
from tests.megatron.without_gpt import require_gpt_model
from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 63, 64, 65, 1000)
WORDS = 97
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48)  # of a config.json


def layers_of(*patterns, kv_heads=KV_HEADS):
    layers = tuple(LayerSparsity("D" if pattern is None else "S", pattern) for pattern in patterns)
    return ResolvedSparsity(layers, (), None, BLOCK, HEADS, kv_heads, 1024)


def ranged(kv_heads=KV_HEADS, **more):
    shape = dict(block_size=BLOCK, num_heads=HEADS, num_kv_heads=kv_heads, ranges=((2, 1), (None, 4)))
    return make_range_pattern(**shape | more)


def long_mask():
    """A mask of 64 blocks, for 1000 tokens."""
    mask = random_mask(HEADS)
    rows = [np.concatenate([np.diff(indptr), np.ones(24, int)]) for indptr, _ in mask.tables]
    keys = [np.concatenate([indices, np.arange(40, 64)]) for _, indices in mask.tables]
    return type(mask).from_csr(BLOCK, HEADS, KV_HEADS, [np.cumsum([0, *row]) for row in rows], keys)


MODELS = {
    "dense": lambda: model_of(layers_of(None, None), tie_word_embeddings=True),
    "s2": lambda: model_of(layers_of(ranged(4), ranged(4, base_offset=1), kv_heads=4), qk_norm=True),
    "mixed": lambda: model_of(layers_of(None, ranged(dense_heads=(1,)), ranged(slide="query")), qkv_bias=True),
    "mask": lambda: model_of(layers_of(None, long_mask())),
    "scaled": lambda: model_of(
        ResolvedSparsity(layers_of(ranged()).layers, (), 0.05, BLOCK, HEADS, KV_HEADS, 1024), softmax_type="off-by-one"
    ),
    "sinks": lambda: model_of(layers_of(None, ranged()), softmax_type="learnable"),
}  # fmt: skip


def randomised(model):
    """Norms that are not 1 and biases that are not 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write_mask_config(folder: Path) -> Path:
    mask = long_mask()
    arrays = dict(indptr=np.stack([t[0] for t in mask.tables]), indices=np.concatenate([t[1] for t in mask.tables]))
    np.savez(folder / "mask.npz", **arrays)
    config = folder / "mask.yaml"
    config.write_text(f"block_size: {BLOCK}\nlayers: DM\nspecs:\n  M: {{mask: mask.npz}}\n")
    return config


@pytest.fixture(scope="module")
def made(tmp_path_factory, tools):
    """For every model: its folder, the checkpoint that import-hf made of it, Megatron's logits of that checkpoint."""
    require_gpt_model()
    root = tmp_path_factory.mktemp("models")
    config = write_mask_config(root)
    for name, build in MODELS.items():
        randomised(build()).save_pretrained(root / name, max_shard_size="60KB" if name == "mixed" else "5GB")
        unseen = [] if name == "mask" else ["--no-logit-check"]  # a test below compares the logits of all
        tools("import-hf", "--input", root / name, "--output", root / f"{name}-mcore", *unseen)
        job = dict(
            load=str(root / f"{name}-mcore"), output=str(root / f"{name}-logits.npz"), words=WORDS,
            dense_core="stock" if name in ("dense", "mask", "sinks") else "s2",
            s2_config=str(config) if name == "mask" else None,
        )  # fmt: skip
        answer = tools.ask(logits=job)
        assert answer["status"] == 0, answer["out"] + answer["err"]
    return root


@pytest.mark.parametrize("name", MODELS)
def test_megatron_and_transformers_compute_the_same(made, name):
    model = AutoModelForCausalLM.from_pretrained(made / name, attn_implementation="s2")
    stored = np.load(made / f"{name}-logits.npz")
    text = torch.from_numpy(stored["tokens"])
    for length in LENGTHS:
        with torch.no_grad():
            logits = model(text[:, :length], use_cache=False).logits[0].numpy()
        expected = stored[f"logits_{length}"]
        assert np.abs(logits - expected[:, :WORDS]).max() < 1e-4, length
        assert (expected[:, WORDS:] == 0).all() and np.abs(expected).max() > 0.5  # rows that are no words


@pytest.mark.parametrize(
    "name, more", [("dense", []), ("s2", ["q_layernorm", "k_layernorm"]), ("sinks", ["core_attention"])]
)
def test_the_checkpoint_has_what_transformer_engine_asks_for(made, name, more):
    """Its norms have an _extra_state, too, and its attention with learnable offsets: a launch with it ended in "Missing
    key in checkpoint state_dict"."""
    folder = next((made / f"{name}-mcore").glob("*/.metadata")).parent
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    layers = keys["decoder.layers.self_attention.linear_qkv.weight"].size[0]
    in_layers = "decoder.layers.self_attention.{}._extra_state/shard_{}_{}"
    expected = {"decoder.final_layernorm._extra_state/shard_0_1"}
    expected |= {in_layers.format(part, layer, layers) for part in more for layer in range(layers)}
    assert {key for key in keys if re.search(r"(layernorm|core_attention)\._extra_state", key)} == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_is_bit_equal(tools, made, name, tmp_path):
    """Export what was imported: files, config and all."""
    more = ["--s2-config", made / "mask.yaml"] if name == "mask" else []
    output = tmp_path / "again"
    out, _ = tools("export-hf", "--load", made / f"{name}-mcore", "--output", output, *more)
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (made / name, output))
    assert "no tokenizer is written" in out
    # Without a tokenizer the rows that are no words stay; all others are as they were.
    assert after.config.vocab_size == 128
    states = before.state_dict(), after.state_dict()
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key][: len(tensor)]) and tensor.dtype == states[1][key].dtype
    skipped = {"vocab_size", "dtype", "transformers_version", "pad_token_id", "_name_or_path", "s2_sparsity"}
    for key, value in before.config.to_dict().items():
        if key not in skipped:
            assert after.config.to_dict()[key] == value, key
    assert after.config.sparsity.canonical_json() == before.config.sparsity.canonical_json()
    assert not list(tmp_path.glob(".*"))


def test_several_files_are_read_and_written(tools, made, tmp_path):
    assert len(list((made / "mixed").glob("model-*.safetensors"))) > 1
    tools("export-hf", "--load", made / "mixed-mcore", "--output", tmp_path / "out", "--max-shard-gb", "0.00005")
    files = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 3 and all(path.stat().st_size < 60_000 for path in files)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(made / "mixed")
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, before.model.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize("family, config", [(LlamaForCausalLM, LlamaConfig), (Qwen2ForCausalLM, Qwen2Config)])
def test_dense_folders_go_in_and_come_out_dense(tools, family, config, tmp_path):
    settings = dict(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, dtype=torch.bfloat16, max_position_embeddings=512,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    )  # fmt: skip
    model = randomised(family(config(**settings)).to(torch.bfloat16)).eval()
    model.save_pretrained(tmp_path / "in")
    tools("import-hf", "--input", tmp_path / "in", "--output", tmp_path / "mcore")
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    expected = original(tokens(1, 60)).logits
    _, errors = tools("export-hf", "--load", tmp_path / "mcore", "--output", tmp_path / "dense", "--as-dense")
    assert not errors
    tools("export-hf", "--load", tmp_path / "mcore", "--output", tmp_path / "own")
    for folder, kind in (("dense", model.config.model_type), ("own", "s2_gpt")):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / folder).dtype == torch.bfloat16
        assert again.config.model_type == kind
        states = again.state_dict(), original.state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        with torch.no_grad():
            assert torch.allclose(again(tokens(1, 60)).logits, expected, atol=2e-5)


def test_as_dense_warns_of_what_is_lost(tools, made, tmp_path):
    _, errors = tools("export-hf", "--load", made / "s2-mcore", "--output", tmp_path / "out", "--as-dense")
    assert errors.startswith("warning: --as-dense") and "2 of 2 layers" in errors
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.slow
def test_a_tokenizer_cuts_the_rows_that_are_no_words(tools, made, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(WORDS - 1)} | {"<eos>": WORDS - 1}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="<eos>"
    )
    fast.save_pretrained(tmp_path / "tokenizer")
    folder = tmp_path / "out"
    tools("export-hf", "--load", made / "dense-mcore", "--output", folder, "--tokenizer", tmp_path / "tokenizer")
    # A process of its own imports Megatron, whose reports of missing packages would hide the flags.
    command = [sys.executable, "-m", "s2_megatron", "import-hf", "--input", folder, "--output", tmp_path / "again"]
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "Warning" not in done.stderr and done.stdout.startswith("wrote ")
    assert f"--tokenizer-model={folder} " in done.stdout and "--tokenizer-type=HuggingFaceTokenizer " in done.stdout
    first, second = ((path / "model.safetensors").read_bytes() for path in (made / "dense", folder))
    assert len(first) - len(second) < 2000  # the header's size
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = AutoModelForCausalLM.from_pretrained(made / "dense").state_dict()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert len(AutoTokenizer.from_pretrained(folder)) == WORDS == model.config.vocab_size
    assert model.generation_config.eos_token_id == WORDS - 1


def test_what_cannot_be_exported(tools, made, tmp_path):
    load, output = made / "s2-mcore", tmp_path / "out"
    (tmp_path / "taken").mkdir()
    assert "exists and is never overwritten" in tools.refused(
        "export-hf", "--load", load, "--output", tmp_path / "taken"
    )
    assert "expected a complete checkpoint" in tools.refused("export-hf", "--load", made, "--output", output)
    assert "stores only the hash" in tools.refused("export-hf", "--load", made / "mask-mcore", "--output", output)
    other = tmp_path / "other.yaml"
    other.write_text(f"block_size: {BLOCK}\nlayers: DS\nspecs:\n  S: {{local_blocks: 2}}\n")
    line = tools.refused("export-hf", "--load", made / "mask-mcore", "--output", output, "--s2-config", other)
    assert "another sparsity" in line
    line = tools.refused("export-hf", "--load", load, "--output", output, "--tokenizer", tmp_path / "none")
    assert "no tokenizer can be loaded" in line
    line = tools.refused("export-hf", "--load", made / "scaled-mcore", "--output", output, "--as-dense")
    assert "softmax_scale=0.05 has no plain" in line
    assert not output.exists() and not list(tmp_path.glob(".*"))


def test_a_damaged_checkpoint_leaves_nothing_behind(tools, made, tmp_path):
    import shutil

    shutil.copytree(made / "s2-mcore", tmp_path / "cut")
    data = tmp_path / "cut" / "release" / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:20000] + b"\0" * 30000 + content[50000:])
    line = tools.refused("export-hf", "--load", tmp_path / "cut", "--output", tmp_path / "out")
    assert "damaged" in line and not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(model_type="gpt2"),
            "model_type='gpt2'; expected one of llama, qwen2, qwen3, mistral, ministral, "
            "qwen3_moe, mixtral, mellum, s2_gpt",
        ),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(intermediate_size=80), "model.layers.0.mlp.gate_proj.weight has shape [96, 64], expected [80, 64]"),
        (dict(num_hidden_layers=3), "it is of (2, 4, 4) layers, heads and KV heads, the model of (3, 4, 4)"),
        (dict(qk_norm=False), "model.layers.0.self_attn.q_norm.weight is unknown"),
        (dict(model_type=["llama"]), "model_type=['llama']; expected one of"),
        (dict(num_hidden_layers="4"), "num_hidden_layers='4', expected a whole number above 0"),
        (
            dict(hidden_size=64.0, vocab_size=True),
            "hidden_size=64.0, expected a whole number above 0 (and below 2^31); vocab_size=True",
        ),
        (dict(num_attention_heads=None), "num_attention_heads=None, expected a whole number"),
        (dict(num_key_value_heads=3), "num_key_value_heads=3, expected a divisor of num_attention_heads="),
        (dict(rms_norm_eps="small"), "rms_norm_eps='small', expected a number above 0"),
        (dict(tie_word_embeddings="no"), "tie_word_embeddings='no', expected true or false"),
        (dict(rope_parameters=[1]), "rope_parameters=[1], expected an object"),
        (dict(rope_parameters=dict(rope_theta="big")), "rope_parameters.rope_theta='big', expected a whole number"),
        (dict(s2_sparsity=[1]), "stored sparsity has format 'list'"),
        (dict(num_experts=0), "num_experts=0, expected a whole number above 0"),
        (dict(num_experts=6, num_experts_per_tok=2), "moe_intermediate_size=None; expected three numbers above 0, at"),
        (EXPERTS | dict(num_experts_per_tok=7), "num_experts_per_tok=7, moe_intermediate_size=48; expected three numb"),
        (EXPERTS | dict(num_experts_per_tok=1), "num_experts_per_tok=1; expected 2 or more, for Megatron scales no"),
        (EXPERTS | dict(mlp_only_layers=[2]), "mlp_only_layers=[2], expected numbers of some of the 2 layers"),
        (EXPERTS | dict(norm_topk_prob=1), "norm_topk_prob=1, expected true or false"),
        (EXPERTS | dict(shared_expert_intermediate_size=8), "shared_expert_intermediate_size=8, expected no such key"),
        (EXPERTS, "model.layers.0.mlp.gate_proj.weight is unknown"),
    ],
)
def test_what_cannot_be_imported(made, tmp_path, change, message, capsys):
    (tmp_path / "in").mkdir()
    content = json.loads((made / "s2" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(content | change))
    (tmp_path / "in" / "model.safetensors").symlink_to(made / "s2" / "model.safetensors")
    assert commands.main(["import-hf", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_folders_that_are_not_complete_are_refused(made, tmp_path, capsys):
    import shutil

    shutil.copytree(made / "s2", tmp_path / "in")
    path = tmp_path / "in" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert commands.main(["import-hf", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 2
    assert "model.safetensors cannot be read as safetensors" in capsys.readouterr().err
    path.unlink()
    assert commands.main(["import-hf", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 2
    assert "expected a Hugging Face folder with safetensors" in capsys.readouterr().err


MEMORY = """
import sys
from pathlib import Path
from s2_megatron.tools.hf import export_hf, import_hf, torch_dist, safetensors_files, weights
import torch
root = Path(sys.argv[1])
shape = weights.Shape(4, 256, 1024, 4, 2, 64, 65536, 65536, False, False, False)  # words: 64 MiB of 180
largest = 65536 * 256 * 4
announced = [safetensors_files.TensorShape(n, s, torch.float32) for p in weights.pieces(shape) for n, s in p.hf]
if sys.argv[2] == "make":
    writer = safetensors_files.SafetensorsWriter(root, announced, 10**12)
    for tensor in announced:
        writer.add(tensor.name, torch.zeros(tensor.shape))
    writer.finish()
    sys.exit()
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
before = peak()
(root / sys.argv[2]).mkdir()
if sys.argv[2] == "import":
    writer = torch_dist.TorchDistWriter(root / "import")
    import_hf.write_checkpoint(writer, safetensors_files.SafetensorsFolder(root), shape)
    writer.finish()
else:
    export_hf.write_weights(torch_dist.TorchDistReader(root / "import"), shape, root / "export", 10**12)
print((peak() - before) / largest)
"""


@pytest.mark.slow
def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    for step in ("make", "import", "export"):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, tmp_path, step], capture_output=True, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if step != "make":
            assert 0.5 < float(done.stdout) < 1.5, (step, done.stdout)
    assert (tmp_path / "export" / "model.safetensors").stat().st_size == (tmp_path / "model.safetensors").stat().st_size


def test_pieces_of_other_layouts_are_put_together(made, tmp_path):
    """A box over several stored pieces, as tensor parallelism leaves them."""
    from s2_megatron.tools.hf.torch_dist import TorchDistWriter

    whole = torch.randn(2, 8, 6)
    writer = TorchDistWriter(tmp_path)
    for layer in range(2):
        for row in (0, 4):
            for column in (0, 3):
                part = whole[layer : layer + 1, row : row + 4, column : column + 3].clone()
                writer.add("a", (2, 8, 6), (layer, row, column), part)
    writer.add("gap", (4, 2), (0, 0), torch.zeros(3, 2))
    writer.finish()
    reader = TorchDistReader(tmp_path)
    assert torch.equal(reader.read("a", (1, 0, 0), (1, 8, 6)), whole[1:])
    assert torch.equal(reader.read("a", (0, 2, 1), (2, 4, 4)), whole[:, 2:6, 1:5])
    with pytest.raises(ValueError, match="gap is not complete"):
        reader.read("gap", (0, 0), (4, 2))
