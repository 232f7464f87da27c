"""The loss, the dataset settings and the small decisions of gpt_data, and the helpers that a run starts with."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset

from s2_megatron import printing
from s2_megatron.context_parallel.documents import read_borders
from s2_megatron.megatron import data as gpt_data
from s2_megatron.megatron import loss as gpt_loss
from s2_megatron.megatron.host.dataset_helpers import check_build
from s2_megatron.megatron.patches import use_prebuilt_dataset_helpers
from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


class Rerun:
    """Megatron's rerun state machine as far as the loss looks at it: keeps what a check rejected."""

    def __init__(self):
        self.rejected = []

    def validate_result(self, result, rejection_func, message, tolerance, fatal):
        assert tolerance == 0.0
        if rejection_func(result):
            self.rejected.append((message, fatal))

    def is_unexpectedly_large(self, result, threshold, context):
        return bool(result.abs() > threshold)


@pytest.fixture
def rerun(monkeypatch):
    machine = Rerun()
    monkeypatch.setattr(gpt_loss, "get_rerun_state_machine", lambda: machine)
    return machine


def with_args(monkeypatch, **settings):
    defaults = dict(logits_load_dir=None, check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=False)
    defaults |= dict(context_parallel_size=1)
    monkeypatch.setattr(gpt_loss, "get_args", lambda: SimpleNamespace(**{**defaults, **settings}))


