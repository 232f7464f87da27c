"""What Megatron raises between its validation and the second iteration is one error line with status 2: a launch that
`s2-megatron check` takes on a machine that does not build the model still ends without a traceback, and says why."""

from __future__ import annotations

import shutil

import pytest

from tests.megatron.conftest import run_processes
from tests.megatron.launch_trial import ENTRY, Trial
from tests.megatron.without_gpt import require_gpt_model

CACHE = {"--data-cache-path": ["{run}/empty"]}
PART = {"--train-data-path": ["{lab}/corpus"], "--valid-data-path": ["{lab}/corpus"], "--data-path": None}
# (changes of the trial's launch, processes, words of the line, in any order)
STARTS = {
    # Processes
    "experts on too many ranks": ({"--num-experts": ["8"], "--expert-model-parallel-size": ["4"]}, 2,
        ("world_size (2) is not divisible by expert_tensor_model_pipeline_parallel size (4)",)),
    "no experts": ({"--expert-model-parallel-size": ["0"]}, 1, ("expert_tensor_model_pipeline_parallel_size",)),
    "UCC": ({"--pipeline-model-parallel-comm-backend": ["ucc"]}, 1, ("expected CUDA_DEVICE_MAX_CONNECTIONS=8",)),
    "no groups": ({"--lazy-mpu-init": []}, 1, ("Default process group has not been initialized",)),
    "a group": ({"--use-sharp": []}, 1, ("data parallel group",)),
    "a mode": ({"--rerun-mode": ["report_stats"]}, 1, ("'report_stats' is not a valid RerunMode", "--rerun-mode=")),
    # Packages
    "a package": ({"--enable-ft-package": []}, 1, ("No module named 'nvidia_resiliency_ext'",)),
    "an exit": ({"--adlr-autoresume": []}, 1, ("sys.exit(None): ADLR autoresume is not available",)),
    "an optimizer": ({"--optimizer": ["muon"]}, 1, ("emerging-optimizers package is required",)),
    "wandb": ({"--wandb-project": ["p"], "--save": None, "--save-interval": None}, 1, ("wandb", "--save=None")),
    # The model
    "norms": ({"--no-persist-layer-norm": None}, 1, ("persist_layer_norm not supported", "persist_layer_norm=True")),
    "layers of experts": ({"--moe-layer-freq": ["[1]"], "--num-experts": ["2"]}, 1,
        ("moe_layer_pattern: 1, expected 2",)),
    "YaRN": ({"--position-embedding-type": ["yarn"], "--rotary-interleaved": []}, 1, ("Yarn RoPE does not support",)),
    "weights": ({"--init-method-std": ["-1"]}, 1, ("std >= 0.0, but found std -1",)),
    "a config that is written": ({"--config-logger-dir": ["{run}"]}, 1, ("config_logger.py",)),
    # Data
    "weights of data": ({"--data-path": ["0", "{lab}/corpus"]}, 1, ("sum(normalized_weights)",)),
    "a weight below 0": ({"--data-path": ["2", "{lab}/corpus", "-1", "{lab}/corpus"]}, 1, ("weights",)),
    "a split of parts": (PART, 1, ("split and blend_per_split are incompatible, with split=90,5,5",)),
    "lists in no JSON": ({"--per-split-data-args-path": ["{lab}/data_args"], "--data-path": None, "--split": None}, 1,
        ("JSONDecodeError",)),
    "no such list": ({"--data-args-path": ["{run}/none"], "--data-path": None}, 1, ("/none: No such file",)),
    "sequences": ({"--per-dataset-sequences-path": ["{lab}/splits.json"]}, 1, ("sequences_per_dataset",)),
    "validation sets": ({"--multiple-validation-sets": []}, 1, ("currently requires --full-validation",)),
    "no interval": ({"--eval-interval": None}, 1, ("--eval-interval is not given",)),
    "no iteration": ({"--train-iters": None, "--train-samples": ["1"]}, 1, ("at iteration 0 of 0 without a step",)),
    # The first iteration
    "batches": ({"--dataloader-type": ["external"]}, 1, ("object is not an iterator",)),
    "an empty cache": ({"--dataloader-defer-npy-index-mmap": []} | CACHE, 1, ("No such file or directory",)),
    "dropout": ({"--hidden-dropout": ["-1"]}, 1, ("dropout probability has to be between 0 and 1",)),
    "odd heads": ({"--kv-channels": ["3"]}, 1, ("The size of tensor",)),
    "a vocabulary": ({"--no-pad-vocab-size": []}, 1, ("unsupported operand type(s)",)),
    "a log": ({"--log-interval": ["0"]}, 1, ("--log-interval=0",)),
    "phases": ({"--phase-transition-iterations": ["1,2"]}, 1, ("phase_transition_samples",)),
    "a profile": ({"--rl-profile": []}, 1, ("initialize_rl_profiler",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def trial(tmp_path_factory, count_gpus):
    require_gpt_model()
    if count_gpus:
        pytest.skip("the starts are forked from a process that has no GPU")
    return Trial(tmp_path_factory.mktemp("starts"))


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_a_start_that_megatron_refuses_is_one_line(trial, name):
    changes, processes, words = STARTS[name]
    run = trial.next_run()
    (run / "empty").mkdir()
    command = [str(ENTRY), *trial.words([changes], run)]
    status, output = run_processes(command, processes, 200, {"WANDB_MODE": "offline"}, forked=True)
    shutil.rmtree(run, ignore_errors=True)
    errors = {line for line in output.splitlines() if line.startswith("error: ")}  # torchrun shows the first rank's
    assert status == 2 and len(errors) == 1 and "Traceback" not in output, output[-3000:]
    assert all(word in errors.copy().pop() for word in words), errors
    assert "expected " in output
