"""A model as pretrain_gpt_s2.py builds it, in one process, for scripts that call it themselves."""

import sys


def build(flags: list[str]):
    """(Megatron's arguments, the GPTModel in fp32 or as --bf16 says) for a command line of pretrain_gpt_s2.py."""
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    from s2_megatron.megatron.arguments import add_s2_arguments, prepare_s2
    from s2_megatron.megatron.layer_specs import apply_s2
    from s2_megatron.megatron.patches import use_prebuilt_dataset_helpers

    use_prebuilt_dataset_helpers()
    sys.argv[1:] = flags
    args = parse_and_validate_args(extra_args_provider=add_s2_arguments)
    run = prepare_s2(args)
    config = gpt_config_from_args(args)
    apply_s2(config, run)
    initialize_megatron()
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    return args, model.cuda()
