"""What runs of tests/megatron import, before they are forked (forks.py)."""

import argparse
import functools
import importlib
import inspect

from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

install_if_no_gpu()  # as in pretrain_gpt_s2.py, in front of Megatron
for name in (
    "megatron.training.training",
    "megatron.training.checkpointing",
    "megatron.core.tokenizers.text.text_tokenizer",
    "s2_megatron.config.load",
    "torch._inductor.standalone_compile",  # by torch.library, where S2's operators are registered
):
    importlib.import_module(name)

# Megatron reads the sources of its settings for the help of every parser it makes: half the time of a command line.
inspect.getsource = functools.cache(inspect.getsource)
importlib.import_module("megatron.training.arguments").add_megatron_arguments(argparse.ArgumentParser())
