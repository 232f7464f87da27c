"""pretrain_gpt_s2.py whose rank 1, at the exchange number AT_EXCHANGE, dies without a word or (HANGS=1) stops and does
nothing more."""

import os
import time


def main():
    import pretrain_gpt_s2
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    from s2_megatron.context_parallel.exchange import BlockExchange

    travel, calls = BlockExchange._travel, []

    def dying(*args):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == int(os.environ["AT_EXCHANGE"]):
            if os.environ.get("HANGS") == "1":
                time.sleep(1000)
            os._exit(13)
        return travel(*args)

    BlockExchange._travel = dying
    pretrain_gpt_s2.main()


if __name__ == "__main__":
    main()
