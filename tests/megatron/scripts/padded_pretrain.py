"""pretrain_gpt_s2.py whose conversations are padded for PAD_FOR context-parallel ranks, however many there are: the
same data for all."""

import os


def main():
    import pretrain_gpt_s2
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    from s2_megatron.megatron import data as gpt_data

    settings = gpt_data.dataset_config

    def padded(args):
        config = settings(args)
        config.context_parallel_size = int(os.environ["PAD_FOR"])
        return config

    gpt_data.dataset_config = padded
    pretrain_gpt_s2.main()


if __name__ == "__main__":
    main()
