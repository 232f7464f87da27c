"""Flags of Megatron that its own parser takes and its config builder drops, so that they do nothing without a word."""

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from s2_megatron.megatron.checkpoints.compare import StoredCheckpoint, compare_rope_scaling, dropout_note
from s2_megatron.megatron.model.rope_scaling import computed_factor, set_rope_scaling
from tests.megatron import forks
from tests.megatron.without_gpt import require_gpt_model

SCRIPT = Path(__file__).parent / "scripts" / "dropped_flags.py"
# What the model's config does not get, and need not.
EXPLAINED = {
    "--heterogeneous-layers-config-encoded-json": "read by Megatron's validation; refused with S2, and by the export",
}

# What no module of Megatron reads as `args.X` outside of those that define and check flags.
DROPPED = {
    "--inference-dynamic-batching": "of the inference config, which training does not build; refused with S2",
    "--num-virtual-stages-per-pipeline-rank": "Megatron's validation makes virtual_pipeline_model_parallel_size of it",
    "--use-legacy-static-engine": "Megatron keeps it so that old launch lines start",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    require_gpt_model()
    folder = tmp_path_factory.mktemp("flags")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    forks.run(SCRIPT, [str(folder / "result.json")], environment, folder)
    return json.loads((folder / "result.json").read_text())


def test_every_named_flag_reaches_the_model_or_is_read(found):
    assert found["count"] > 200
    assert set(found["model"]) == set(EXPLAINED)
    assert set(found["dropped"]) == set(DROPPED)


def test_training_builds_the_model_with_the_factor_of_the_flag(found):
    assert found["factors"] == {"4.0": [4.0, 4.0], "8.0": [8.0, 8.0], "32.0": [32.0, 32.0]}


def checkpoint(weights_only=False, **args) -> StoredCheckpoint:
    return StoredCheckpoint("runs/a", Namespace(**args), 5, weights_only)


def test_a_resume_goes_on_with_the_factor_that_was_computed(capsys):
    """A checkpoint from before the factor was handed on computed 8, whatever its flag said."""
    run = Namespace(use_rope_scaling=True, rope_scaling_factor=4.0)
    old = dict(use_rope_scaling=True, rope_scaling_factor=4.0)
    assert computed_factor(Namespace(**old)) == 8.0 and computed_factor(Namespace()) is None
    with pytest.raises(ValueError, match=r"--load runs/a: its model computed --rope-scaling-factor 8, .*factor 8 to"):
        compare_rope_scaling(run, checkpoint(**old))
    compare_rope_scaling(run, checkpoint(weights_only=True, **old))
    assert "this run computes 4" in capsys.readouterr().err
    new = Namespace(**old)
    set_rope_scaling(new, model := Namespace())
    assert model.rope_scaling_factor == computed_factor(new) == 4.0
    compare_rope_scaling(run, checkpoint(**vars(new)))
    for stored in (dict(use_rope_scaling=False), old | {"rope_scaling_factor": 32.0}):  # other flags: meant
        compare_rope_scaling(run, checkpoint(**stored))
    compare_rope_scaling(Namespace(use_rope_scaling=False), checkpoint(**old))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "ours, theirs, said",
    [
        ((0.1, 0.0), (0.0, 0.0), "--hidden-dropout 0.1 (0.1 is Megatron's default), and the model in --load runs/a"),
        ((0.1, 0.1), (0.0, 0.0), "give --hidden-dropout 0 and --attention-dropout 0"),
        ((0.1, 0.0), (0.1, 0.0), None),
        ((0.0, 0.0), (0.0, 0.0), None),
        ((0.0, 0.0), (0.1, 0.1), None),
    ],
)
def test_a_dropout_that_the_loaded_model_did_not_have(ours, theirs, said):
    run, stored = (dict(hidden_dropout=hidden, attention_dropout=attention) for hidden, attention in (ours, theirs))
    note = dropout_note(Namespace(**run), checkpoint(**stored))
    assert note is None if said is None else said in note
