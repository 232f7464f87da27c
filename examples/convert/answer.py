"""A folder of `s2-megatron export-hf`, or any other model's, answers: the text, the time and the size of the cache.

    python examples/convert/answer.py 7b-hf "Who found the key?" --text novel.txt

Beside it, the folder of the dense model: the same question without S2-Attention.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from s2_megatron.huggingface import CACHE_ARGUMENT  # the import registers the model type and the attention `s2`

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("folder", type=Path)
parser.add_argument("question")
parser.add_argument("--text", type=Path, help="a file that the question is about")
parser.add_argument("--tokens", type=int, default=40, help="at most, of the answer (default: 40)")
args = parser.parse_args()
for place, is_there in ((args.folder, args.folder.is_dir()), (args.text, args.text is None or args.text.is_file())):
    if not is_there:
        parser.error(f"{place}: is not there; expected a model's folder, and of --text a file; correct the path")

tokenizer = AutoTokenizer.from_pretrained(args.folder)
is_sparse = AutoConfig.from_pretrained(args.folder).model_type == "s2_gpt"
attention = {"attn_implementation": "s2"} if is_sparse else {}
model = AutoModelForCausalLM.from_pretrained(args.folder, dtype="auto", **attention)
if torch.cuda.is_available():
    model.to("cuda", torch.bfloat16)

prompt = f"{args.text.read_text()}\n\n{args.question}" if args.text else args.question
if tokenizer.chat_template:
    said = [{"role": "user", "content": prompt}]
    words = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
else:
    words = tokenizer(prompt, return_tensors="pt")
words = words.to(model.device)
began = time.perf_counter()
answer = model.generate(**words, max_new_tokens=args.tokens, do_sample=False, return_dict_in_generate=True)
new = answer.sequences[0, words["input_ids"].shape[1] :].tolist()  # waits for the GPU
seconds, cache = time.perf_counter() - began, getattr(answer, CACHE_ARGUMENT)
size = cache.nbytes if is_sparse else sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
print(tokenizer.decode(new, skip_special_tokens=True).strip())
print(
    f"{words['input_ids'].shape[1]} tokens of prompt and {len(new)} of answer: {seconds:.2f} s, "
    f"a cache of {size / 2**20:.2f} MiB"
)
