"""s2-megatron make-dataset: what is read, that Megatron reads the tokens back, and what is refused."""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from s2_megatron.tools import commands
from s2_megatron.tools.dataset import texts
from s2_megatron.tools.dataset.encode import Encoder, encoded, tokenizer_arguments
from s2_megatron.tools.dataset.texts import Batch
from s2_megatron.tools.dataset.write import write_dataset

TEXTS = [f"def f{n}(x):\n    return {'x + ' * n}{n}  # é\n" for n in range(40)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    from examples.quickstart.dataset import Document, train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer") / "folder"
    train_tokenizer([Document("texts", "".join(TEXTS))], folder, 300)
    return folder


def make(tokenizer: Path, output: Path, *arguments) -> int:
    given = ["make-dataset", "--tokenizer", tokenizer, "--output", output, *arguments]
    try:
        return commands.main([str(word) for word in given])
    except SystemExit as end:
        return end.code


def read_back(prefix: Path, tokenizer: Path) -> list[str]:
    """The documents' texts, each with the end-of-document token."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from transformers import AutoTokenizer

    data, loaded = IndexedDataset(str(prefix)), AutoTokenizer.from_pretrained(tokenizer)
    return [loaded.decode(data[at].tolist()) for at in range(len(data))]


def lines_of(documents: list[str]) -> str:
    return "".join(json.dumps({"id": at, "text": text}) + "\n" for at, text in enumerate(documents))


def test_megatron_reads_the_texts_back_and_the_bytes_do_not_depend_on_the_processes(
    tokenizer, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(texts, "BATCH_BYTES", 300)  # many batches
    corpus = tmp_path / "corpus"
    (corpus / "b").mkdir(parents=True)
    (corpus / "b/1.jsonl").write_text(lines_of(TEXTS[:10]) + "\n" + json.dumps({"text": " \n"}) + "\n")
    (corpus / "a.jsonl.gz").write_bytes(gzip.compress(lines_of(TEXTS[10:20]).encode()))
    (corpus / "c.txt").write_bytes(b"\xef\xbb\xbf" + TEXTS[20].encode())
    (corpus / "d.py.xz").write_bytes(lzma.compress(TEXTS[21].encode()))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/E.NDJSON.bz2").write_bytes(bz2.compress(lines_of(TEXTS[22:24]).encode()))
    (corpus / "e").symlink_to(tmp_path / "other")
    (corpus / "e/again").symlink_to(tmp_path / "other")  # a loop
    (corpus / ".hidden").write_bytes(b"\xff")
    (tmp_path / "lone.json").write_text(lines_of(TEXTS[24:]))
    for workers in (1, 3):
        assert make(tokenizer, tmp_path / f"{workers}/text", corpus, tmp_path / "lone.json", "--workers", workers) == 0
    out, error = capsys.readouterr()
    expected = [*TEXTS[10:20], *TEXTS[:10], *TEXTS[20:]]
    assert read_back(tmp_path / "1/text", tokenizer) == [text + "<|endoftext|>" for text in expected]
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"3/text{suffix}").read_bytes() == (tmp_path / f"1/text{suffix}").read_bytes()
    assert sorted(path.name for path in (tmp_path / "3").iterdir()) == ["text.bin", "text.idx"]
    assert "text.bin and .idx: 40 documents, " in out and "; 1 without text left out" in out and "error" not in error
    assert f"--data-path {tmp_path}/3/text --split 90,10,0 \\\n" in out
    assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}\n" in out


def test_the_flags_it_prints_are_a_launch_whose_dataset_has_the_tokens(tokenizer, tmp_path, capsys):
    """Megatron's own GPTDataset, with the settings that a launch with these flags gives it."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import add_megatron_arguments

    (tmp_path / "a.jsonl").write_text(lines_of(TEXTS))
    assert make(tokenizer, tmp_path / "text", tmp_path / "a.jsonl") == 0
    flags = re.sub(r"\\\n", " ", capsys.readouterr().out.partition("flags:\n")[2]).split()
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(flags)
    needed = vars(tokenizer_arguments(tokenizer))
    assert {name: getattr(args, name) for name in needed} == needed | {"pad_vocab_size": True}
    args.rank = 0
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=64, blend=(args.data_path, None), split=args.split, path_to_cache=str(tmp_path),
        tokenizer=build_tokenizer(args), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=True,
    )  # fmt: skip
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, (8, 2, 0), lambda: True, config).build()
    end = config.tokenizer.eod
    samples = np.concatenate([train[at]["tokens"].numpy() for at in range(8)])
    whole = np.fromfile(tmp_path / "text.bin", np.uint16)
    assert valid is not None and np.isin(samples, whole).all() and (samples == end).sum() > 2
    assert (train[0]["loss_mask"][train[0]["tokens"] == end] == 0).all()
    assert (whole == end).sum() == len(TEXTS) and whole[-1] == end


