"""s2-megatron generate: how the next token is chosen, that S2-Attention computed it, and what is refused.

That its greedy continuation is the exported model's is tested with real checkpoints, in tests/megatron.
"""

import io
import os
import sys
from argparse import Namespace

import pytest
import torch

from examples.quickstart.dataset import Document, train_tokenizer
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
    for temperature in (0.01, 1e-320):
        cold = chooser(temperature, 0, 1, 4)
        assert {cold(logits) for _ in range(200)} == {0}


def test_logits_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="the model's logits are not finite; expected numbers"):
        chooser(0, 0, 0, 2)(torch.tensor([0.0, float("nan")]))


@pytest.mark.parametrize("locale", ["UTF-8", "C"])
def test_a_prompt_is_utf_8_in_every_locale(locale, monkeypatch):
    """Under LC_ALL=C the bytes of an é come as two surrogates."""
    word = "é" if locale == "UTF-8" else os.fsencode("é").decode("ascii", "surrogateescape")
    assert generate._prompt(word, 8) == "é"
    encoding, errors = ("utf-8", "strict") if locale == "UTF-8" else ("ascii", "surrogateescape")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é".encode()), encoding, errors))
    assert generate._prompt("-", 8) == "é"


def test_a_prompt_that_is_no_utf_8_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"^--prompt: no UTF-8 \(byte 1: 0xff\); expected text in UTF-8"):
        generate._prompt("a\udcff", 8)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"^--prompt -: no UTF-8 \(byte 1: 0xff\)"):
        generate._prompt("-", 8)


def test_no_more_of_a_prompt_is_read_than_the_trained_length_can_have(monkeypatch):
    source = io.BytesIO(bytes(10_000_000))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(source))
    with pytest.raises(ValueError, match="--prompt -: more than 1,024 bytes on the standard input; expected at most"):
        generate._prompt("-", 8)
    assert source.tell() < 100_000


def test_a_text_ends_at_the_trained_length(capsys):
    assert generate._room(3, 5, 8) == 5 and not capsys.readouterr().err
    assert generate._room(3, 10**30, 8) == 5
    assert capsys.readouterr().err.startswith(f"note: at most 5 new tokens, not {10**30}: with the prompt that is 8")
    with pytest.raises(ValueError, match="--prompt: 8 tokens; expected fewer than 8, the length of the training's"):
        generate._room(8, 1, 8)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--max-new-tokens", "0"], "--max-new-tokens 0: expected a number of 1 or more"),
        (["--seed", "9" * 30], f"--seed {'9' * 30}: expected a number of -9223372036854775807 to 9223372036854775807"),
        (["--temperature", "inf"], "--temperature inf: expected a number of 0 or more"),
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


def test_a_checkpoint_of_a_megatron_with_fewer_settings_of_tokenizers(tmp_path):
    folder = tmp_path / "tokenizer"
    train_tokenizer([Document("texts", "words of a text " * 30)], folder, 265)
    trained = Namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder), pad_vocab_size=False)
    assert generate._tokenizer(trained, None).tokenize("words")


def test_a_tokenizer_with_more_words_than_the_model(tmp_path, monkeypatch, capsys):
    trained = Namespace(padded_vocab_size=256, tokenizer_model="other", seq_length=64)
    monkeypatch.setattr("s2_megatron.tools.hf.torch_dist.iteration_folder", lambda load: load)
    monkeypatch.setattr("s2_megatron.tools.hf.checkpoint_model.checkpoint_arguments", lambda folder: trained)
    monkeypatch.setattr(generate, "_tokenizer", lambda *_: Namespace(tokenize=lambda text: [255, 256]))
    assert commands.main(["generate", "--load", str(tmp_path), "--prompt", "a"]) == 2
    message = "error: --tokenizer other: the prompt has token 256; expected less than 256, the model's vocabulary; "
    assert capsys.readouterr() == ("", f"{message}give the tokenizer that it was trained with\n")
