"""The corpus of the quality studies: which files it takes, its documents, its hash."""

from __future__ import annotations

import numpy as np
import pytest

from studies import corpus as corpus_module
from studies.corpus import CorpusSettings, prepare_corpus
from studies.files import (
    LARGEST_DOCUMENT,
    Root,
    Scanned,
    find_files,
    make_documents,
    new_line_shares,
    refusal_of_text,
    scan,
)


def source(index: int, lines: int = 12) -> str:
    """Text that looks like a program, other lines for every index."""
    words = np.random.default_rng(index).choice(["value", "result", "index", "total", "name", "count"], (lines, 3))
    return "".join(f"def {a}_{b}_{index}_{row}({c}):  # of {b}\n" for row, (a, b, c) in enumerate(words))


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "machine"
    for index in range(40):
        path = folder / f"package_{index // 2}" / f"module_{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source(index))
    return Root("prefix", folder)


def test_files_are_found_by_suffix_and_sorted(tmp_path):
    for name in ("b.py", "a.h", "data.bin", "include/vector", "share/vector", "__pycache__/c.py", ".git/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "link.py").symlink_to(tmp_path / "b.py")
    names = [name for name, _ in find_files([Root("r", tmp_path)])]
    assert names == ["r/a.h", "r/b.py", "r/include/vector"]


@pytest.mark.parametrize(
    "text, reason",
    [
        (source(0, 40), None),
        ("\n".join(f"{a}, {a * 7919 % 10007}, value" for a in range(400)), "numbers"),
        ("x = 'abc'\n" * 500, "repeats itself"),
        ("".join(map(chr, np.random.default_rng(0).integers(97, 123, 3000))), "long lines"),
        ("".join(map(chr, np.random.default_rng(0).choice([10, 35, 43, 45, 60, 62, 97], 3000))), "few letters"),
    ],
)
def test_tables_and_generated_text_are_left_out(text, reason):
    assert refusal_of_text(text) == reason


def scanned(name: str, *lines: int) -> Scanned:
    return Scanned(name, None, 1000, None, np.array(lines, np.uint32))


def test_only_lines_that_no_file_before_has_are_new():
    shares = new_line_shares([scanned("a", 1, 2, 2), scanned("b", 1, 2, 3, 4), scanned("c", 3, 4), scanned("d")])
    assert shares.tolist() == [1.0, 0.5, 0.0, 0.0]


def test_documents_are_directories_without_duplicates(root):
    (root.folder / "package_3" / "zz_copy.py").write_text(source(0))  # of package_0
    documents, dropped = make_documents([scan(entry) for entry in find_files([root])])
    assert len(documents) == 20 and dropped == {"duplicate": 1}
    third = next(document for document in documents if document.name == "prefix/package_3")
    assert [path.name for path in third.files] == ["module_6.py", "module_7.py"]


def test_a_large_directory_makes_several_documents(root):
    big = [Scanned(f"r/d/{index}", root.folder / str(index), LARGEST_DOCUMENT // 3 + 1, None,
                   np.array([index], np.uint32)) for index in range(5)]  # fmt: skip
    documents, _ = make_documents(big)
    assert [(document.name, len(document.files)) for document in documents] == [("r/d", 2), ("r/d#2", 2), ("r/d#3", 1)]
    assert {document.directory for document in documents} == {"r/d"}


SETTINGS = CorpusSettings(vocabulary=300)


def prepared(runs, root):
    return prepare_corpus(runs, SETTINGS, [root], tell=lambda text: None)


def test_equal_text_gives_an_equal_hash_and_other_text_another(tmp_path, root):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    first, again = prepared(tmp_path / "one", root), prepared(tmp_path / "two", root)
    assert first.sha256 == again.sha256 and first.description["documents"] == 20
    data = IndexedDataset(str(first.data_prefix))
    assert len(data) == 20 and sum(len(each) for each in data) == first.description["tokens"]
    assert all(each[-1] == 0 and (each[:-1] > 0).all() and each.max() < 300 for each in data)
    assert prepared(tmp_path / "one", root).folder == first.folder  # found again

    (root.folder / "package_7" / "more.py").write_text(source(99))
    assert prepared(tmp_path / "three", root).sha256 != first.sha256


def test_without_tokenizers_a_token_is_a_byte(tmp_path, root, monkeypatch):
    monkeypatch.setattr(corpus_module, "has_tokenizers", lambda: False)
    said = []
    corpus = prepare_corpus(tmp_path, SETTINGS, [root], tell=said.append)
    assert corpus.vocabulary == 257 and corpus.description["tokenizer"] == "bytes"
    assert "tokenizers cannot be imported" in said[0]
    monkeypatch.undo()
    assert corpus.sha256 != prepared(tmp_path / "bpe", root).sha256


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "machine").mkdir()
    with pytest.raises(ValueError, match=r"0 documents of text under .*machine; expected 10 or more"):
        prepared(tmp_path / "runs", Root("prefix", tmp_path / "machine"))
    assert not list((tmp_path / "runs" / "corpus").iterdir())
