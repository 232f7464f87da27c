"""A model as pretrain_gpt_s2.py builds it, in one process, for scripts that call it themselves."""

import os
import sys


def prepared(flags: list[str]):
    """(Megatron's arguments, its model config with S2 attention) for a command line of pretrain_gpt_s2.py. With
    LIFT_UNPROVEN_REFUSALS=1 in the environment as scripts/watched_pretrain.py."""
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    from megatron.training.arguments import parse_and_validate_args

    from s2_megatron.megatron.arguments import add_s2_arguments, prepare_s2
    from s2_megatron.megatron.hybrid_specs import model_config_from_args
    from s2_megatron.megatron.layer_specs import apply_s2
    from s2_megatron.megatron.patches import use_prebuilt_dataset_helpers
    from tests.megatron.lifted import LIFT_UNPROVEN, lift_unproven_refusals

    if os.environ.get(LIFT_UNPROVEN) == "1":
        lift_unproven_refusals()
    use_prebuilt_dataset_helpers()
    sys.argv[1:] = flags
    args = parse_and_validate_args(extra_args_provider=add_s2_arguments)
    run = prepare_s2(args)
    config = model_config_from_args(args)
    apply_s2(config, run)
    return args, config


def built(config):
    """The model of a config, in fp32 or as --bf16 says, once Megatron is initialised."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups()).cuda()


def build(flags: list[str]):
    """(Megatron's arguments, the model) for a command line of pretrain_gpt_s2.py; initialises Megatron."""
    args, config = prepared(flags)
    from megatron.training.initialize import initialize_megatron

    initialize_megatron()
    return args, built(config)
