"""s2-megatron generate: how the next token is chosen, that S2-Attention computed it, and what is refused.

That its greedy continuation is the exported model's is tested with real checkpoints, in tests/megatron.
"""

from argparse import Namespace

import pytest
import torch

from s2_megatron.tools import commands, generate
from s2_megatron.tools.generate import chooser


def test_temperature_0_takes_the_likeliest_word():
    logits = torch.tensor([0.0, 3.0, 1.0, 9.0])
    assert chooser(0, 0, 0, 4)(logits) == 3
    assert chooser(0, 0, 0, 3)(logits) == 1  # the last row is no word


def test_samples_follow_the_distribution_and_the_seed():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2, 1e-9]))
    drawn = [[choose(logits) for _ in range(2000)] for choose in (chooser(1, 0, seed, 4) for seed in (1, 1, 2))]
    assert drawn[0] == drawn[1] != drawn[2]
    for word, share in enumerate((0.5, 0.3, 0.2)):
        assert abs(drawn[0].count(word) / 2000 - share) < 0.05
    top = chooser(1, 2, 1, 4)
    assert {top(logits) for _ in range(200)} == {0, 1}
    cold = chooser(0.01, 0, 1, 4)
    assert {cold(logits) for _ in range(200)} == {0}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--max-new-tokens", "0"], "--max-new-tokens 0: expected a number of 1 or more"),
        (["--temperature", "-1"], "--temperature -1.0: expected a number of 0 or more"),
        (["--temperature", "nan"], "--temperature nan"),
        ([], "no such folder; expected a checkpoint that Megatron saved"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, capsys):
    load = ["generate", "--load", str(tmp_path / "none"), "--prompt", "a"]
    assert commands.main([*load, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_tokenizer_with_more_words_than_the_model(tmp_path, monkeypatch, capsys):
    trained = Namespace(padded_vocab_size=256, tokenizer_model="other")
    monkeypatch.setattr("s2_megatron.tools.hf.torch_dist.iteration_folder", lambda load: load)
    monkeypatch.setattr("s2_megatron.tools.hf.checkpoint_model.checkpoint_arguments", lambda folder: trained)
    monkeypatch.setattr(generate, "_tokenizer", lambda *_: Namespace(tokenize=lambda text: [255, 256]))
    assert commands.main(["generate", "--load", str(tmp_path), "--prompt", "a"]) == 2
    message = "error: --tokenizer other: the prompt has token 256; expected less than 256, the model's vocabulary; "
    assert capsys.readouterr() == ("", f"{message}give the tokenizer that it was trained with\n")
