"""Which flags of Megatron, among those that this project names, reach neither the configs that Megatron builds nor
anything else that reads the arguments; and the factor of RoPE scaling that training hands on.

Usage: dropped_flags.py RESULT.json; writes {"model": [flags that the model config does not get], "dropped": [...],
"count": flags looked at, "factors": {value of --rope-scaling-factor: that of the model config}}.
"""

import argparse
import copy
import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[3]
# Where users find flags. Not the records of what has been measured.
PLACES = ("README.md", "docs/*.md", "examples/**/*.sh", "examples/**/*.py", "slurm/*", "s2_megatron/**/*.py")
PARSERS = ("arguments.py", "argument_utils.py", "config")  # of Megatron: what defines flags does not read them


def named_flags() -> set[str]:
    files = [path for pattern in PLACES for path in ROOT.glob(pattern) if path.is_file()]
    return {flag for path in files for flag in re.findall(r"--[a-z][a-z0-9-]+", path.read_text(errors="ignore"))}


def other_value(action: argparse.Action, now):
    """A value that is not the present one, nor the default."""
    if action.nargs == 0 or isinstance(now, bool):
        return not now
    if action.choices:
        return next((choice for choice in action.choices if choice not in (now, action.default)), now)
    if action.type in (int, float) and action.nargs is None:
        return action.type(1 if now is None else now * 2 + 1)
    return ["other"] if action.nargs else "other"


def frozen(config) -> str:
    """Everything in a config, as text."""
    if dataclasses.is_dataclass(config):
        fields = {**vars(config)}
        return f"{type(config).__name__}({', '.join(f'{name}={frozen(value)}' for name, value in fields.items())})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(config))


def sources_that_read() -> str:
    import megatron.core
    import megatron.training

    texts = []
    for package in (megatron.core, megatron.training):
        folder = Path(package.__path__[0])
        for path in folder.rglob("*.py"):
            if not set(path.relative_to(folder).parts) & set(PARSERS):
                texts.append(path.read_text(errors="ignore"))
    return "\n".join([*texts, *(path.read_text() for path in (ROOT / "s2_megatron" / "megatron").rglob("*.py"))])


def main():
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import add_megatron_arguments

    from s2_megatron.megatron.model.rope_scaling import set_rope_scaling
    from s2_megatron.tools.hf.architecture import _WANTED
    from tests.megatron.arguments import arguments, parse

    base, refused = parse(arguments({"--use-rope-scaling": None, "--padded-vocab-size": "512"}))
    assert refused is None, refused
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    imported = re.findall(r"--[a-z-]+", (ROOT / "s2_megatron/tools/hf/architecture.py").read_text())
    of_the_model = {action.dest for action in parser._actions if set(action.option_strings) & set(imported)}
    of_the_model |= {action.dest for action in parser._actions if action.dest in _WANTED}
    actions = {flag: parser._option_string_actions[flag] for flag in named_flags() & set(parser._option_string_actions)}
    actions |= {action.option_strings[0]: action for action in parser._actions if action.dest in of_the_model}
    actions = {flag: action for flag, action in actions.items() if hasattr(base, action.dest)}

    def configs(args):
        """(the model's config, the others)"""
        args = copy.deepcopy(args)
        model = gpt_config_from_args(args)
        set_rope_scaling(args, model)
        return frozen(model), lambda: frozen(pretrain_cfg_container_from_args(args, model))

    latent = copy.copy(base)  # its config is another class, with flags of its own
    latent.multi_latent_attention = True
    plain, container = configs(base)
    plain_container, reads = container(), sources_that_read()
    plain_latent, _ = configs(latent)
    model_lacks, dropped = [], []
    for flag, action in sorted(actions.items()):
        changed, changed_latent = copy.copy(base), copy.copy(latent)
        for args in (changed, changed_latent):
            setattr(args, action.dest, other_value(action, getattr(args, action.dest)))
        try:
            model, container = configs(changed)
            reaches_model = model != plain or configs(changed_latent)[0] != plain_latent
            reaches = reaches_model or container() != plain_container
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            ImportError,
            LookupError,
            OSError,
            RuntimeError,
            TypeError,
            ValueError,
        ):
            # the value does not suit: so it is looked at
            reaches_model = reaches = True
        if action.dest in of_the_model and not reaches_model:
            model_lacks.append(flag)
        read = rf"args\.{action.dest}\b|getattr\(\w*args, ['\"]{action.dest}['\"]"
        if not reaches and not re.search(read, reads):
            dropped.append(flag)

    return {"model": model_lacks, "dropped": dropped, "count": len(actions), "factors": factors(base)}


built = []  # model configs that training was given when it built its model


def setup_model_and_optimizer(*args, cfg_container=None, **kwargs):
    built.append(copy.copy(cfg_container.model))
    return [[], None, None]


def factors(base) -> dict:
    """What the flag says -> what the model is built with, by a script that builds its config without our help behind
    prepare_s2, which installs the check."""
    from megatron.training import global_vars, training
    from megatron.training.argument_utils import gpt_config_from_args

    from s2_megatron.megatron.patches import install_model_check

    install_model_check()
    result = {}
    for factor in (4.0, 8.0, 32.0):
        args = copy.copy(base)
        args.rope_scaling_factor = factor
        global_vars._GLOBAL_ARGS = args
        training.setup_model_and_optimizer("gpt", cfg_container=SimpleNamespace(model=gpt_config_from_args(args)))
        result[factor] = [built[-1].rope_scaling_factor, args.s2_rope_scaling_factor]
    return result


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    from megatron.training import training

    training.setup_model_and_optimizer = setup_model_and_optimizer  # before ours is put around it
    Path(sys.argv[1]).write_text(json.dumps(main()))
