"""export-hf --stock: transformers' own classes compute from the folder what Megatron's model computes, far beyond the
windows, and something else without them; the way back; what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from s2_megatron.config.load import load_config
from s2_megatron.config.sparsity import LayerSparsity
from s2_megatron.megatron.sparsity import resolve_layers
from s2_megatron.tools.hf import stock
from s2_megatron.tools.hf.architecture import plain_config, shape_of_arguments, sparsity_of_arguments
from s2_megatron.tools.hf.stock import plan_windows, stock_config
from s2_megatron.tools.hf.torch_dist import TorchDistReader
from tests.huggingface.stock_checkpoints import (
    HEADS,
    KV_HEADS,
    LAYERS,
    WORDS,
    arguments_of,
    plan_of,
    shape_of,
    write,
    written_config,
)
from tests.huggingface.tiny import random_mask
from tests.megatron.without_gpt import require_mtp
from tests.tiers import mostly_slow

WINDOW, LENGTH = 37, 1000
NEAR, FAR = 1e-5, 1e-3  # of the largest logit
WINDOWS_OF_MEGATRON = dict(window_size=(WINDOW - 1, 0), window_attn_skip_freq=2)  # layers 1 and 3 see all keys

# (class that transformers loads, layers, shape, arguments beside it)
MODELS = {
    "llama": ("LlamaForCausalLM", "D", {}, dict(use_rope_scaling=True)),
    "windows": ("MinistralForCausalLM", "W", dict(tied=True), {}),
    "mixed": ("MinistralForCausalLM", "DW", {}, dict(use_rope_scaling=True)),
    "qwen2": ("Qwen2ForCausalLM", "WWDW", dict(qkv_bias=True), {}),
    "qwen2 windows": ("Qwen2ForCausalLM", "W", dict(qkv_bias=True), {}),
    "qwen3": ("Qwen3ForCausalLM", "WD", dict(qk_norm=True, head_dim=32), WINDOWS_OF_MEGATRON),
    "qwen3 last": ("Qwen3ForCausalLM", "DDDW", dict(qk_norm=True), {}),
}  # fmt: skip


def plan(layers: str):
    return plan_of(layers, **dict(window=WINDOW) if "W" in layers else {})


@pytest.fixture(scope="module")
def exported(tools, tmp_path_factory):
    """name -> (the checkpoint, the folder, what the export said on stderr), made once."""
    made = {}

    def export(name):
        if name not in made:
            root = tmp_path_factory.mktemp("stock")
            _, layers, sizes, more = MODELS[name]
            if "window_size" not in more:
                more = more | dict(s2_sparsity=plan(layers).canonical_json())
            load = write(root / "mcore", shape_of(**sizes), **more)
            _, errors = tools("export-hf", "--load", load, "--output", root / "out", "--stock")
            made[name] = load, root / "out", errors
        return made[name]

    return export


def stock_logits(folder, text: torch.Tensor, **changed) -> np.ndarray:
    """Of transformers' own class, [length, words]. changed: settings of the config."""
    config = AutoConfig.from_pretrained(folder)
    for key, value in changed.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    with torch.no_grad():
        return model(text, use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("name", mostly_slow(MODELS, "mixed", "qwen3"))
def test_transformers_computes_what_megatron_computes(tools, exported, tmp_path, name):
    """The same logits 27 windows long; others without the windows, and with one that is a token off."""
    load, folder, errors = exported(name)
    kind, layers = MODELS[name][:2]
    assert not errors
    job = dict(load=str(load), output=str(tmp_path / "x.npz"), dense_core="s2", s2_config=None, words=WORDS)
    answer = tools.ask(logits=job)
    assert answer["status"] == 0, answer
    found = np.load(tmp_path / "x.npz")
    text, expected = torch.from_numpy(found["tokens"]), found[f"logits_{LENGTH}"]
    largest = np.abs(expected).max()

    def difference(**changed):
        return np.abs(stock_logits(folder, text, **changed) - expected).max() / largest

    through_transformers = kind.startswith("Qwen") and "W" in layers  # whose own code in engines loses the windows
    assert written_config(folder)["architectures"] == ["TransformersForCausalLM" if through_transformers else kind]
    assert "s2" not in (folder / "config.json").read_text()
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == kind
    assert difference() <= NEAR
    if "W" in layers:
        assert difference(layer_types=["full_attention"] * LAYERS) > FAR
        for window in (WINDOW - 1, WINDOW + 1):
            assert difference(sliding_window=window) > FAR


@pytest.mark.parametrize("name", mostly_slow(MODELS, "qwen3"))
def test_the_way_back(tools, exported, tmp_path, name):
    """import-hf of the folder has the checkpoint's weights, its plan and its logits."""
    load, folder, _ = exported(name)
    layers = MODELS[name][1]
    out, _ = tools("import-hf", "--input", folder, "--output", tmp_path / "back")
    assert "logits equal transformers' (all layers" in out
    before, after = (TorchDistReader(path / "release") for path in (load, tmp_path / "back"))
    assert before.shapes == after.shapes
    for key, size in before.shapes.items():
        assert torch.equal(*(reader.read(key, (0,) * len(size), size) for reader in (before, after))), key
    written = tmp_path / "back" / "windows.yaml"
    assert written.exists() == ("W" in layers)
    if "W" in layers:
        sizes = dict(num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, seq_length=1024)
        mine, theirs = plan_windows(load_config(written).resolve(**sizes)), plan_windows(plan(layers))
        assert mine == theirs and WINDOW in mine


@pytest.mark.slow
def test_multi_token_prediction_is_left_out(tools, tmp_path):
    """Of a checkpoint that Megatron wrote; the YAML that is compared names its layer, too."""
    require_mtp()
    data = dict(block_size=16, layers="DW", mtp_layers="W", specs=dict(W=dict(window=WINDOW)))
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(data))
    job = dict(load=str(tmp_path / "mcore"), plan=data, tokens=300, output=str(tmp_path / "x.npz"))
    answer = tools.ask(save=job | dict(flags=["--mtp-num-layers=1"], mtp_layers=1))
    assert answer["status"] == 0, answer
    export = ["export-hf", "--load", tmp_path / "mcore", "--output", tmp_path / "out", "--stock"]
    _, errors = tools(*export, "--s2-config", tmp_path / "plan.yaml")
    assert "note: what --mtp-num-layers 1 trained is left out" in errors
    found = np.load(tmp_path / "x.npz")
    logits = stock_logits(tmp_path / "out", torch.from_numpy(found["tokens"]))
    assert np.abs(logits - found["logits"]).max() <= NEAR * np.abs(logits).max()


