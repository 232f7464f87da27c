"""The launch line that import-hf prints: whole, and runnable as it is."""

from __future__ import annotations

import shlex
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

TOKENIZER = "HuggingFaceTokenizer"  # Megatron's name of one in a Hugging Face folder
WIDTH = 110
SEQ_LENGTH = 4096  # or less, where the model was not trained so far
WITHOUT_TRANSFORMER_ENGINE = (
    "--transformer-impl=local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion"
)


def launch_words(output: Path, flags: list[str], stored: Namespace, words_known: int, processes: int) -> list[str]:
    """The words of a launch on this machine. flags: the model's. stored: the arguments in the checkpoint. words_known:
    rows of the embedding that are words; a mock token in one of the zeros behind them has gradients of 1e13. processes:
    of this node; 0: there is no GPU."""
    length = min(SEQ_LENGTH, stored.max_position_embeddings)
    words = ["torchrun", f"--nproc-per-node={max(1, processes)}", "pretrain_gpt_s2.py"]
    words += [f"--load={output}", "--finetune", f"--save={output}-trained", "--save-interval=100"]
    words += flags
    if stored.tokenizer_type == TOKENIZER:
        words += [f"--tokenizer-type={TOKENIZER}", f"--tokenizer-model={stored.tokenizer_model}"]
    else:
        words += ["--tokenizer-type=NullTokenizer", f"--vocab-size={max(1, words_known - 1)}"]  # and its end of text
    words += ["--mock-data", f"--seq-length={length}", "--no-create-attention-mask-in-dataloader"]
    words += ["--micro-batch-size=1", f"--global-batch-size={8 * max(1, processes)}", "--train-iters=1000"]
    words += ["--lr=1e-5", "--min-lr=1e-6", "--lr-decay-style=cosine", "--lr-warmup-iters=20", "--weight-decay=0.1"]
    words += ["--clip-grad=1.0", "--eval-iters=10", "--eval-interval=100", "--log-interval=1"]
    if find_spec("transformer_engine") is None:
        words += WITHOUT_TRANSFORMER_ENGINE.split()
    elif find_spec("fused_weight_gradient_mlp_cuda") is None:  # of NVIDIA's Apex; Megatron's output layer asks for it
        words += ["--no-gradient-accumulation-fusion"]
    return [*words, *(["--bf16"] if processes else ["--distributed-backend=gloo", "--num-workers=0"])]


def launch_text(output: Path, flags: list[str], stored: Namespace, words_known: int, *, sparse: bool) -> str:
    """What import-hf prints: how the imported model is trained on."""
    from s2_megatron.megatron.host.cuda_on_cpu import compute_device

    if compute_device().type == "cpu":
        processes = 0
    else:
        import torch

        processes = torch.cuda.device_count()
    plan = "the YAML that it was trained with" if sparse else "a sparsity YAML"
    words = launch_words(output, flags, stored, words_known, processes)
    return (
        "Train it on; in place of --mock-data give --data-path PREFIX, and for S2-Attention add --s2-config with "
        f"{plan}:\n" + _lines(["CUDA_DEVICE_MAX_CONNECTIONS=1", *map(shlex.quote, words)])
    )


def _lines(words: list[str]) -> str:
    """One command over several lines, for a shell."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return " \\\n".join(lines)