def test_what_has_two_names_is_read_once_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "m/one.txt", "m/two.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a.txt").symlink_to("m/two.txt")
    (tmp_path / "c").symlink_to("m")
    found = [source.path.relative_to(tmp_path) for source in texts.find_sources([tmp_path])]
    assert [str(path) for path in found] == ["a.txt", "b.txt", "c/one.txt"]


def test_each_line_is_a_document_where_asked_for(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("one\r\ntwo x\n\nthree")
    assert make(tokenizer, tmp_path / "text", tmp_path / "a.txt", "--lines") == 0
    assert read_back(tmp_path / "text", tokenizer) == [f"{line}<|endoftext|>" for line in ("one", "two x", "three")]


def test_zstandard_is_read_where_a_library_is_there(tokenizer, tmp_path, monkeypatch, capsys):
    """The library's place is taken by one that reads gzip."""
    (tmp_path / "a.jsonl.zst").write_bytes(gzip.compress(lines_of(TEXTS[:3]).encode()))

    def missing():
        raise ImportError

    monkeypatch.setattr(texts, "_zstandard", missing)
    assert make(tokenizer, tmp_path / "text", tmp_path / "a.jsonl.zst") == 2
    assert "a.jsonl.zst: nothing here opens a .zst; expected the package backports.zstd;" in capsys.readouterr().err
    monkeypatch.setattr(texts, "_zstandard", lambda: texts.COMPRESSED[".gz"]())
    monkeypatch.setitem(texts.COMPRESSED, ".zst", texts.COMPRESSED[".gz"])
    assert make(tokenizer, tmp_path / "text", tmp_path / "a.jsonl.zst") == 0
    assert len(read_back(tmp_path / "text", tokenizer)) == 3


class Words:
    """A tokenizer of whole words: ids from 5 on, `first` in front and `last` behind, as some tokenizers have it."""

    vocab_size, eod = 70_000, 2

    def __init__(self, first: list[int] | None = None, last: list[int] | None = None):
        self.first, self.last = first or [], last or []

    def tokenize(self, text: str) -> list[int]:
        return [*self.first, *(5 + len(word) for word in text.split()), *self.last]


def test_one_token_ends_a_document_whatever_the_tokenizer_adds(monkeypatch, tmp_path):
    build = "megatron.core.tokenizers.utils.build_tokenizer.build_tokenizer"
    for tokenizer, expected in ((Words([1]), [1, 8, 7, 2]), (Words(last=[2]), [8, 7, 2])):
        monkeypatch.setattr(build, lambda args, own=tokenizer: own)
        found = Encoder(tmp_path, "text")(Batch(Path("a"), 0, False, [b"abc de"]))
        assert [ids.tolist() for ids in found.documents] == [expected] and found.bytes == 6


def test_a_large_vocabulary_gets_four_bytes_a_token(monkeypatch, tmp_path, capsys):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    build = "megatron.core.tokenizers.utils.build_tokenizer.build_tokenizer"
    monkeypatch.setattr(build, lambda args: Words([69_999]))
    (tmp_path / "a.txt").write_text("abc")
    assert make(tmp_path, tmp_path / "text", tmp_path / "a.txt", "--workers", 1) == 0
    data = IndexedDataset(str(tmp_path / "text"))  # whose arrays are views
    assert data[0].tolist() == [69_999, 8, 2]
    assert "1 documents, 3 tokens of 4 bytes" in capsys.readouterr().out
    monkeypatch.setattr(build, lambda args: Words([70_000]))
    assert make(tmp_path, tmp_path / "more", tmp_path / "a.txt", "--workers", 1) == 2
    assert "the tokenizer made the token 70000, and says that it has 70000" in capsys.readouterr().err


# What is refused: (files, options, message)
BAD = {
    "no file": ({}, ["{tmp}/none.txt"], "none.txt: no such file or folder; expected texts"),
    "a loop": ({"loop.txt": Path("loop.txt")}, ["{tmp}/loop.txt"], "loop.txt: no such file or folder"),
    "an empty folder": ({"empty/.x": b"x"}, ["{tmp}/empty"], "empty: no file in this folder; expected texts"),
    "no text at all": ({"a.txt": b" \n"}, ["{tmp}/a.txt"], "a.txt: none of the files has text; expected some"),
    "no bytes": ({"a.jsonl": b""}, ["{tmp}/a.jsonl"], "a.jsonl: none of the files has text; expected some"),
    "bytes": ({"a.txt": b"abc\xffdef"}, ["{tmp}/a.txt"], "a.txt: no UTF-8 (byte 3: 0xff); expected text"),
    "bytes in a line": ({"a.jsonl": b'{"text": "a"}\n{"text": "\xff"}'}, ["{tmp}/a.jsonl"],
        "a.jsonl, line 2: no UTF-8 (byte 10: 0xff)"),
    "a list": ({"a.json": b"[1, 2]"}, ["{tmp}/a.json"], "a.json, line 1: [1, 2]: expected an object of JSON "
        "with a text under 'text'; mend the line, or give --text-key"),
    "another key": ({"a.jsonl": b'{"content": "a"}'}, ["{tmp}/a.jsonl"],
        'a.jsonl, line 1: {"content": "a"}: expected'),
    "a number": ({"a.jsonl": b'{"text": 1}'}, ["{tmp}/a.jsonl"],
        'a.jsonl, line 1: {"text": 1}: expected an object'),
    "half a character": ({"a.jsonl": b'{"text": "\\ud800"}'}, ["{tmp}/a.jsonl"],
        'line 1: {"text": "\\ud800"}: expected'),
    "nested": ({"a.jsonl": b"[" * 100_000}, ["{tmp}/a.jsonl"], "a.jsonl, line 1: [[["),
    "half a file": ({"a.jsonl.gz": gzip.compress(b'{"text": "a"}')[:-9]}, ["{tmp}/a.jsonl.gz"],
        "a.jsonl.gz: cannot be read (Compressed file ended before"),
    "no gzip": ({"a.txt.gz": b"abc"}, ["{tmp}/a.txt.gz"], "a.txt.gz: cannot be read (Not a gzipped file"),
    "no xz": ({"a.txt.xz": b"abc"}, ["{tmp}/a.txt.xz"], "a.txt.xz: cannot be read (Input format not supported"),
    "workers": ({"a.txt": b"a"}, ["{tmp}/a.txt", "--workers", "0"], "--workers 0: expected 1 to 4096"),
    "there": ({"a.txt": b"a", "new.idx": b""}, ["{tmp}/a.txt"], "new: new.idx is there already; expected a new prefix"),
    "a folder": ({"a.txt": b"a"}, ["{tmp}/a.txt", "--output", "{tmp}"], "a folder; expected a prefix of two files"),
    "a device": ({"a.txt": b"a"}, ["{tmp}/a.txt", "--output", "/dev/full"], "/dev/full: no file; expected a prefix"),
    "a link to nothing": ({"corp/gone.txt": Path("nowhere")}, ["{tmp}/corp"],
        "gone.txt: no such file or folder, a link to nowhere; expected texts"),
    "below a file": ({"a.txt": b"a"}, ["{tmp}/a.txt", "--output", "{tmp}/a.txt/x"],
        "a.txt is a file; expected a folder"),
    "no tokenizer": ({"a.txt": b"a"}, ["{tmp}/a.txt", "--tokenizer", "{tmp}/none"], "none: no such folder; expected"),
    "another folder": ({"a.txt": b"a"}, ["{tmp}/a.txt", "--tokenizer", "{tmp}"], "cannot be loaded ("),
    "no files": ({}, [], "the following arguments are required: FILE"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(name, tokenizer, tmp_path, capsys):
    files, arguments, message = BAD[name]
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            (tmp_path / file).symlink_to(content)
        else:
            (tmp_path / file).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    assert make(tokenizer, tmp_path / "new", *(word.replace("{tmp}", str(tmp_path)) for word in arguments)) == 2
    out, error = capsys.readouterr()
    assert message in error and error.startswith("error: ") and error.count("\n") == 1 and not out, error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tokenizer_without_an_end_of_document_is_refused(tokenizer, tmp_path, capsys):
    shutil.copytree(tokenizer, tmp_path / "own")
    (tmp_path / "own/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "a.txt").write_text("a")
    assert make(tmp_path / "own", tmp_path / "text", tmp_path / "a.txt") == 2
    assert "own: has no eos_token, by which Megatron ends a document; expected one" in capsys.readouterr().err


def test_a_document_that_is_too_large_is_refused(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(texts, "LARGEST", 1000)
    (tmp_path / "a.txt").write_text("a line\n" * 200)
    assert make(tokenizer, tmp_path / "text", tmp_path / "a.txt") == 2
    assert (
        "a document of more than 0 MB; expected smaller ones; cut the file, or give --lines" in capsys.readouterr().err
    )
    assert make(tokenizer, tmp_path / "text", tmp_path / "a.txt", "--lines") == 0


def test_a_worker_that_is_killed_is_told(tmp_path):
    def killed(batch):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ValueError, match="a worker was killed; expected memory"):
        list(encoded(killed, [Batch(Path("a"), 0, False, [b"a"])] * 20, 2))


def test_a_dataset_is_complete_or_not_there(tmp_path, monkeypatch):
    def interrupted():
        yield np.arange(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path / "text", interrupted())
    assert not list(tmp_path.iterdir())
    write_dataset(tmp_path / "text", [np.arange(3)])
    replace = os.replace

    def half(source, target):
        if str(target).endswith(".idx"):
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", half)
    with pytest.raises(OSError, match="No space left"):
        write_dataset(tmp_path / "text", [np.arange(4)])
    assert [path.name for path in tmp_path.iterdir()] == ["text.bin"], "an old index beside new data"


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def full(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexedDatasetBuilder, "add_document", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/text\.bin'"):
        write_dataset(tmp_path / "text", [np.arange(3)])
    assert not list(tmp_path.iterdir())
