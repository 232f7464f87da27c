"""A port for the processes of a test to meet at."""

import random
import socket

BELOW_EPHEMERAL = range(15000, 32000)  # Linux takes the ports of outgoing connections, gloo's among them, from 32768 on


def free_port() -> int:
    """Free at this moment, and hardly chosen by another test that starts at the same one."""
    choice = random.SystemRandom()
    while True:
        port = choice.choice(BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
