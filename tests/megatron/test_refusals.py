"""Every refusal raises and names its flag; every attention flag of the installed Megatron has been decided."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from s2_megatron.megatron.model.core_attention import HONOURED_CONFIG
from s2_megatron.megatron.refusals.hybrid import DERIVED, RUN, RUN_VALUES
from s2_megatron.megatron.refusals.model import MODEL_ARGUMENTS, REVIEWED
from s2_megatron.megatron.refusals.table import REFUSALS, refuse_yaml_command_line
from tests.megatron.arguments import CONFIG, arguments, parse_cases
from tests.megatron.decided import ATTENTION, HONOURED, NOT_ATTENTION, SEEN_AND_REFUSED
from tests.megatron.graph_cases import ACCEPTED_GRAPHS, ALSO_REFUSED_GRAPHS, GRAPH_CASES
from tests.megatron.hybrid_cases import ACCEPTED_HYBRIDS, ALSO_REFUSED_HYBRIDS, HYBRID_CASES
from tests.megatron.refusal_cases import ACCEPTED as ACCEPTED_OTHERS
from tests.megatron.refusal_cases import ALSO_REFUSED as ALSO_REFUSED_OTHERS
from tests.megatron.refusal_cases import CASES as OTHER_CASES
from tests.megatron.refusal_cases import LAYERS
from tests.megatron.unproven_cases import ALSO_UNPROVEN, UNPROVEN

CASES = OTHER_CASES | GRAPH_CASES | UNPROVEN | HYBRID_CASES
ALSO_REFUSED = ALSO_REFUSED_OTHERS | ALSO_REFUSED_GRAPHS | ALSO_UNPROVEN | ALSO_REFUSED_HYBRIDS
ACCEPTED = ACCEPTED_OTHERS | ACCEPTED_GRAPHS | ACCEPTED_HYBRIDS


@cache
def results(config: str) -> dict[str, dict]:
    named = {**{name: case for name, (case, _) in CASES.items()}, **ACCEPTED, "future": dict(version="0.21.0rc0")}
    named |= {name: case for name, (_, case, *_) in ALSO_REFUSED.items()} | {
        f"layers_{name}": case for name, (case, _) in LAYERS.items()
    }
    cases = []
    for case in named.values():
        flags = {**case.get("flags", {}), "--s2-config": config}
        cases.append({**case, "argv": arguments(flags, tuple(case.get("without", ())))})
    return dict(zip(named, parse_cases(cases), strict=True))


@pytest.fixture(scope="session")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("refusals") / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_every_refusal_has_a_case():
    assert set(CASES) == {refusal.name for refusal in REFUSALS}
    assert len(REFUSALS) == len({refusal.name for refusal in REFUSALS})


@pytest.mark.parametrize("name", [refusal.name for refusal in REFUSALS])
def test_refused_with_the_flag_to_change(name, config_file):
    result = results(config_file)[name]
    assert result["error"] == "ValueError", result
    assert CASES[name][1] in result["message"]
    assert "\n" not in result["message"], "the case is refused for more than one reason"


@pytest.mark.parametrize("name", ALSO_REFUSED)
def test_other_ways_to_a_refusal(name, config_file):
    result = results(config_file)[name]
    assert result["error"] == "ValueError" and result["refused_by_megatron"] is None, result
    refusal, _, *words = ALSO_REFUSED[name]
    assert (words[0] if words else CASES[refusal][1]) in result["message"] and "\n" not in result["message"]


@pytest.mark.parametrize("name", LAYERS)
def test_what_the_layers_cannot_do(name, config_file):
    result = results(config_file)[f"layers_{name}"]
    assert result["error"] == "ValueError" and result["refused_by_megatron"] is None, result
    assert result["message"].startswith("--s2-config: ") and result["message"].endswith(LAYERS[name][1])
    assert "\n" not in result["message"]


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name, config_file):
    result = results(config_file)[name]
    assert result["error"] is None, result["message"]
    assert result["refused_by_megatron"] is None
    assert 0 < result["args"]["s2_density"] < 1


def test_version_bounds(config_file):
    assert "0.18.3" in results(config_file)["megatron_version"]["message"]
    assert (
        "megatron-core 0.21.0rc0 is installed; supported are >=0.19.2,<0.21"
        in results(config_file)["future"]["message"]
    )


def test_all_problems_are_named_at_once(config_file):
    flags = {"--s2-config": config_file, "--flash-decode": None, "--window-size": "128,0"}
    (result,) = parse_cases([{"argv": arguments(flags, ("--attention-dropout",))}])
    assert "3 settings cannot be honoured" in result["message"]
    assert all(
        flag in result["message"] for flag in ("--attention-dropout 0", "remove --window-size", "--flash-decode")
    )


@pytest.mark.parametrize("seq_length, nearest", [("1088", "1024 or 1536"), ("256", "512")])
def test_a_length_that_context_parallel_ranks_cannot_cut_names_the_nearest(config_file, seq_length, nearest):
    flags = {"--s2-config": config_file, "--context-parallel-size": "4", "--seq-length": seq_length}
    refused, accepted = parse_cases(
        [
            {"argv": arguments({**flags, **more}), "world_size": 4}
            for more in ({}, {"--s2-cp-comm-type": "all_gather", "--seq-length": "1024"})
        ]
    )
    assert f"use --seq-length {nearest}, or a smaller block_size" in refused["message"]
    assert accepted["error"] is None


def test_yaml_cfg_beside_s2_config_is_refused_before_parsing():
    with pytest.raises(ValueError, match="remove --yaml-cfg"):
        refuse_yaml_command_line(["script.py", "--yaml-cfg", "model.yaml", "--s2-config=sparsity.yaml"])
    refuse_yaml_command_line(["script.py", "--yaml-cfg", "model.yaml"])
    refuse_yaml_command_line(["script.py", "--s2-config", "sparsity.yaml"])


def test_the_core_module_and_the_command_line_agree():
    assert {name for name, _, _ in HONOURED_CONFIG} <= {refusal.name for refusal in REFUSALS}


@cache
def of_megatron() -> tuple[set[str], set[str]]:
    """The names of all arguments of the installed Megatron, and of those that make a model."""
    script = (
        "import argparse, json\nfrom s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu\n"
        "install_if_no_gpu()\nfrom s2_megatron.megatron.refusals.model import model_arguments\n"
        "from megatron.training.arguments import add_megatron_arguments\nparser = argparse.ArgumentParser()\n"
        "add_megatron_arguments(parser)\n"
        "print('names:', json.dumps([[action.dest for action in parser._actions], list(model_arguments())]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    every, of_models = json.loads(done.stdout.split("names:")[1])
    return set(every), set(of_models)


def test_every_attention_argument_of_megatron_is_decided():
    """A new attention flag in another Megatron fails here until REFUSALS or HONOURED says what becomes of it."""
    names, _ = of_megatron()
    decided = set(HONOURED) | {refusal.name for refusal in REFUSALS}
    undecided = {name for name in names if ATTENTION.search(name) and not NOT_ATTENTION.search(name)} - decided
    assert not undecided
    listed = {*HONOURED, *RUN, *RUN_VALUES, *MODEL_ARGUMENTS, *DERIVED, *DERIVED.values()}
    assert listed <= set(names), f"no longer an argument of Megatron: {listed - set(names)}"


def test_every_argument_that_makes_a_model_has_been_seen():
    """A new argument in another Megatron fails here. Users are refused it until it stands in REVIEWED."""
    _, names = of_megatron()
    assert not names - REVIEWED - SEEN_AND_REFUSED
    assert len(names) > 250 and not REVIEWED & SEEN_AND_REFUSED
