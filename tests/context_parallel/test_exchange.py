"""The exchange's stream: what waits for what, and how long memory is held."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from s2_megatron.context_parallel import exchange
from s2_megatron.context_parallel.exchange import Pending


class Received:
    """Stands for a tensor on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)


class Held:
    """Memory that is sent."""


@pytest.fixture
def events(monkeypatch):
    """What happens on two streams that stand for a GPU's, in order."""
    happened = []

    def stream(name):
        return SimpleNamespace(name=name, wait_stream=lambda other: happened.append(f"{name} waits for {other.name}"))

    compute, side = stream("compute"), stream("side")

    @contextmanager
    def entered(stream):
        happened.append(f"on {stream.name}")
        yield
        happened.append("back")

    monkeypatch.setattr(exchange.torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(exchange.torch.cuda, "stream", entered)
    monkeypatch.setattr(exchange, "_side_stream", lambda device: side)
    return happened


def test_a_transfer_and_its_reader_wait_for_each_other(events):
    """The transfer starts behind what the compute stream holds, K and V, and what is enqueued after result() starts
    behind the transfer; in between the compute stream waits for nothing."""
    received = Received()
    pending = Pending(received, (), lambda: events.append("work"))
    assert events == ["side waits for compute", "on side", "work", "back"]
    events.clear()
    assert pending.result() is received
    assert events == ["compute waits for side"]


def test_what_is_sent_is_held_until_the_compute_stream_waits(events):
    held = Held()
    alive = weakref.ref(held)
    pending = Pending(Received(), (held,), lambda: None)
    del held
    assert alive() is not None, "its memory must not be reused while it is sent"
    pending.result()
    assert alive() is None


def test_on_a_cpu_the_work_is_done_at_once():
    done = []
    received = torch.zeros(1)
    assert Pending(received, (), lambda: done.append(1)).result() is received and done == [1]
