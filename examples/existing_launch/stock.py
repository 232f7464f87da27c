"""A training script on Megatron 0.19, as short as it lets one be: stock layers, one process per data-parallel rank.

with_s2.py is stock.py and the four lines that bring S2-Attention: `diff stock.py with_s2.py`.
"""

from functools import partial


def main():
    # Only for machines without a GPU, and for Megatron from its wheel.
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.enums import ModelType
    from megatron.training import get_args, get_tokenizer, pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.utils import get_blend_and_blend_per_split

    from s2_megatron.megatron.patches import use_prebuilt_dataset_helpers

    use_prebuilt_dataset_helpers()

    def loss_function(loss_mask, output):
        loss = (output.view(-1).float() * loss_mask.view(-1)).sum()
        num_tokens = loss_mask.sum().int()
        return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}

    def forward_step(data_iterator, model):
        batch = {name: tensor.cuda() for name, tensor in next(data_iterator).items()}
        output = model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"]
        )
        return output, partial(loss_function, batch["loss_mask"])

    def datasets(num_samples, vp_stage=None):
        args = get_args()
        blend, _ = get_blend_and_blend_per_split(args)
        config = GPTDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            blend=blend,
            split=args.split,
            tokenizer=get_tokenizer(),
            path_to_cache=args.data_cache_path,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()

    datasets.is_distributed = True

    args = parse_and_validate_args()
    model_config = gpt_config_from_args(args)
    pretrain(pretrain_cfg_container_from_args(args, model_config), datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
