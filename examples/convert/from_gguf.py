"""A GGUF file becomes a Hugging Face folder with fp32 weights, for `s2-megatron import-hf`; needs PyPI's `gguf`.

    python examples/convert/from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2

transformers computes the weights; the tokenizer comes along.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("file", type=Path)
parser.add_argument("folder", type=Path, help="to make; it must not exist")
args = parser.parse_args()
if find_spec("gguf") is None:
    parser.error("the package gguf is not here; expected it, for transformers reads the file with it; pip install gguf")
if not args.file.is_file():
    parser.error(f"{args.file}: no such file; expected a .gguf; correct the path")
if args.folder.exists():
    parser.error(f"{args.folder}: is there already; expected a new folder; give another name, or move it away")

read = {"pretrained_model_name_or_path": str(args.file.absolute().parent), "gguf_file": args.file.name}
model = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
# transformers refuses to save a model that was read from a GGUF file, so its weights go into one that was not.
config = model.config.to_dict()
del config["quantization_config"]
plain = type(model)(type(model.config).from_dict(config))
plain.load_state_dict(model.state_dict())
plain.save_pretrained(args.folder)
AutoTokenizer.from_pretrained(**read).save_pretrained(args.folder)
print(f"wrote {args.folder}: {sum(each.numel() for each in plain.parameters()):,} parameters")
