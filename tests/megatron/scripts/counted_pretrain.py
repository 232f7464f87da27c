"""pretrain_gpt_s2.py that says how often its attention's forward was computed, and whether a kept result was left over."""
import gc


def main():
    import pretrain_gpt_s2
    from s2_megatron.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    from s2_megatron import reference
    from s2_megatron.kept_output import KeptOutputs

    forward, calls = reference.forward, []

    def counted(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    reference.forward = counted
    try:
        pretrain_gpt_s2.main()  # ends with SystemExit under --exit-interval
    finally:
        left = sum(len(item) for item in gc.get_objects() if isinstance(item, KeptOutputs))
        print(f"\nattention forwards: {len(calls)}, results left over: {left}", flush=True)


if __name__ == "__main__":
    main()
