"""Exported models in vLLM: dense KV heads beside KV heads with an exact window, each with the cache that it needs.

vLLM finds `register` by the entry point of its plugins in setup.py; nothing has to be imported or passed.
"""

import logging

ARCHITECTURE = "S2GPTForCausalLM"  # in the config.json of exported models


def register() -> None:
    """Tells vLLM of the model type `s2_gpt`; vLLM calls it in each of its processes, once or more. Where it cannot (too
    old a transformers), it says so: vLLM's other models have to run on."""
    from vllm import ModelRegistry

    try:
        import s2_megatron.huggingface  # noqa: F401  transformers reads the config with it
    except ImportError as error:
        logging.getLogger("vllm.s2_megatron").warning("models of type s2_gpt are unknown here: %s", error)
        return
    ModelRegistry.register_model(ARCHITECTURE, "s2_megatron.vllm.model:S2GPTForCausalLM")
