"""pretrain_gpt_s2.py for launch_trial.py: the process that collects a checkpoint's write results is forked, because to
start it anew takes longer than the rest of a tiny run. With UNCHECKED=1 in the environment nothing of what this package
checks is checked before it trains: would a line that is refused have trained?"""

import multiprocessing
import os


def main():
    import pretrain_gpt_s2
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    from s2_megatron.megatron import arguments, patches
    from s2_megatron.megatron.host.processes import start_manager
    from s2_megatron.megatron.preflight import start_up

    patches.start_manager = lambda context: start_manager(multiprocessing.get_context("fork"))
    if os.environ.get("UNCHECKED") == "1":
        start_up.check_before = lambda args, **options: []
        arguments.refuse_unsupported = lambda args, **options: None
        arguments.refuse_layers = lambda args, run: None
    pretrain_gpt_s2.main()


if __name__ == "__main__":
    main()
