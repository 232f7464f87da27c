"""What import-hf refuses before it imports Megatron: keys of a config.json that it would lose, numbers that no model
has, weights that are damaged or would be lost. One line, status 2, and nothing written."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from s2_megatron.config.stored import stored_sparsity
from s2_megatron.tools import commands
from s2_megatron.tools.hf.architecture import config_as_read, megatron_flags, shape_of_config
from s2_megatron.tools.hf.config_keys import CLASSES
from s2_megatron.tools.hf.folders import complete_folder
from s2_megatron.tools.hf.safetensors_files import INDEX, SafetensorsFolder
from s2_megatron.tools.hf.torch_dist import TorchDistWriter
from s2_megatron.tools.hf.weights import pieces
from tests.huggingface.tiny import sparsity_named

LLAMA = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=64, tie_word_embeddings=True,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
S2 = dict(model_type="s2_gpt", hidden_size=64, intermediate_size=96, s2_sparsity=stored_sparsity(sparsity_named("s2")))


S, F = "sliding_attention", "full_attention"
MISTRAL = dict(model_type="mistral", sliding_window=8)  # which has a Llama's weights


def folder_of(tmp_path: Path, change: dict, left_out=()) -> Path:
    """A folder with a config and, where it describes a model, its weights."""
    folder = tmp_path / "in"
    folder.mkdir()
    content = {key: value for key, value in (LLAMA | change).items() if key not in left_out}
    (folder / "config.json").write_text(json.dumps(content))
    shape = shape_of_config(config_as_read(dict(LLAMA), "LLAMA"), 1)
    save_file(
        {name: torch.randn(size) for piece in pieces(shape) for name, size in piece.hf}, folder / "model.safetensors"
    )
    return folder


def refused(capsys, folder: Path, *more) -> str:
    output = folder.parent / "out"
    assert commands.main(["import-hf", "--input", str(folder), "--output", str(output), *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert not output.exists() and not list(folder.parent.glob(".out*"))
    return error


@pytest.mark.parametrize(
    "change, message",
    [
        # What other models of the same form compute, under a Llama's name
        (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0, expected no such key"),
        (dict(embedding_multiplier=12.0), "embedding_multiplier=12.0, expected 1"),
        (dict(residual_multiplier=0.22, logits_scaling=8.0), "residual_multiplier=0.22, expected 1; logits_s"),
        (dict(attention_multiplier=0.01), "attention_multiplier=0.01, expected no such key"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "expected full_attention in every layer"),
        (dict(layer_types=["full_attention"]), "expected full_attention in every layer"),
        (dict(sliding_window=128), "sliding_window=128, expected no such key"),
        (dict(use_sliding_window=True), "use_sliding_window=True, expected false"),
        (dict(MISTRAL, use_sliding_window=False), "use_sliding_window=False, expected no such key"),
        (dict(MISTRAL, max_window_layers=1), "max_window_layers=1, expected no such key"),
        # Windows
        (dict(MISTRAL, sliding_window=0), "sliding_window=0, expected a whole number above 0"),
        (dict(MISTRAL, sliding_window="8"), "sliding_window='8', expected a whole number above 0"),
        (dict(MISTRAL, layer_types=[S]), "expected full_attention or sliding_attention for each of 2 layers"),
        (dict(MISTRAL, layer_types=[S, "chunked_attention"]), "expected full_attention or sliding_attention for each"),
        (dict(MISTRAL, layer_types=[S, []]), "expected full_attention or sliding_attention for each"),
        (dict(model_type="qwen3", use_sliding_window=1), "use_sliding_window=1, expected true or false"),
        (dict(model_type="qwen3", max_window_layers=-1), "max_window_layers=-1, expected a whole number from 0"),
        (
            dict(MISTRAL, layer_types=[S, F]),
            "layer_types[1]='full_attention', and transformers' mistral computes a window of 8 in this layer",
        ),
        (
            dict(MISTRAL, sliding_window=None, layer_types=[F, S]),
            "layer_types[1]='sliding_attention', and transformers' mistral computes all keys in this layer",
        ),
        (
            dict(model_type="ministral", sliding_window=None, layer_types=[F, S]),
            "transformers cannot run a ministral with sliding_window=None, layer_types=['full_attention', 'sliding_a",
        ),
        (
            dict(MISTRAL, s2_sparsity=S2["s2_sparsity"]),
            "config.json has s2_sparsity, and sliding_window=8; expected one of both",
        ),
        (dict(num_local_experts=4), "num_local_experts=4"),
        (dict(quantization_config={"bits": 4}), "quantization_config={'bits': 4}, expected no such key"),
        (dict(auto_map={"AutoModel": "x.Y"}), "auto_map="),
        (dict(qkv_bias=True), "qkv_bias=True, expected no such key"),
        (dict(architectures=["GraniteForCausalLM"]), "expected LlamaForCausalLM"),
        (dict(an_option_of_tomorrow=1), "an_option_of_tomorrow=1, expected no such key; only models without it"),
        # RoPE
        (dict(rope_theta=None), "rope_theta=None, expected a whole number above 0, which is what Megatron's"),
        (dict(rope_theta=10000.5), "rope_theta=10000.5, expected a whole number"),
        (dict(rope_parameters=dict(rope_theta=None)), "rope_parameters.rope_theta=None, expected a whole number"),
        (
            dict(rope_parameters=dict(rope_type="default", rope_theta=1e4), rope_scaling=dict(type="yarn", factor=4.0)),
            "rope_parameters.rope_type='yarn', expected default or llama3",
        ),
        (dict(rope_parameters=LLAMA3 | {"original_max_position_embeddings": 4096}), "=4096, expected 8192"),
        (dict(rope_parameters=LLAMA3 | {"attention_factor": 1.2}), "attention_factor=1.2, expected no such key"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5, expected 1"),
        (dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "full_attention="),
        # Numbers that no model has
        (dict(num_hidden_layers=10**12), "num_hidden_layers=1000000000000, expected a whole number above 0 (and below"),
        (dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000, expected 10000 at most"),
        (dict(num_hidden_layers=9999), "num_hidden_layers=9999, the weights are of 2 layers"),
        (dict(vocab_size=2**64), "vocab_size=18446744073709551616, expected a whole number above 0 (and below 2^31)"),
        (dict(max_position_embeddings=10**400), "max_position_embeddings=1000"),
        (dict(rope_theta=10**400), "rope_theta=1000"),
        (dict(rms_norm_eps=float("inf")), "rms_norm_eps=inf, expected a number"),
        (dict(rope_parameters=dict(rope_theta=float("nan"))), "rope_theta=nan, expected a whole number"),
        # Sparsity
        (dict(S2, s2_sparsity=None), "config.json has no s2_sparsity, or null"),
        (dict(s2_sparsity=None), "config.json has no s2_sparsity, or null"),
        (dict(S2, s2_sparsity=S2["s2_sparsity"] | {"seq_length": None}), "seq_length of the stored sparsity=None"),
        (dict(S2, s2_sparsity=S2["s2_sparsity"] | {"layers": [0, 0, 0]}), "it is of (3, 4, 2) layers, heads"),
        (dict(S2, s2_sparsity=S2["s2_sparsity"] | {"block_size": 2**70}), "block_size=1180591620717411303424"),
        (dict(S2, s2_sparsity=S2["s2_sparsity"] | {"patterns": [3]}), "s2_sparsity in config.json cannot be read"),
    ],
)  # fmt: skip
def test_configs(tmp_path, capsys, change, message):
    assert message in refused(capsys, folder_of(tmp_path, change))


def test_a_sparsity_that_is_missing(tmp_path, capsys):
    assert "no s2_sparsity" in refused(capsys, folder_of(tmp_path, S2, left_out=("s2_sparsity",)))


@pytest.mark.parametrize("family", [*(name for name in CLASSES if name != "s2_gpt")])
def test_what_transformers_writes_is_known(family, tmp_path):
    """Every key of a folder that save_pretrained makes."""
    from transformers import CONFIG_MAPPING

    keys = {key: value for key, value in LLAMA.items() if key != "model_type"}
    if family == "mellum":  # whose default has two of them
        rope = dict(rope_type="default", rope_theta=10000.0)
        keys["rope_parameters"] = dict(full_attention=rope, sliding_attention=rope)
    CONFIG_MAPPING[family](**keys).save_pretrained(tmp_path)
    config_as_read(json.loads((tmp_path / "config.json").read_text()), "saved")


def test_keys_of_published_folders_are_known():
    old = dict(
        _name_or_path="x", torch_dtype="bfloat16", pretraining_tp=1, rope_scaling=None, attention_bias=False,
        is_llama_config=True, _model_name_or_path="y", rope_interleaved=False,
        transformers_version="4.42.3", use_cache=True, mlp_bias=False,
        bos_token_id=1, eos_token_id=[1, 2], architectures=["LlamaForCausalLM"], head_dim=8, sliding_window=None,
    )  # fmt: skip
    config_as_read(LLAMA | old | {"transformers.js_config": {}}, "llama")
    qwen = dict(model_type="qwen2", sliding_window=131072, max_window_layers=28, use_sliding_window=False)
    assert shape_of_config(config_as_read(LLAMA | qwen | {"attention_dropout": 0.0}, "qwen"), 128).qkv_bias


def test_defaults_and_choices_are_those_of_transformers():
    content = dict(
        LLAMA, rope_scaling=LLAMA3, rope_parameters=dict(rope_type="default", rope_theta=5.0), rope_theta=7.0
    )
    before = json.dumps(content)
    read = config_as_read(content, "both")
    assert read["rope_parameters"]["factor"] == 32 and read["rope_parameters"]["rope_theta"] == 500000
    assert json.dumps(content) == before
    flags = megatron_flags(read, shape_of_config(read, 128))
    assert "--rope-scaling-factor=32.0" in flags and "--rotary-base=500000" in flags
    assert {"--hidden-dropout=0", "--attention-dropout=0", "--padded-vocab-size=128"} <= set(flags)
    qwen3 = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"model_type": "qwen3"}
    shape = shape_of_config(config_as_read(qwen3 | {"num_attention_heads": 64}, "qwen3"), 128)
    assert (shape.head_dim, shape.num_kv_heads) == (128, 32)  # not hidden_size / heads, and not all heads


def header_of(path: Path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(path: Path, change) -> None:
    header, content = header_of(path)
    text = change(header)
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def shifted(header: dict) -> dict:
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [at + 4 for at in entry["data_offsets"]]
    return header


def one_entry(**change):
    return lambda header: {
        name: entry | change if name == "model.norm.weight" else entry for name, entry in header.items()
    }


@pytest.mark.parametrize(
    "change",
    [
        shifted,
        one_entry(data_offsets=[0, 2**70]),
        one_entry(shape=[2**40]),
        one_entry(shape=None),
        one_entry(dtype=3),
        lambda header: [1],
        lambda header: {},
        lambda header: b"\xff\xfe",
        lambda header: b"[" * 100000,
        lambda header: b"",
    ],
)
def test_headers(tmp_path, capsys, change):
    folder = folder_of(tmp_path, {})
    with_header(folder / "model.safetensors", change)
    assert "model.safetensors cannot be read as safetensors (" in refused(capsys, folder)


def test_files_that_are_cut_loop_or_are_folders(tmp_path, capsys):
    folder = folder_of(tmp_path, {})
    path = folder / "model.safetensors"
    (folder / "generation_config.json").write_text("[]")
    assert "generation_config.json holds []; expected an object" in refused(capsys, folder)
    path.write_bytes(path.read_bytes()[:-1])
    assert "cannot be read as safetensors" in refused(capsys, folder, "--no-logit-check")
    (folder / "generation_config.json").write_text("{}")
    assert "cannot be read as safetensors" in refused(capsys, folder)
    path.unlink()
    path.symlink_to("model.safetensors")
    assert "cannot be read as safetensors" in refused(capsys, folder)
    path.unlink()
    path.mkdir()
    assert "neither model.safetensors nor" in refused(capsys, folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    assert "config.json cannot be read" in refused(capsys, folder)
    (tmp_path / "loop").symlink_to("loop")
    assert "config.json cannot be read" in refused(capsys, tmp_path / "loop")
    output = ["--input", str(folder), "--output", str(tmp_path / "loop")]
    assert commands.main(["import-hf", *output]) == 2
    assert "exists and is never overwritten" in capsys.readouterr().err
    output[-1] += "/below"
    assert commands.main(["import-hf", *output]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "cannot be read as the index of the weights"),
        (b"\xff{", "cannot be read as the index of the weights"),
        (b"not json", "cannot be read as the index of the weights (Expecting value"),
        (b"[1]", "it has no object weight_map"),
        (b"{}", "it has no object weight_map"),
        (b'{"weight_map": {}}', "it has no object weight_map"),
        (b'{"weight_map": [1]}', "it has no object weight_map"),
        (b'{"weight_map": {"a": 3}}', "weight_map names files that are not in this folder"),
        (b'{"weight_map": {"a": "../model.safetensors"}}', "weight_map names files that are not in this folder"),
        (b'{"weight_map": {"a": "none.safetensors"}}', "none.safetensors cannot be read as safetensors"),
        (b'{"weight_map": {"a": "one.safetensors"}}', "names tensors that its files do not hold (a)"),
    ],
)
def test_indexes(tmp_path, capsys, content, message):
    folder = folder_of(tmp_path, {})
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / INDEX).write_bytes(content)
    error = refused(capsys, folder)
    assert message in error and str(folder) in error


def test_an_index_that_loops_and_a_tensor_in_two_files(tmp_path, capsys):
    folder = folder_of(tmp_path, {})
    (folder / INDEX).symlink_to(INDEX)
    assert SafetensorsFolder(folder).tensors  # as in transformers the single file comes first
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    assert f"{INDEX} cannot be read" in refused(capsys, folder)
    (folder / INDEX).unlink()
    save_file({"model.norm.weight": torch.zeros(32)}, folder / "two.safetensors")
    names = dict.fromkeys(header_of(folder / "one.safetensors")[0], "one.safetensors")
    names = {name: file for name, file in names.items() if name != "__metadata__"} | {"other": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    assert "two.safetensors holds model.norm.weight, and so does one.safetensors" in refused(capsys, folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers(tmp_path, value, dtype, monkeypatch):
    monkeypatch.setattr("s2_megatron.tools.hf.safetensors_files.READ_AT_A_TIME", 64)
    tensor = torch.randn(40, 8).to(dtype)
    tensor[37, 3] = value
    save_file({"a": tensor, "b": torch.randn(40, 8).to(dtype)}, tmp_path / "model.safetensors")
    weights = SafetensorsFolder(tmp_path)
    weights.read("b")
    with pytest.raises(ValueError, match=r"model.safetensors: a holds NaN or infinity"):
        weights.read("a")


def test_a_head_of_its_own_is_not_dropped(tmp_path, capsys):
    folder = folder_of(tmp_path, {})
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.randn(64, 32)}, folder / "model.safetensors")
    error = refused(capsys, folder)
    assert "lm_head.weight is not model.embed_tokens.weight" in error and "set tie_word_embeddings to false" in error
    save_file(tensors | {"lm_head.weight": torch.randn(32, 32)}, folder / "model.safetensors")
    assert "lm_head.weight is not model.embed_tokens.weight" in refused(capsys, folder)


@pytest.mark.parametrize("divisor", [0, -1, 10**9, 10**30])
def test_rows_of_the_embedding(tmp_path, capsys, divisor):
    flag = f"--make-vocab-size-divisible-by={divisor}"
    assert f"--make-vocab-size-divisible-by {divisor}" in refused(capsys, folder_of(tmp_path, {}), flag)


def test_a_disk_that_is_full(tmp_path):
    """Before the work where it is known, and in the middle of it: one line, and nothing stays."""
    output = tmp_path / "out"

    def write(needed: int, numbers: int) -> None:
        with complete_folder(output, "--output", needed) as work:
            os.symlink("/dev/full", work / "__0_0.distcp")
            writer = TorchDistWriter(work)
            writer.add("a", (numbers,), (0,), torch.zeros(numbers))
            writer.finish()

    with pytest.raises(ValueError, match=r"--output .*out: no space left \(1000000000.00 GB are needed"):
        write(10**18, 1)
    for numbers in (1, 10_000_000):  # a small tensor stays in the file's buffer until it is closed
        with pytest.raises(ValueError, match=r"--output .*out: no space left \(the disk, or the quota, became full"):
            write(0, numbers)
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="another"), complete_folder(output, "--output"):
        raise RuntimeError("another")
