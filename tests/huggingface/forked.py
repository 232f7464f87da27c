"""s2-megatron in forks of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.megatron.without_gpt import require_gpt_model
from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "forked_tools.py"


class Tools:
    """s2-megatron in forks of a process that has imported Megatron (whose CPU stand-in stays there)."""

    def __init__(self):
        environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT], env=environment, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def ask(self, **request) -> dict:
        """What the fork answers. Skips a test that builds a GPT where Megatron has none."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if answer["status"] and "has no GPTModel" in answer["out"] + answer["err"]:
            require_gpt_model()
        return answer

    def __call__(self, *arguments, **constants) -> tuple[str, str]:
        """(what the command printed, its errors). constants: {"module:NAME": value}, changed before."""
        answer = self.ask(command=list(map(str, arguments)), set=constants)
        assert answer["status"] == 0, answer["out"] + answer["err"]
        return answer["out"], answer["err"]

    def refused(self, *arguments, **constants) -> str:
        """The error line of a command that is refused."""
        answer = self.ask(command=list(map(str, arguments)), set=constants)
        assert answer["status"] == 2, answer
        answer["err"] = "".join(line for line in answer["err"].splitlines(True) if not line.startswith("comparing "))
        assert answer["err"].count("\n") == 1 and answer["err"].startswith("error: "), answer
        return answer["err"]
