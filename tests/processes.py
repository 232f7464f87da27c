"""What the processes that tests start need: modules to import, and a port to meet at."""

import os
import random
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BELOW_EPHEMERAL = range(15000, 32000)  # Linux takes the ports of outgoing connections, gloo's among them, from 32768 on


def python_path(*first: Path | None) -> str:
    """PYTHONPATH: `first`, this checkout, and what the tests themselves have there, such as a checkout of
    Megatron-LM."""
    return os.pathsep.join(str(path) for path in (*first, ROOT, os.environ.get("PYTHONPATH")) if path)


def free_port() -> int:
    """Free at this moment, and no choice of the other workers of pytest-xdist, each of which has its own eighth."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    choice = random.SystemRandom()
    while True:
        port = choice.choice(BELOW_EPHEMERAL[worker % 8 :: 8])
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