def test_the_yaml_of_a_prediction_layer_that_is_run_again(tmp_path):
    """Whose offsets are those of its first run."""
    config = tmp_path / "plan.yaml"
    specs = dict(S=dict(local_blocks=2, stride=4))
    config.write_text(yaml.safe_dump(dict(block_size=16, layers="S", mtp_layers="S", specs=specs)))
    shape = shape_of()
    args = arguments_of(shape, mtp_num_layers=2, mtp_use_repeated_layer=True)
    trained = resolve_layers(load_config(config), args)
    args.s2_sparsity = trained.canonical_json()
    found = sparsity_of_arguments(args, shape, config)
    assert found.canonical_json() == dataclasses.replace(trained, mtp_layers=()).canonical_json()
    assert len(trained.mtp_layers) == 2
    args.mtp_use_repeated_layer = False
    with pytest.raises(ValueError, match=r"is another sparsity than that of the checkpoint \(mtp layer 1: offsets of"):
        sparsity_of_arguments(args, shape, config)


@pytest.mark.parametrize(
    "layers, spec, message",
    [
        ("DDWD", dict(local_blocks=4), "layer 2, head 0 has a window of blocks (local_blocks, local_tokens), which "
         "shows 49 to 64 keys; {}; train with `window: 64` in its place"),
        ("DW", dict(local_tokens=64), "layer 1, head 0 has a window of blocks (local_blocks, local_tokens), which "
         "shows 49 to 64 keys; {}; train with `window: 64` in its place"),
        ("DW", dict(local_blocks=2, stride=4), "layer 1, head 0 has stride 4; {}; train with `window: 1024` alone"),
        ("DW", dict(window=40, stride=4), "layer 1, head 0 has stride 4; {}; train with `window: 1024` alone"),
        ("DW", dict(window=40, sink_tokens=4), "layer 1, head 0 has sink_tokens 4; {}; train without them"),
        ("DW", dict(window=1), "layer 1, head 0 has window 1, with which transformers' cache keeps all keys; {}; train "
         "with `window: 2` or more"),
        ("DW", dict(window=[40, 50]), "layer 1, head 2 has window 50, head 0 has window 40; {}; train with the same "
         "window for all heads of a layer"),
        ("DW", dict(window=40, dense_heads=[0]), "layer 1, head 2 has window 40, head 0 has all keys; {}; train with "
         "the same window for all heads of a layer"),
        ("DW", dict(local_blocks=2, dense_heads=[0]), "layer 1, head 2 has a window of blocks (local_blocks"),
    ],
)  # fmt: skip
def test_a_plan_that_no_stock_architecture_computes(layers, spec, message):
    expected = (
        "expected dense layers, or one exact window for all heads and window layers, which is what stock architectures "
        "compute"
    )
    with pytest.raises(ValueError) as refused:
        plan_windows(plan_of(layers, **spec))
    text = str(refused.value)
    assert text.startswith("--stock: " + message.format(expected)) and text.endswith(", or export without --stock")


