"""llama.cpp on a CPU: the log-probabilities of a text.

Usage: llamacpp_logprobs.py f32 jobs.json out.npz; jobs: {"folders": {name: path}, "tokens": [T]}. Writes [T, V] in fp32
for each name, row t is what follows token t; or, where the converter or llama.cpp refuses the folder, the error as a
text. S2_TESTS_PYTHON: a Python with torch and transformers, for the converter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ENVIRONMENT = Path(sys.executable).parents[1]
CONVERT = Path(__file__).with_name("llamacpp_convert.py")


def refusal(ran) -> np.ndarray:
    """The last line of a process that names an assertion, else an error."""
    lines = (ran.stdout + ran.stderr).splitlines()
    for mark in ("ggml_assert", "error"):
        if found := [line for line in lines if mark in line.lower()]:
            return np.array(found[-1])
    return np.array(f"exit code {ran.returncode}")


def answer(folder, text, root):
    """Log-probabilities or the refusal; llama.cpp aborts the process that it is in."""
    (source,) = (ENVIRONMENT / "source").glob("*/vendor/llama.cpp")
    command = [os.environ["S2_TESTS_PYTHON"], CONVERT, source, folder, root / "model.gguf"]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        return refusal(ran)
    words = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    (root / "job.json").write_text(json.dumps(dict(tokens=text, words=words)))
    command = [sys.executable, __file__, "one", root / "model.gguf", root / "job.json", root / "rows.npy"]
    ran = subprocess.run(command, capture_output=True, text=True)
    return np.load(root / "rows.npy") if ran.returncode == 0 else refusal(ran)


def one(model, job, out):
    import xllamacpp

    job = json.loads(Path(job).read_text())
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers, parameters.warmup = 512, 1, 0, False
    # Attention in fp32: llama.cpp's flash attention and cache are fp16 by themselves.
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(parameters)
    rows = np.full((len(job["tokens"]), job["words"]), np.nan, np.float32)
    for place in range(len(rows)):
        prompt = job["tokens"][: place + 1]
        settings = dict(n_predict=1, n_probs=job["words"], temperature=0.0, cache_prompt=False)
        answer = server.handle_completions(dict(prompt=prompt, **settings))
        (token,) = answer["choices"][0]["logprobs"]["content"]
        for word in token["top_logprobs"]:
            rows[place, word["id"]] = word["logprob"]
    np.save(out, rows)


def main(_, jobs, out):
    jobs, root = json.loads(Path(jobs).read_text()), Path(out).parent
    np.savez(out, **{name: answer(folder, jobs["tokens"], root) for name, folder in jobs["folders"].items()})


if __name__ == "__main__":
    one(*sys.argv[2:]) if sys.argv[1] == "one" else main(*sys.argv[1:])
