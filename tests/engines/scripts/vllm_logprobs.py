"""vLLM on a CPU: the log-probabilities of a text.

Usage: vllm_logprobs.py MODEL_IMPL jobs.json out.npz [RANKS]; jobs: {"folders": {name: path}, "tokens": [T]}.
MODEL_IMPL: `auto` (what vLLM does by itself) or `transformers`. RANKS: tensor-parallel ones, 1. Writes [T, V] in fp32
for each name, row t is what follows token t, the last row is zeros; or, where vLLM refuses the folder, the error as a
text.
"""

import gc
import json
import os
import sys
from pathlib import Path

import numpy as np

os.environ |= dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def logprobs(folder, model_impl, text, ranks):
    from vllm import LLM, SamplingParams

    words = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    engine = LLM(
        folder, model_impl=model_impl, dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=512, max_logprobs=words, enable_prefix_caching=False, max_num_seqs=2,
        tensor_parallel_size=ranks,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=words, detokenize=False)
    (answer,) = engine.generate([dict(prompt_token_ids=text)], sampling, use_tqdm=False)
    rows = np.zeros((len(text), words), np.float32)
    for place, row in enumerate(answer.prompt_logprobs[1:]):
        for word, one in row.items():
            rows[place, word] = one.logprob
    return rows


def main(model_impl, jobs, out, ranks=1):
    from vllm.distributed import cleanup_dist_env_and_memory

    jobs = json.loads(Path(jobs).read_text())
    found = {}
    for name, folder in jobs["folders"].items():
        try:
            found[name] = logprobs(folder, model_impl, jobs["tokens"], int(ranks))
        except (AssertionError, ValueError, RuntimeError) as error:
            found[name] = np.array(f"{type(error).__name__}: {error}")
        gc.collect()
        cleanup_dist_env_and_memory()
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
