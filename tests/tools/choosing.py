"""A checkpoint and a model that are made up, for the tests of s2-megatron choose-dense."""

from __future__ import annotations

import itertools
from argparse import Namespace

import numpy as np
import pytest

from s2_megatron.config.load import SparsityConfig
from s2_megatron.tools import commands
from s2_megatron.tools.choose_dense.plan import dense_kv_heads

DENSE_LOSS = 2.0
EXPERTS = dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64)  # of a checkpoint's arguments
CONFIGS = {
    "plain": "layers: S\nspecs:\n  S: {local_tokens: 64, stride: 4}\n",
    "mixed": "layers: SSSD\nspecs:\n  S: {local_tokens: 64, stride: 4}\n",
    "offsets by layer": "layers: S\nspecs:\n  S: {local_tokens: 64, stride: 16, base_offset: 3, layer_step: 5}\n",
    "two specs": "layers: [A, A1, D, A]\nspecs:\n  A: {local_blocks: 2, stride: 8}\n"
    "  A1: {local_blocks: 2, stride: 4}\n",
    "dense heads": "layers: S\nspecs:\n  S: {local_tokens: 64, stride: 8, dense_heads: {last: 1}}\n",
    "ranges": "layers: S\nsoftmax_scale: 0.25\nspecs:\n  S:\n    ranges: [{end_blocks: 2, stride: 1}, {end_blocks: 9, "
    "stride: 4}, {stride: 6}]\n    layer_step: 7\n",
    "window": "layers: SD\nspecs:\n  S: {local_tokens: 64}\n",
    "tokens": "layers: SSSD\nspecs:\n  S: {window: 50, stride: 4, sink_tokens: 5}\n",
    "paper": "layers: S\nspecs:\n  S: {local_blocks: 2, stride: 16, head_step: paper, slide: query}\n",
}  # fmt: skip


@pytest.fixture
def command(tmp_path, monkeypatch):
    """run(options, trained=changes of the checkpoint's arguments, config=text) -> the status."""
    from s2_megatron.tools.dataset.write import write_dataset

    trained = dict(
        num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2, kv_channels=16,
        group_query_attention=True, padded_vocab_size=256, add_qkv_bias=False, qk_layernorm=False, seq_length=256,
        untie_embeddings_and_output_weights=True, split=None, swiglu=True, normalization="RMSNorm",
        position_embedding_type="rope",
    )  # fmt: skip
    write_dataset(tmp_path / "text", (np.full(600, number, np.uint16) for number in range(10)))

    def run(*options: str, config: str = CONFIGS["mixed"], **changes) -> int:
        monkeypatch.setattr("s2_megatron.tools.hf.torch_dist.iteration_folder", lambda load: load / "iter_0000001")
        arguments = Namespace(**trained | changes)
        monkeypatch.setattr("s2_megatron.tools.hf.checkpoint_model.checkpoint_arguments", lambda folder: arguments)
        others = {"f": FUNCTION, "d": "layers: D\n", "w": WINDOWS, "h": CONFIGS["mixed"], "v": ONE_WIDE}
        for name, text in {"plan": config, **others}.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        given = {"--load": "dense", "--s2-config": "plan.yaml", "--data-path": "text", "--write": "new.yaml"}
        given |= {"--split": "80,20,0", "--sequences": "4"} | dict(zip(options[::2], options[1::2]))
        switches = ["--eod-mask-loss"] if given.pop("--eod-mask-loss", None) else []
        monkeypatch.chdir(tmp_path)
        try:
            return commands.main(["choose-dense", *itertools.chain.from_iterable(given.items()), *switches])
        except SystemExit as end:
            return end.code

    return run


STORED = SparsityConfig.from_data({"layers": "S", "specs": {"S": {"local_tokens": 128, "stride": 4}}}).resolve(
    num_layers=4, num_heads=4, num_kv_heads=2, seq_length=256
)
ONE_HEAD = "layers: DDDS\nspecs:\n  S: {local_tokens: 64, stride: 4, dense_heads: [0]}\n"
ONE_WIDE = "layers: [S, A, S, S]\nspecs:\n  S: {local_tokens: 64}\n  A: {local_tokens: 256}\n"
WINDOWS = "layers: S\nspecs:\n  S: {local_tokens: 64}\n"
FUNCTION = "layers: S\nspecs:\n  S: {function: 'a:b'}\n"


@pytest.fixture
def made_up(monkeypatch):
    """Losses as if every head needed the context equally, but KV head 1 of layer 2 ten times as much. first: the first
    sequence's share of what is lost; the others have equal ones."""

    class Measured:
        scale = 1.0
        first = 0.25

        built = measured = 0
        most = 10**9

        def __init__(self, folder, sequences):
            assert sequences.tokens.shape[1] == 257
            type(self).built += 1
            self.count = len(sequences.tokens)

        def shares(self, sparsity) -> list[float]:
            """As of Measured; the dense loss is of all sequences alike."""
            lost, rest = self.loss(sparsity) - DENSE_LOSS, self.count - 1
            parts = [self.first, *[(1 - self.first) / rest] * rest] if rest else [1.0]
            return [DENSE_LOSS / self.count + lost * part for part in parts]

        @classmethod
        def loss(cls, sparsity) -> float:
            if cls.measured == cls.most:
                raise KeyboardInterrupt
            cls.measured += 1
            print("what the kernels say")
            lost = 0.0
            for at, layer in enumerate(sparsity.layers):
                dense = range(2) if layer.pattern is None else dense_kv_heads(layer.pattern)
                lost += sum((0.1 if (at, kv) == (2, 1) else 0.01) for kv in range(2) if kv not in dense)
            return DENSE_LOSS + lost * cls.scale

    monkeypatch.setattr("s2_megatron.tools.choose_dense.measure.Measured", Measured)
    return Measured
