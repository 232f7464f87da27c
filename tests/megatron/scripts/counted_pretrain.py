"""pretrain_gpt_s2.py whose every rank says how often its attention's forward was computed, how often it sent its keys
and values to the other ranks, and how many stored attention outputs were left over."""

import gc


def main():
    import pretrain_gpt_s2
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    from s2_megatron.context_parallel.exchange import BlockExchange
    from s2_megatron.ops import reference
    from s2_megatron.ops.recompute import RecomputeOutputs

    counts = {"forwards": 0, "exchanges": 0}

    def counted(function, name):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    reference.forward = counted(reference.forward, "forwards")
    BlockExchange.start = counted(BlockExchange.start, "exchanges")
    try:
        pretrain_gpt_s2.main()  # ends with SystemExit under --exit-interval
    finally:
        left = sum(len(item) for item in gc.get_objects() if type(item) is RecomputeOutputs)
        print(
            f"\nattention forwards: {counts['forwards']}, exchanges: {counts['exchanges']}, results left over: {left}",
            flush=True,
        )


if __name__ == "__main__":
    main()
