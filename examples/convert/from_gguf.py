"""A GGUF file becomes a Hugging Face folder with fp32 weights, for `s2-megatron import-hf`; needs PyPI's `gguf`.

    python examples/convert/from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2

transformers computes the weights; the tokenizer comes along.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

file, folder = Path(sys.argv[1]), Path(sys.argv[2])
read = {"pretrained_model_name_or_path": str(file.absolute().parent), "gguf_file": file.name}
model = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
# transformers refuses to save a model that was read from a GGUF file, so its weights go into one that was not.
config = model.config.to_dict()
del config["quantization_config"]
plain = type(model)(type(model.config).from_dict(config))
plain.load_state_dict(model.state_dict())
plain.save_pretrained(folder)
AutoTokenizer.from_pretrained(**read).save_pretrained(folder)
print(f"wrote {folder}: {sum(each.numel() for each in plain.parameters()):,} parameters")