def test_two_windows_and_block_masks():
    wide, narrow = plan_of("W", window=50), plan_of("W", window=40)
    both = dataclasses.replace(wide, layers=(*wide.layers[:2], *narrow.layers[2:]))
    with pytest.raises(
        ValueError, match=r"layer 2, head 0 has window 40, layer 0 has 50; .*with the same window in both"
    ):
        plan_windows(both)
    masked = dataclasses.replace(wide, layers=(LayerSparsity("D", None), LayerSparsity("M", random_mask(1))))
    with pytest.raises(ValueError, match=r"layer 1, head 0 has a block mask; .*train with `window: 1024` in its place"):
        plan_windows(masked)


@pytest.mark.parametrize(
    "sizes, scale, message",
    [
        (dict(qkv_bias=True, qk_norm=True), None, "biases and norms of query and key has no plain"),
        (dict(softmax_type="learnable"), None, "softmax_type=learnable in every layer and head has no plain"),
        (dict(), 0.2, "softmax_scale=0.2 has no plain"),
        (dict(qkv_bias=True, head_dim=32), None, "Qwen2 wants hidden_size / heads as its head dim"),
    ],
)
def test_a_model_that_has_no_stock_form(sizes, scale, message):
    shape = shape_of(**sizes)
    with pytest.raises(ValueError, match=f"^--stock: .*{message}.*; leave --stock out$"):
        stock_config(plain_config(arguments_of(shape), shape, "float32"), shape, scale, (5,) * LAYERS, "--stock")


@pytest.mark.parametrize(
    "more, message",
    [
        (dict(attention_output_gate=True), "attention_output_gate=True; only a Llama- or Qwen-shaped model"),
        (dict(activation_func_clamp_value=0.0), "activation_func_clamp_value=0.0; only a Llama- or Qwen-shaped model"),
        (dict(rotary_percent=0.0), "rotary_percent=0.0; only a Llama- or Qwen-shaped model"),
        (dict(hybrid_layer_pattern="*-*M"), r"--hybrid-layer-pattern \*-\*M; expected \*- or \*E repeated"),
        (
            dict(hybrid_layer_pattern="*-*-/*-", mtp_num_layers=1),
            r"--hybrid-layer-pattern \*-\*-/\*-; expected \*- or \*E repeated",
        ),
    ],
)
def test_a_model_that_is_no_llama(more, message):
    with pytest.raises(ValueError, match=f"^--load x: {message}"):
        shape_of_arguments(arguments_of(shape_of(), **more), "--load x", None, drop_mtp=True)


def test_what_is_off_is_no_other_model():
    off = dict(glu_linear_offset=0.0, activation_func_clamp_value=None, no_rope_freq=0, mtp_num_layers=0)
    shape_of_arguments(arguments_of(shape_of(), **off, use_mup=None), "--load x", None)


def test_the_softmax_scale_of_every_stock_model():
    shape = shape_of()
    content = plain_config(arguments_of(shape), shape, "float32")
    assert stock_config(content, shape, 16**-0.5, (None,) * LAYERS, "--stock")["model_type"] == "llama"


def test_the_masks_of_transformers_decide(monkeypatch):
    """Whose release might read the same config otherwise."""
    shape, windows = shape_of(), (5, None, 5, 5)
    content = plain_config(arguments_of(shape), shape, "float32")
    assert stock_config(content, shape, None, windows, "--stock")["sliding_window"] == 5
    monkeypatch.setattr(stock, "source_windows", lambda *_: (5, None, 4, 5))
    with pytest.raises(
        ValueError, match="mask in layer 2 of the ministral that would be written has the window 4, the "
    ):
        stock_config(content, shape, None, windows, "--stock")


def test_refused_in_one_line_and_nothing_written(tools, tmp_path):
    sparsity = plan_of("DW", window=WINDOW, sink_tokens=4)
    load = write(tmp_path / "mcore", shape_of(), s2_sparsity=sparsity.canonical_json())
    line = tools.refused("export-hf", "--load", load, "--output", tmp_path / "out", "--stock")
    assert "--stock: layer 1, head 0 has sink_tokens 4; expected" in line
    line = tools.refused("export-hf", "--load", load, "--output", tmp_path / "out", "--stock", "--as-dense")
    assert "--as-dense: not allowed with argument --stock" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mcore"]
