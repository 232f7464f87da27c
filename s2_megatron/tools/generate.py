"""s2-megatron generate: a Megatron checkpoint continues a prompt, without leaving Megatron.

    s2-megatron generate --load runs/quickstart/checkpoints --prompt "def main("

One process, Megatron's static context with the full KV cache, and a loop of our own: Megatron's engines read the cache
around the core attention, densely. That S2-Attention computed every layer of every step is asserted. The text alone
goes to standard output. Prompt and text are UTF-8, whatever the locale, and together at most as long as the sequences
of the training.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TextIO

from s2_megatron.config.errors import printable
from s2_megatron.tools.inputs import argument_text, standard_input
from s2_megatron.tools.progress import working

PROMPT_END = 8  # tokens
LONGEST_TOKEN = 128  # bytes: runs of blanks, in the tokenizers of today
LARGEST_SEED = 2**63 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", type=Path, required=True, help="Megatron's checkpoint folder (torch_dist)")
    parser.add_argument("--prompt", required=True, help="the text to continue; - reads it from standard input")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="(default: 100)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): always the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="sample among so many tokens; 0 (default): among all")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--tokenizer", help="Hugging Face tokenizer folder (default: the one it was trained with)")
    parser.add_argument("--s2-config", type=Path, help="the YAML it was trained with; only needed for block masks")


def run(args: argparse.Namespace) -> int:
    for name, value, least, most in (
        ("--max-new-tokens", args.max_new_tokens, 1, math.inf),
        ("--temperature", args.temperature, 0, sys.float_info.max),
        ("--top-k", args.top_k, 0, math.inf),
        ("--seed", args.seed, -LARGEST_SEED, LARGEST_SEED),
    ):
        if not least <= value <= most:
            raise ValueError(
                f"{name} {printable(value)}: expected a number of {least} "
                + (f"to {most}" if name == "--seed" else "or more")
                + f"; leave {name} out for the default"
            )
    output = sys.stdout
    with redirect_stdout(sys.stderr):
        _write_text(args, output)
    return 0


def _prompt(word: str, length: int) -> str:
    """The prompt of --prompt, of which no more is read than a text of `length` tokens can have. Raises ValueError."""
    if word == "-":
        return standard_input("--prompt -", length * LONGEST_TOKEN)
    return argument_text(word, "--prompt")


def _room(tokens: int, wanted: int, length: int) -> int:
    """How many new tokens there will be behind a prompt of `tokens`: `wanted`, or fewer, with a line that says so,
    where the trained length ends. Raises ValueError for a prompt as long as that."""
    if tokens >= length:
        raise ValueError(
            f"--prompt: {tokens} tokens; expected fewer than {length}, the length of the training's sequences, beyond "
            "which the model has learned nothing; give the end of the text"
        )
    if tokens + wanted > length:
        print(
            f"note: at most {length - tokens} new tokens, not {printable(wanted)}: with the prompt that is {length}, "
            "the length of the training's sequences",
            file=sys.stderr,
        )
    return min(wanted, length - tokens)


def _write_text(args: argparse.Namespace, output: TextIO) -> None:
    """Writes the prompt and what the checkpoint makes of it, token by token."""
    from s2_megatron.tools.hf.torch_dist import iteration_folder

    folder = iteration_folder(args.load)
    with working("loading Megatron and the tokenizer"):
        from s2_megatron.tools.hf.checkpoint_model import checkpoint_arguments, load_model

        trained = checkpoint_arguments(folder)
        tokenizer = _tokenizer(trained, args.tokenizer)
    prompt = _prompt(args.prompt, trained.seq_length)
    start = tokenizer.tokenize(prompt)
    if not start:
        raise ValueError("--prompt has no token; expected a text, e.g. --prompt 'def '")
    if max(start) >= trained.padded_vocab_size:
        raise ValueError(
            f"--tokenizer {trained.tokenizer_model}: the prompt has token {max(start)}; expected less than "
            f"{trained.padded_vocab_size}, the model's vocabulary; give the tokenizer that it was trained with"
        )
    count = _room(len(start), args.max_new_tokens, trained.seq_length)
    import torch

    from s2_megatron.megatron.host.cuda_on_cpu import compute_device
    from s2_megatron.ops.api import resolve_backend

    dtype = torch.float32 if compute_device().type == "cpu" else trained.params_dtype
    with working("loading the checkpoint"):
        loaded = load_model(folder, s2_config=args.s2_config, dtype=dtype)
    # Rows of the embedding that are no words are never chosen.
    words = min(tokenizer.vocab_size, trained.padded_vocab_size)
    choose = chooser(args.temperature, args.top_k, args.seed, words)
    resolve_backend("auto", compute_device().type)  # says which, before the text
    tokens = continuation(loaded.model, start, count, choose)
    with working(f"reading the {len(start)} tokens of the prompt"):  # before the text: a spinner clears its line
        first = next(tokens)
    print(prompt, end="", file=output, flush=True)
    # Behind the end of the prompt, for what stands between two tokens depends on both.
    shown = list(start[-PROMPT_END:])
    text = tokenizer.detokenize(shown)
    try:
        for token in itertools.chain([first], tokens):
            if token == getattr(tokenizer, "eod", None):
                break
            shown.append(token)
            longer = tokenizer.detokenize(shown)
            if not longer.endswith("\ufffd"):  # half a character
                print(longer[len(text) :], end="", file=output, flush=True)
                text = longer
    finally:
        print(file=output)  # also where it is interrupted


def _tokenizer(trained, folder: str | None):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.config.training_config import TokenizerConfig

    for name, default in vars(TokenizerConfig()).items():  # a checkpoint of another Megatron may have fewer
        if not hasattr(trained, name):
            setattr(trained, name, default)
    if folder is not None:
        trained.tokenizer_type, trained.tokenizer_model = "HuggingFaceTokenizer", folder
    if trained.tokenizer_type in (None, "NullTokenizer"):
        raise ValueError(
            f"the model was trained with tokenizer type {trained.tokenizer_type}, which has no words; "
            "expected one that has; give a Hugging Face tokenizer folder with --tokenizer"
        )
    try:
        return build_tokenizer(trained)
    except Exception as error:  # whatever the libraries raise for files that are no tokenizer
        reason = printable(" ".join(str(error).split()), 160)
        raise ValueError(
            f"the tokenizer {trained.tokenizer_type} {printable(trained.tokenizer_model, 200)} cannot be loaded "
            f"({reason}); give a Hugging Face tokenizer folder with --tokenizer"
        ) from error


def chooser(temperature: float, top_k: int, seed: int, words: int):
    """A function from logits [rows of the embedding] to the next token. temperature 0: the likeliest."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def choose(logits) -> int:
        logits = logits[:words].float().cpu()
        if not bool(logits.isfinite().all()):
            raise ValueError(
                "the model's logits are not finite; expected numbers; the checkpoint has diverged or is damaged, so "
                "give an earlier one"
            )
        if temperature == 0:
            return int(logits.argmax())
        if top_k:
            least = logits.topk(min(top_k, words)).values[-1]
            logits = logits.masked_fill(logits < least, float("-inf"))
        scaled = (logits - logits.max()).double() / temperature  # a temperature of next to nothing is the likeliest
        return int(torch.multinomial(scaled.float().softmax(-1), 1, generator=generator))

    return choose


