"""Which plans leave the first token out of sight of a query head, and where a run says so."""

from argparse import Namespace

import pytest

from s2_megatron.config.load import SparsityConfig
from s2_megatron.config.sinks import without_sink


def plan(spec, layers="SSSD"):
    config = SparsityConfig.from_data({"block_size": 64, "layers": layers, "specs": {"S": spec}})
    return config.resolve(num_layers=4, num_heads=8, num_kv_heads=4, seq_length=4096)


@pytest.mark.parametrize(
    "spec, heads",
    [
        (dict(window=1024), 24),
        (dict(local_tokens=1024), 24),
        (dict(local_tokens=256, stride=8, layer_step=0), 18),
        (dict(local_tokens=256, stride=8), 20),  # in every other layer no head has an offset of 0
        (dict(window=1024, dense_heads=[0]), 18),
        (dict(window=[4096, 1000, 1, 1]), 18),
        (dict(window=4095), 24),  # it ends in the first block, behind the first token
    ],
)
def test_plans_that_hide_the_first_token(spec, heads):
    text = without_sink(plan(spec))
    assert text.startswith(f"{heads} of 24 query heads in the layers of spec S do not see the first token")
    assert "16.8 % (prose) and 26.1 % (code)" in text and text.endswith("use sink_tokens: 64")


@pytest.mark.parametrize(
    "spec",
    [
        dict(window=1024, sink_tokens=1),
        dict(local_tokens=256, stride=8, sink_tokens=64),
        dict(window=4096),
        dict(local_tokens=128, stride=64, head_step=0, layer_step=0),
    ],
)
def test_plans_that_show_it(spec):
    assert without_sink(plan(spec)) is None


@pytest.mark.parametrize(
    "stored, spec, warned",
    [
        (None, dict(window=1024), True),
        (None, dict(window=1024, sink_tokens=4), False),
        (dict(window=2048), dict(window=1024), False),
    ],
)
def test_a_dense_model_that_goes_on_without_it_is_told(stored, spec, warned, capsys):
    from s2_megatron.megatron.checkpoints.compare import StoredCheckpoint, compare_sparsity

    args = Namespace(num_layers=4, num_attention_heads=8, num_query_groups=4, group_query_attention=True)
    args.seq_length, args.s2_allow_sparsity_change, args.padded_vocab_size = 4096, False, 128
    args.s2_sparsity = None if stored is None else plan(stored).canonical_json()
    compare_sparsity(args, plan(spec), StoredCheckpoint(f"runs/{warned}{spec}", args, 5, True))
    said = capsys.readouterr()
    assert "only its weights are loaded" in said.out + said.err
    assert (
        "S2: WARNING: 24 of 24 query heads in the layers of spec S do not see the first token" in said.out + said.err
    ) == warned
