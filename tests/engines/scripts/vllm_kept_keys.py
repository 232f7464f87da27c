"""vLLM on a CPU: what its cache holds while it reads a long text in pieces and goes on from there.

Usage: vllm_kept_keys.py jobs.json out.json; jobs: {"folders": {name: path}, "tokens": [T]}. Writes for each name:
pieces (steps that read the text), differences (the largest ones between the log-probabilities of the tokens that it
generated one by one, and those of the same tokens: read as a text; generated once more, after a text that its prefix
cache has), cached (tokens of that text that came from it), rows (a file .npy beside out.json: log-probabilities of the
text, as vllm_logprobs.py writes them), pages (of one attention's cache, most held in any step), page_bytes.
"""

import gc
import json
import os
import sys
from pathlib import Path

import numpy as np

os.environ |= dict(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1"
)
PIECE, BLOCK, MORE = 64, 32, 50  # tokens of a step, of a page, to generate


def table(answers, words):
    """vLLM's [{word: log-probability}] as an array."""
    rows = np.zeros((len(answers), words), np.float32)
    for row, answer in zip(rows, answers):
        for word, one in answer.items():
            row[word] = one.logprob
    return rows


def watched(engine, name, text, sampling, managers):
    """(the answer, most blocks that were held in a step, steps)."""
    engine.llm_engine.add_request(name, dict(prompt_token_ids=text), sampling)
    most, steps, answer = 0, 0, None
    while engine.llm_engine.has_unfinished_requests():
        found = engine.llm_engine.step()
        answer = found[-1] if found else answer
        blocks = [block for manager in managers for held in manager.req_to_blocks.values() for block in held]
        most, steps = max(most, sum(not block.is_null for block in blocks)), steps + 1
    return answer, most, steps


def kept(folder, text):
    from vllm import LLM, SamplingParams

    words = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    engine = LLM(
        folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=1024, block_size=BLOCK,
        max_logprobs=words, enable_prefix_caching=True, max_num_seqs=1, max_num_batched_tokens=PIECE,
    )  # fmt: skip
    cache = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    groups = cache.kv_cache_config.kv_cache_groups
    layers = max(len(group.layer_names) for group in groups)  # a block has a page of each of them
    managers = cache.coordinator.single_type_managers
    (page,) = {group.kv_cache_spec.page_size_bytes for group in groups}
    settings = dict(detokenize=False, temperature=0, ignore_eos=True)
    generate = dict(max_tokens=MORE, logprobs=words, **settings)
    read = dict(prompt_logprobs=words, **settings)
    answer, most, steps = watched(engine, "text", text, SamplingParams(**generate | read), managers)
    tokens = text + list(answer.outputs[0].token_ids)
    as_text, _, _ = watched(engine, "as text", tokens, SamplingParams(max_tokens=1, **read), managers)
    again, _, _ = watched(engine, "again", text, SamplingParams(**generate), managers)
    one_by_one = table(answer.outputs[0].logprobs, words)
    others = table(as_text.prompt_logprobs[len(text) :], words), table(again.outputs[0].logprobs, words)
    return dict(
        pieces=steps - MORE + 1, pages=most * layers, page_bytes=page, cached=again.num_cached_tokens,
        differences=[float(np.abs(one_by_one - other).max()) for other in others],
    ), table(answer.prompt_logprobs[1:], words)  # fmt: skip


def main(jobs, out):
    from vllm.distributed import cleanup_dist_env_and_memory

    jobs, out = json.loads(Path(jobs).read_text()), Path(out)
    found = {}
    for name, folder in jobs["folders"].items():
        found[name], rows = kept(folder, jobs["tokens"])
        found[name]["rows"] = f"{len(found)}.npy"
        np.save(out.with_name(found[name]["rows"]), rows)
        gc.collect()
        cleanup_dist_env_and_memory()
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
