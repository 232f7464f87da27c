import pytest


@pytest.fixture
def triton_(monkeypatch):
    from tests.kernels.stand_in_triton import stand_in  # Gluon: only where a test asks for it

    return stand_in(monkeypatch)
