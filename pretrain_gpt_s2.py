"""Pretrain a GPT, or a HybridModel (--hybrid-layer-pattern), in Megatron's own training loop, with S2-Attention in the
attention layers that a sparsity YAML names.

    torchrun --nproc-per-node 8 pretrain_gpt_s2.py --s2-config configs/phi3_small.yaml --attention-dropout 0.0
    --hidden-dropout 0.0 ...

Every flag of Megatron's pretrain_gpt.py keeps its meaning; docs/launch.md has a whole command. Without
--s2-config the script builds Megatron's stock model. Before the first step it prints which attention runs in which
layer (here a toy of 4 layers):

    Attention of 4 layers, 4 query / 2 KV heads, 128 tokens, blocks of 16
    │ layer │ spec │ kind  │ pattern                       │ density │ coverage │ core           │
    │ 0, 2  │ S    │ s2    │ local 2 + stride 4, 2 offsets │   53.5% │    75.0% │ S2             │
    │ 1     │ S    │ s2    │ local 2 + stride 4, 2 offsets │   48.8% │    66.7% │ S2             │
    │ 3     │ D    │ dense │ dense                         │  100.0% │   100.0% │ Megatron local │
    S2 dense layers: computed by Megatron local (Megatron's local attention suits seq_length=128, one document a sample)

On a machine without a GPU the run takes the CPU (gloo) and says so.
"""

# Only cheap imports here: saving a checkpoint starts a process that imports this file again.
import os
import time
import warnings

PROGRAM_START = time.time()


def main() -> None:
    from s2_megatron.megatron.host.processes import end_with_torchrun, start_without_torchrun

    end_with_torchrun()
    start_without_torchrun()
    if int(os.environ.get("RANK", "0")) != 0:
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category)

    # Before the first import of Megatron, which binds torch.cuda functions by name.
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu, require_cpu_settings

    on_cpu = install_if_no_gpu()
    if on_cpu:  # Transformer Engine and Apex are for GPUs: a dozen warnings that they are missing say nothing here
        warnings.filterwarnings("ignore", message=".*([Tt]ransformer[ -][Ee]ngine|Apex)", category=UserWarning)

    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from s2_megatron.megatron.arguments import add_s2_arguments, prepare_s2
    from s2_megatron.megatron.data import datasets_provider, embedding_ranks, forward_step
    from s2_megatron.megatron.hybrid_specs import model_config_from_args
    from s2_megatron.megatron.layer_specs import apply_s2
    from s2_megatron.megatron.patches import use_prebuilt_dataset_helpers
    from s2_megatron.megatron.preflight.schedule import check_schedule
    from s2_megatron.megatron.preflight.start_up import DEFAULT_TOKENIZER, start_up
    from s2_megatron.megatron.records.status import recorded_run

    set_startup_timestamps(program_start=PROGRAM_START, main_entry=time.time())

    # In here whatever goes wrong is one line.
    with start_up(add_s2_arguments) as provider:
        args = parse_and_validate_args(
            extra_args_provider=provider, args_defaults={"tokenizer_type": DEFAULT_TOKENIZER}
        )
        use_prebuilt_dataset_helpers()
        if on_cpu:
            require_cpu_settings(args)
        run = prepare_s2(args)
        model_config = model_config_from_args(args)
        apply_s2(model_config, run)
        settings = pretrain_cfg_container_from_args(args, model_config)
        check_schedule(args)
    # After the start: it parses the flags by Megatron's own parser, whose errors are 700 lines of usage, and whose help
    # fails.
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    with recorded_run(args):
        pretrain(
            settings,
            datasets_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            store=store,
            get_embedding_ranks=embedding_ranks,
        )


if __name__ == "__main__":
    main()
