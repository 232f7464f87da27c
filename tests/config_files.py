"""The model that the tests of the sparsity YAML resolve their configs for."""

from s2_megatron.config.load import load_config

MODEL = {"num_layers": 8, "num_heads": 8, "num_kv_heads": 2, "seq_length": 1024}


def resolve(path, allow=False, **model):
    return load_config(path, allow_python_patterns=allow).resolve(**{**MODEL, **model})
