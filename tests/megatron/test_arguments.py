"""The flags, and what prepare_s2 does with them, through Megatron's real parser."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from functools import cache
from types import SimpleNamespace

import pytest

from s2_megatron.config.load import load_config
from s2_megatron.megatron.arguments import add_s2_arguments, prepare_s2
from s2_megatron.megatron.records.counted_targets import counted_targets
from s2_megatron.megatron.records.metrics import _report_resumed
from s2_megatron.megatron.records.report import report_flags_without_effect, report_tensor_parallel
from s2_megatron.megatron.settings import S2Settings
from tests.megatron.arguments import CONFIG, arguments, parse_cases

SCALED = CONFIG + "softmax_scale: 0.0078125\n"
PYTHON_PATTERN = "layers: P\nblock_size: 64\nspecs:\n  P: {function: 'tests.megatron.arguments:every_block'}\n"


def latent(config: str) -> list[str]:
    return arguments({"--s2-config": config, "--multi-latent-attention": None}, ("--group-query-attention",))


@cache
def results(folder) -> dict[str, dict]:
    files = {"plain": CONFIG, "scaled": SCALED, "python": PYTHON_PATTERN, "wrong": CONFIG.replace("DSSS", "DSX")}
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    plain, scaled, python, wrong, missing = (str(folder / f"{name}.yaml") for name in (*files, "missing"))
    cases = {
        "no_config": dict(argv=arguments()),
        "ignored": dict(argv=arguments({"--s2-backend": "reference", "--s2-dense-core": "s2"})),
        "plain": dict(argv=arguments({"--s2-config": plain})),
        "mha": dict(argv=arguments({"--s2-config": plain}, ("--group-query-attention",))),
        "mtp": dict(argv=arguments({"--s2-config": plain, "--mtp-num-layers": "2"})),
        "mtp_repeated": dict(
            argv=arguments({"--s2-config": plain, "--mtp-num-layers": "2", "--mtp-use-repeated-layer": None})
        ),
        "scaled": dict(argv=arguments({"--s2-config": scaled})),
        "scaled_twice": dict(argv=arguments({"--s2-config": scaled}), attributes={"softmax_scale": 0.0078125}),
        "scaled_otherwise": dict(argv=arguments({"--s2-config": scaled}), attributes={"softmax_scale": 0.5}),
        "scaled_by_script": dict(argv=arguments({"--s2-config": plain}), attributes={"softmax_scale": 0.5}),
        "huge_scale_of_script": dict(argv=arguments({"--s2-config": plain}), attributes={"softmax_scale": 1e39}),
        "latent": dict(argv=latent(plain)),
        "latent_scaled": dict(argv=latent(scaled)),
        "latent_scaled_by_script": dict(argv=latent(plain), attributes={"softmax_scale": 0.5}),
        "mup": dict(argv=arguments({"--s2-config": plain, "--use-mup": None})),
        "mup_otherwise": dict(argv=arguments({"--s2-config": scaled, "--use-mup": None})),
        "mup_equal": dict(argv=arguments({"--s2-config": scaled, "--use-mup": None, "--kv-channels": "128"})),
        "python": dict(argv=arguments({"--s2-config": python, "--s2-allow-python-patterns": None})),
        "python_forbidden": dict(argv=arguments({"--s2-config": python})),
        "wrong": dict(argv=arguments({"--s2-config": wrong})),
        "missing": dict(argv=arguments({"--s2-config": missing})),
        "heads": dict(argv=arguments({"--s2-config": plain, "--num-query-groups": "3"})),
        "no_triton": dict(argv=arguments({"--s2-config": plain}), device="cuda", missing="triton"),
        "interpreted": dict(argv=arguments({"--s2-config": plain, "--s2-backend": "triton"}), interpret="1"),
        "interpreted_bf16": dict(
            argv=arguments(
                {"--s2-config": plain, "--s2-backend": "triton", "--bf16": None, "--no-masked-softmax-fusion": None}
            ),
            interpret="1",
        ),
        "triton_on_cpu": dict(argv=arguments({"--s2-config": plain, "--s2-backend": "triton"})),
    }
    project = {"--wandb-project": "curves", "--wandb-exp-name": "run"}
    beside = project | {"--tensorboard-dir": str(folder / "tensorboard")}
    throughput = {"--log-throughput": None, "--log-timers-to-tensorboard": None}
    cases |= {
        "wandb_alone": dict(argv=arguments(project)),
        "wandb_beside_tensorboard": dict(argv=arguments(beside)),
        "wandb_complete": dict(argv=arguments(beside | throughput)),
        "position_loss": dict(argv=arguments({"--s2-position-loss": "2000"})),
        "position_loss_of_a_teacher": dict(
            argv=arguments({"--s2-position-loss": "8"}), attributes={"logits_load_dir": "logits"}
        ),
    }
    return dict(zip(cases, parse_cases(list(cases.values())), strict=True))


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    return results(tmp_path_factory.mktemp("arguments"))


def accepted(result):
    assert result["error"] is None, result["message"]
    return result


def test_flags():
    args = add_s2_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([])
    assert vars(args) == {
        "s2_config": None,
        "s2_backend": "auto",
        "s2_dense_core": "auto",
        "s2_cp_comm_type": ["sparse"],
        "s2_cp_keep_received": False,
        "s2_keep_attention_output": False,
        "s2_allow_python_patterns": False,
        "s2_allow_sparsity_change": False,
        "s2_loss_log": None,
        "s2_traceback": False,
        "s2_position_loss": None,
        "s2_loss_from_token": None,
        "s2_checksums": True,
    }


def test_to_check_a_run_installs_nothing(monkeypatch):
    from s2_megatron.megatron import arguments as module
    from s2_megatron.megatron.records.position_loss import position_loss

    parser = add_s2_arguments(argparse.ArgumentParser(allow_abbrev=False))
    others = dict(sft=False, eod_mask_loss=True, seq_length=1024, logits_load_dir=None, padded_vocab_size=None)
    args = parser.parse_args(["--s2-position-loss", "8"], Namespace(**others, log_throughput=False))
    before = dict(vars(args))
    for name in ("check_tokens", "compare_with_checkpoint"):
        monkeypatch.setattr(module, name, lambda *given: None)
    assert module.check_run(args) is None
    assert vars(args) == before and position_loss() is None and counted_targets() is None
    args.s2_position_loss = 2000
    with pytest.raises(ValueError, match="--s2-position-loss 2000 with --seq-length 1024"):
        module.check_run(args)


@pytest.mark.parametrize("name", ["plain", "wandb_alone"])
def test_processes_with_a_flight_recorder_end(cases, name):
    """With Megatron's default for the dump at exit none does, on GPUs."""
    assert accepted(cases[name])["args"]["flight_recorder_extra_dump_on_exec"] is False


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--s2-cp-comm-type sparse p2p", "argument --s2-cp-comm-type: invalid choice: 'p2p' (choose from"),
        ("--s2-backend cudnn", "argument --s2-backend: invalid choice"),
    ],
)
def test_wrong_flags_are_one_error(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        add_s2_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(flags.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("error:") == 1 and message in error


def test_settings_hold_what_the_flags_say():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    others = dict(sft=False, dataloader_inter_document_masking=False, seq_length=1024)
    args = add_s2_arguments(parser).parse_args([], Namespace(**others))
    assert S2Settings.from_args(args) == S2Settings(seq_length=1024)
    flags = (
        "--s2-backend reference --s2-dense-core s2 --s2-cp-comm-type a2a allgather sparse --s2-cp-keep-received "
        "--s2-keep-attention-output"
    )
    others["dataloader_inter_document_masking"] = True
    settings = S2Settings.from_args(parser.parse_args(flags.split(), Namespace(**others)))
    types = ("a2a", "all_gather", "sparse")
    assert settings == S2Settings("reference", "s2", types, True, True, 1024, packed=True, packed_cut="sequence")
    assert [settings.comm_type(layer) for layer in range(5)] == [*types, "sparse", "sparse"]
    assert settings.planned_length is None and S2Settings(seq_length=64).planned_length == 64
    others["sft"] = True  # whose documents are padded and cut one by one
    assert S2Settings.from_args(parser.parse_args([], Namespace(**others))).packed_cut == "document"


@pytest.mark.parametrize("name, flag", [("backend", "--s2-backend"), ("dense_core", "--s2-dense-core")])
def test_settings_that_do_not_exist(name, flag):
    with pytest.raises(ValueError, match=f"{name}='flash'; expected one of auto, .*set {flag}"):
        S2Settings(**{name: "flash"})


def test_a_script_without_the_flags_is_told_so():
    with pytest.raises(ValueError, match="extra_args_provider=add_s2_arguments"):
        prepare_s2(argparse.Namespace(yaml_cfg=None))


def test_without_a_config_nothing_happens_and_it_is_said(cases):
    result = accepted(cases["no_config"])
    assert result["is_s2"] is False
    assert result["printed"] == "S2: no --s2-config: the model is Megatron's own, without S2 attention\n"
    assert not {"s2_sparsity", "s2_density"} & set(result["args"])


def test_ignored_flags_are_said(cases):
    assert (
        "--s2-backend reference, --s2-dense-core s2 without --s2-config: ignored"
        in accepted(cases["ignored"])["printed"]
    )


@pytest.mark.parametrize(
    "size, types, keep, said",
    [
        (1, ["a2a"], True, "--s2-cp-comm-type, --s2-cp-keep-received with --context-parallel-size 1: no effect"),
        (1, ["sparse"], True, "--s2-cp-keep-received with --context-parallel-size 1: no effect"),
        (2, ["a2a", "sparse"], True, None),
        (1, ["sparse"], False, None),
    ],
)
def test_flags_without_effect_are_said(size, types, keep, said, monkeypatch):
    lines = []
    monkeypatch.setattr("s2_megatron.megatron.records.report.print_once", lines.append)
    args = argparse.Namespace(context_parallel_size=size, s2_cp_comm_type=types, s2_cp_keep_received=keep)
    report_flags_without_effect(args)
    assert lines == ([f"S2: {said}"] if said else [])


@pytest.mark.parametrize("name, kv_heads, mtp", [("plain", 2, 0), ("mha", 4, 0), ("mtp", 2, 2)])
def test_sparsity_and_density_are_on_args(cases, tmp_path, name, kv_heads, mtp):
    result = accepted(cases[name])
    path = tmp_path / "renamed.yaml"
    path.write_text(CONFIG)
    expected = load_config(path).resolve(
        num_layers=4, num_heads=4, num_kv_heads=kv_heads, seq_length=1024, mtp_num_layers=mtp
    )
    assert result["args"]["s2_sparsity"] == expected.canonical_json()
    assert result["args"]["s2_density"] == expected.density()
    assert result["is_s2"]


def test_a_repeated_mtp_layer_has_one_pattern(cases):
    stored = json.loads(accepted(cases["mtp_repeated"])["args"]["s2_sparsity"])
    assert len(stored["mtp_layers"]) == 2 and len(set(stored["mtp_layers"])) == 1


def test_softmax_scale_reaches_the_model_config(cases):
    assert accepted(cases["plain"])["config_softmax_scale"] is None
    assert accepted(cases["scaled"])["config_softmax_scale"] == 0.0078125
    assert "softmax scale 0.0078125 in every layer, dense ones included" in cases["scaled"]["printed"]
    assert json.loads(cases["scaled"]["args"]["s2_sparsity"])["softmax_scale"] == 0.0078125


def test_softmax_scale_of_another_source(cases):
    assert accepted(cases["scaled_twice"])["config_softmax_scale"] == 0.0078125
    assert "0.0078125 in the YAML and 0.5 by args.softmax_scale" in cases["scaled_otherwise"]["message"]
    by_script = accepted(cases["scaled_by_script"])
    assert by_script["config_softmax_scale"] == 0.5
    assert json.loads(by_script["args"]["s2_sparsity"])["softmax_scale"] == 0.5
    assert "softmax_scale=1e+39; expected a number, 1e-06 to 1e+06" in cases["huge_scale_of_script"]["message"]


def test_softmax_scale_of_multi_latent_attention(cases):
    accepted(cases["latent"])
    for name in ("latent_scaled", "latent_scaled_by_script"):
        assert "--multi-latent-attention computes its own" in cases[name]["message"]
        assert "remove softmax_scale from the YAML" in cases[name]["message"]


def test_softmax_scale_of_mup(cases):
    assert accepted(cases["mup"])["config_softmax_scale"] == 1 / 32
    assert accepted(cases["mup_equal"])["config_softmax_scale"] == 1 / 128
    assert "0.0078125 in the YAML and 0.03125 by --use-mup" in cases["mup_otherwise"]["message"]


def test_python_patterns_need_their_flag(cases):
    assert accepted(cases["python"])["args"]["s2_density"] == 1
    assert "--s2-allow-python-patterns" in cases["python_forbidden"]["message"]


@pytest.mark.parametrize(
    "name, words", [("wrong", "layers"), ("missing", "no such file"), ("heads", "--num-query-groups 3")]
)
def test_a_config_that_does_not_fit(cases, name, words):
    assert cases[name]["error"] in ("ValueError", "ConfigError")
    assert words in cases[name]["message"]


def test_backend(cases):
    assert "S2 attention backend: reference (chosen for cpu)" in accepted(cases["plain"])["printed"]
    assert "needs Triton on cuda, and it is not installed" in cases["no_triton"]["message"]
    assert "the kernels need a GPU" in cases["triton_on_cpu"]["message"]
    assert accepted(cases["interpreted"])["is_s2"]
    message = str(cases["interpreted_bf16"]["message"])
    assert message.startswith("--s2-backend triton: query has dtype bfloat16, which Triton's interpreter")


@pytest.mark.parametrize("dense_heads, warned", [("[0]", True), ("{spread: 2}", False)])
def test_uneven_tensor_parallel_work_is_warned_about(dense_heads, warned, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(f"layers: S\nspecs:\n  S: {{local_tokens: 128, stride: 8, dense_heads: {dense_heads}}}\n")
    sparsity = load_config(path).resolve(num_layers=2, num_heads=4, num_kv_heads=4, seq_length=8192)
    report_tensor_parallel(sparsity, 2)
    printed = capsys.readouterr().err
    assert "2 tensor-parallel ranks" in printed
    assert ("WARNING" in printed) == warned


def test_start_up_says_which_flag_wandb_lacks(cases):
    printed = {name: accepted(result)["printed"] for name, result in cases.items() if name.startswith("wandb_")}
    assert "wandb project curves will receive no curves" in printed["wandb_alone"]
    assert "add --tensorboard-dir" in printed["wandb_alone"]
    text = "wandb project curves will receive no throughput; add --log-throughput --log-timers-to-tensorboard"
    assert text in printed["wandb_beside_tensorboard"]
    assert "wandb" not in printed["wandb_complete"]


def test_position_losses_that_cannot_be(cases):
    assert "--s2-position-loss 2000 with --seq-length 1024; expected 1 to 1024" in cases["position_loss"]["message"]
    assert "--s2-position-loss with --logits-load-dir" in cases["position_loss_of_a_teacher"]["message"]


def test_a_resumed_wandb_run_is_said_to_keep_its_first_values(capsys):
    _report_resumed(SimpleNamespace(resumed=True, id="abc", step=26))
    assert "wandb run abc has steps up to 25" in capsys.readouterr().err
    _report_resumed(SimpleNamespace(resumed=False, id="abc", step=0))
    assert capsys.readouterr().err == ""


def test_a_config_that_stands_twice(capsys):
    flag = "--s2-config"
    with pytest.raises(SystemExit) as stop:
        add_s2_arguments(argparse.ArgumentParser()).parse_args([flag, "a.yaml", flag, "b.yaml"])
    assert stop.value.code == 2
    assert "given twice, 'a.yaml' and 'b.yaml'; expected one value; remove one of them" in capsys.readouterr().err


def test_the_loss_counts_from_the_id_of_a_token(capsys):
    parser = add_s2_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--s2-loss-from-token", "1792"]).s2_loss_from_token == 1792
    with pytest.raises(SystemExit):
        parser.parse_args(["--s2-loss-from-token=-1"])
    assert "expected the id of a token, 0 or more" in capsys.readouterr().err