def test_loss_counts_unmasked_tokens(monkeypatch, rerun):
    with_args(monkeypatch)
    output = torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=torch.bfloat16, requires_grad=True)
    loss, num_tokens, report = gpt_loss.language_model_loss(torch.tensor([[1.0, 0.0, 1.0, 0.0]]), output)
    assert (loss.item(), loss.dtype) == (5.0, torch.float32)
    assert (num_tokens.item(), num_tokens.dtype) == (2, torch.int32)
    assert report["lm loss"].tolist() == [5.0, 2.0]
    assert not report["lm loss"].requires_grad
    assert not rerun.rejected
    loss.backward()
    assert output.grad.tolist() == [[1.0, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_a_bad_loss_ends_the_run(monkeypatch, rerun, value, word):
    output, mask = torch.tensor([[1.0, value]]), torch.ones(1, 2)
    with_args(monkeypatch, check_for_nan_in_loss_and_grad=False)
    gpt_loss.language_model_loss(mask, output)
    assert not rerun.rejected
    with_args(monkeypatch)
    gpt_loss.language_model_loss(mask, output)
    ((message, fatal),) = rerun.rejected
    assert word in message
    assert fatal


def test_a_spiky_loss_is_reported(monkeypatch, rerun):
    with_args(monkeypatch, check_for_spiky_loss=True)
    gpt_loss.language_model_loss(torch.ones(1, 2), torch.tensor([[1.0, 2.0]]))
    assert not rerun.rejected
    gpt_loss.language_model_loss(torch.ones(1, 2), torch.tensor([[100.0, 2.0]]))
    assert rerun.rejected == [("the loss of a microbatch is spiky", False)]


def test_which_dataset():
    from megatron.training.datasets.fim_dataset import GPTFIMDataset
    from megatron.training.datasets.sft_dataset import SFTDataset

    def chosen(**settings):
        return gpt_data._dataset_class(
            SimpleNamespace(**{**dict(sft=False, mock_data=False, fim_data=False), **settings})
        )

    assert chosen() is GPTDataset
    assert chosen(mock_data=True) is MockGPTDataset
    assert chosen(fim_data=True) is GPTFIMDataset
    assert chosen(sft=True, mock_data=True) is SFTDataset


def test_a_middle_stage_reads_nothing_unless_packed(monkeypatch):
    monkeypatch.setattr(gpt_data, "_stage_has_tokens", lambda config, vp_stage: False)
    monkeypatch.setattr(
        gpt_data, "get_args", lambda: SimpleNamespace(sft=False, dataloader_inter_document_masking=False)
    )
    assert gpt_data.next_batch(None, config=None) == gpt_data.GPTBatch()


def test_which_ranks_embed(monkeypatch):
    def ranks(pp_ranks, untied, mtp=()):
        monkeypatch.setattr(gpt_data, "get_args", lambda: SimpleNamespace(untie_embeddings_and_output_weights=untied))
        monkeypatch.setattr(gpt_data, "core_transformer_config_from_args", lambda args: None)
        monkeypatch.setattr(gpt_data, "get_mtp_ranks", lambda pp_ranks, config: list(mtp))
        return gpt_data.embedding_ranks(pp_ranks)

    assert ranks([5], untied=False) == [5]
    assert ranks([0, 4, 8], untied=True) == [0]
    assert ranks([0, 4, 8], untied=False) == [0, 8]
    assert ranks([0, 4, 8], untied=True, mtp=[4]) == [0, 4]


def test_prints_once_and_on_rank_0(monkeypatch, capsys):
    monkeypatch.setattr(printing, "_printed", set())
    monkeypatch.setenv("RANK", "0")
    printing.print_once("first")
    printing.print_once("first")
    monkeypatch.setenv("RANK", "1")
    printing.print_once("second")
    printing.print_table("third")
    assert capsys.readouterr().err == "first\n"


def test_make_is_skipped_only_where_nothing_is_to_be_built(monkeypatch, tmp_path, caplog):
    built = []
    monkeypatch.setattr(dataset_utils, "compile_helpers", lambda: built.append("make"))
    monkeypatch.setattr(dataset_utils, "__file__", str(tmp_path / "utils.py"))
    monkeypatch.setenv("RANK", "1")  # rank 0 is told whether it can
    (tmp_path / "Makefile").write_text("")
    assert not use_prebuilt_dataset_helpers()
    dataset_utils.compile_helpers()
    assert built == ["make"]
    for change in ((tmp_path / f"helpers_cpp{SUFFIX}").touch, (tmp_path / "Makefile").unlink):
        change()
        assert use_prebuilt_dataset_helpers()
        with caplog.at_level(logging.INFO):
            dataset_utils.compile_helpers()
    assert built == ["make"]
    assert "`make` is skipped" in caplog.text
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="reinstall megatron-core"):
        use_prebuilt_dataset_helpers()


@pytest.mark.parametrize(
    "tools, found",
    [
        ({}, "there is no make; expected it on PATH; apt-get install make g++"),
        ({"make": "true", "g++": "true"}, "python3, which is not on PATH, has no pybind11; "),
        (
            {"make": "true", "g++": "true", "python3": "exit 1"},
            "/python3 has no pybind11; expected it in the",
        ),
        ({"make": "true", "g++": "true", "python3": "true", "python3-config": "echo .x.so"}, "says .x.so; expected"),
        ({"make": "true", "g++": "true", "python3": "true", "python3-config": f"echo {SUFFIX}"}, None),
    ],
)
def test_a_checkout_that_cannot_be_built_is_refused(monkeypatch, tmp_path, tools, found):
    folder = tmp_path / "megatron core"
    folder.mkdir()
    (folder / "helpers.cpp").write_text("")
    for tool, does in tools.items():
        (tmp_path / tool).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("RANK", "1")
    check_build(folder)  # rank 0 builds
    monkeypatch.setenv("RANK", "0")
    if found is None:
        check_build(folder)
        return
    with pytest.raises(ValueError, match=re.escape(found)) as raised:
        check_build(folder)
    assert str(raised.value).startswith(f"{folder}: Megatron's dataset helpers are not built for this Python")
    (library := folder / f"helpers_cpp{SUFFIX}").write_text("")
    check_build(folder)
    os.utime(folder / "helpers.cpp", (2**31, 2**31))  # an edited source is built again
    with pytest.raises(ValueError, match=re.escape(found)):
        check_build(folder)
    assert library.exists()


CPU_FOR_CUDA = """
import torch
from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu, is_installed
assert not is_installed()
assert install_if_no_gpu() and install_if_no_gpu() and is_installed()
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
ones = torch.ones(2)
for device in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), torch.cuda.current_device()):
    assert torch.zeros(2, device=device).device.type == "cpu"
    assert ones.to(device).device.type == "cpu"
assert ones.cuda().device.type == ones.pin_memory().device.type == "cpu"
assert torch.ones(2).type() == "torch.cuda.FloatTensor" and torch.ones(2).to(torch.float64).dtype == torch.float64
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().record_event().synchronize()
torch.cuda.manual_seed(3)
first = torch.rand(2)
torch.cuda.manual_seed(3)
assert torch.equal(first, torch.rand(2, device="cuda"))
"""


def test_cuda_stands_for_the_cpu(count_gpus):
    if count_gpus:
        pytest.skip("a GPU is there: nothing is replaced")
    done = subprocess.run([sys.executable, "-c", CPU_FOR_CUDA], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("No GPU found") == 1


@pytest.mark.slow
def test_gpu_packages_are_left_out_without_a_gpu(tmp_path):
    """Megatron takes Transformer Engine's optimizer wherever the package can be imported, and that one needs a GPU."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('imported')")
    script = (
        "from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu\ninstall_if_no_gpu()\n"
        "from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE\nassert not HAVE_APEX_OR_TE\n"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No GPU found: transformer_engine left out" in done.stderr


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sft", [False, True])
def test_borders_are_on_the_host_before_the_layers(monkeypatch, sft, dtype):
    """--s2-cp-comm-type sparse plans by the documents; a layer that read them would wait for the GPU."""
    monkeypatch.setattr(gpt_data.training_loop, "update_seqlen_stats_from_cu_seqlens", lambda borders: None)
    args = SimpleNamespace(
        context_parallel_size=2, s2_cp_comm_type=["all_gather", "sparse"], sft=sft, micro_batch_size=1, seq_length=16,
        dataloader_inter_document_masking=not sft,
    )  # fmt: skip
    borders = torch.tensor([[0, 8, 16]], dtype=dtype)
    batch = dict(cu_seqlens=borders, cu_seqlens_padded=None, max_seqlen=torch.tensor(8), local_cp_size=None)
    params = gpt_data._packed_seq_params(batch | dict(hybrid_cp_group=None), args)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail("read again"))
    read = params.cu_seqlens_q if sft else params.documents.cu_seqlens
    assert read_borders(read).tolist() == [0, 8, 16]
