"""What the studies of these tests share."""

from __future__ import annotations

import pytest

from tests.conftest import (  # noqa: F401 - the suite's own rules: the interpreter, equal random numbers, GPU marks
    memory_for_other_workers,
    pytest_collection_modifyitems,
    pytest_configure,
    same_numbers,
    same_numbers_in_fixtures,
)


@pytest.fixture(scope="session")
def new_runs(tmp_path_factory):
    """Makes a folder of runs with the corpus of all others; the first study of a session that needs one builds it."""
    corpora = tmp_path_factory.mktemp("corpora")

    def make(folder):
        runs = folder / "runs"
        runs.mkdir()
        (runs / "corpus").symlink_to(corpora, target_is_directory=True)
        return runs

    return make
