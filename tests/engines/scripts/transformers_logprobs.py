"""transformers' stock code: the log-probabilities of a text.

Usage: transformers_logprobs.py ATTENTION jobs.json out.npz; jobs: {"folders": {name: path}, "tokens": [T]}. Writes
[T, V] in fp32 for each name; row t is what follows token t.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main(attention, jobs, out):
    jobs = json.loads(Path(jobs).read_text())
    text = torch.tensor([jobs["tokens"]])
    found = {}
    for name, folder in jobs["folders"].items():
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
        with torch.no_grad():
            found[name] = model(text, use_cache=False).logits[0].log_softmax(-1).numpy()
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
