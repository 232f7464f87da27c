"""pretrain_gpt_s2.py that fails on every rank in its second step, as at an index out of range."""


def main():
    import pretrain_gpt_s2
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    from megatron.training import training

    step, calls = training.train_step, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise IndexError("index out of range\nin self")
        return step(*args, **kwargs)

    training.train_step = failing
    pretrain_gpt_s2.main()


if __name__ == "__main__":
    main()