def continuation(model, start: list[int], count: int, choose) -> Iterator[int]:
    """Tokens after `start`, one by one, `count` at most.

    model: a GPTModel or HybridModel whose attention layers all compute with S2CoreAttention. choose: from the last
    token's logits to the next token. Raises RuntimeError when a step went around S2CoreAttention in a layer.
    """
    import torch
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.utils import InferenceMode

    from s2_megatron.megatron.model.core_attention import S2CoreAttention
    from s2_megatron.tools.hf.checkpoint_model import attention_layers

    layers = attention_layers(model)
    cores = [module for module in model.modules() if isinstance(module, S2CoreAttention)]
    calls = [0]
    handles = [core.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1)) for core in cores]
    device = next(model.parameters()).device
    context = StaticInferenceContext(1, len(start) + count)
    tokens, steps = list(start), 0
    try:
        for _ in range(count):
            first = context.sequence_len_offset
            ids = torch.tensor([tokens[first:]], device=device)
            positions = torch.arange(first, len(tokens), device=device).unsqueeze(0)
            with torch.inference_mode(), InferenceMode.active():
                logits = model(ids, positions, None, inference_context=context, runtime_gather_output=True)
            steps += 1
            if not cores or len(cores) != layers or calls[0] != steps * len(cores):
                raise RuntimeError(
                    f"{calls[0]} calls of S2-Attention in {steps} steps of {layers} attention layers; "
                    "Megatron's inference went around the core attention"
                )
            context.sequence_len_offset += ids.shape[1]
            context.enable_decode_mode()
            tokens.append(choose(logits[0, -1]))
            yield tokens[-1]
    finally:
        for handle in handles:
            handle.remove()
