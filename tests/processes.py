"""What the processes that tests start need: modules to import, a port to meet at, a reader of what they found."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BELOW_EPHEMERAL = range(15000, 32000)  # Linux takes the ports of outgoing connections, gloo's among them, from 32768 on


def python_path(*first: Path | None) -> str:
    """PYTHONPATH: `first`, this checkout, and what the tests themselves have there, such as a checkout of
    Megatron-LM."""
    return os.pathsep.join(str(path) for path in (*first, ROOT, os.environ.get("PYTHONPATH")) if path)


def found_by(*words, seconds: float = 900, cwd: Path = ROOT, **environment: str):
    """The JSON in the last line that `python *words` printed, which has to end well. environment: beside this
    process's."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


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
