"""Stand-ins for srun and scontrol, which run the commands of a job's nodes on this machine."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "slurm" / "pretrain.sbatch"

# What the script relies on: --option=value, %j and %n in --output, appending to it, a SLURM_NODEID for each task, and
# --kill-on-bad-exit, after which the tasks that were killed give the exit code, for it is the highest.
SRUN = f"""#!{sys.executable}
import json, os, pathlib, signal, subprocess, sys, time
given = sys.argv[1:]
if given == ["--help"]:
    sys.exit(print(os.environ.get("STUB_HELP", "")))
options = {{}}
while given[0].startswith("--"):
    name, _, options[name] = given.pop(0).partition("=")
folder = pathlib.Path(os.environ["STUB_FOLDER"])
(folder / "srun.json").write_text(json.dumps(options))
hosts, tasks = os.environ["STUB_HOSTS"].split(), []
for node in range(int(options["--nodes"])):
    log = options["--output"].replace("%j", os.environ["SLURM_JOB_ID"]).replace("%n", str(node))
    environment = os.environ | dict(SLURM_NODEID=str(node), SLURM_PROCID=str(node), SLURMD_NODENAME=hosts[node])
    with open(log, "a" if options["--open-mode"] == "append" else "w") as output:
        tasks.append(subprocess.Popen(given, env=environment, stdout=output, stderr=output, start_new_session=True))
while any(task.poll() is None for task in tasks):
    if options["--kill-on-bad-exit"] == "1" and any(task.poll() for task in tasks):
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
    time.sleep(0.02)
sys.exit(max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks))
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
    "show hostnames") [[ $3 == "$SLURM_JOB_NODELIST" ]] && printf '%s\\n' $STUB_HOSTS ;;
    "show job") echo "   JobState=RUNNING PreemptTime=${STUB_PREEMPTED:-None}" ;;
    *) echo "$@" >> "$STUB_FOLDER/scontrol" ;;
esac
"""
# A launcher as examples/ has them, up to the program that it starts.
PROBE = f"""
source {shlex.quote(str(ROOT / "examples/launch.sh"))}
EXTRA_FLAGS=("$@")
ended() {{ mkdir -p "$OUTPUT/checkpoints" && printf '%%s\\n' "$@" > "$OUTPUT/checkpoints/run_status.json"; }}
[[ ${{DRY_RUN:-0}} == 1 ]] || {{ [[ $NODE_RANK != 0 ]] || ended ' "state": "finished",' ' "line": "all",'; %s; }}
launch --num-layers 2
"""


@pytest.fixture
def cluster(tmp_path):
    """A folder with the stand-ins in bin/ and a job's environment in the result's second item."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("squeue", "#!/bin/sh\necho N/A\n")):
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return tmp_path, {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "STUB_FOLDER": str(tmp_path),
        "STUB_HOSTS": "gpu07 gpu08 gpu12 gpu13",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_NODELIST": "gpu[07-08,12-13]",
        "SLURM_GPUS_ON_NODE": "8",
        "PYTHON": sys.executable,
        "TRANSFORMER_IMPL": "local",
        "MOCK_DATA": "1",
        "MOCK_VOCAB_SIZE": "512",
        "CONFIG": "configs/s2_7b_mixed.yaml",
        "OUTPUT": str(tmp_path / "a run"),
        "PREFLIGHT": "0",
    }


def submit(cluster, *arguments, without=(), cwd=ROOT, **changes):
    folder, job = cluster
    # 24 hours, and what is left of a minute: the script counts whole ones from when it starts.
    job = job | {"SLURM_JOB_END_TIME": str(int(time.time()) + 24 * 3600 + 55)}
    environment = {name: value for name, value in (job | changes).items() if name not in without}
    # A copy, for SLURM runs one out of its own folder.
    script = folder / "slurm_script"
    script.write_bytes(SCRIPT.read_bytes())
    command = ["bash", str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=600)


def probe(cluster, action: str) -> Path:
    """A launcher that does `action` on the nodes."""
    path = cluster[0] / "probe.sh"
    path.write_text(PROBE % action)
    return path


def log(cluster, node: int) -> Path:
    return cluster[0] / "a run" / "logs" / f"job-123456-node-{node}.log"


PRINT_ALL = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
SHOW = f"{shlex.quote(sys.executable)} -c '{PRINT_ALL}' \"$@\"; exit"


def shown(cluster, *arguments, **changes) -> list[tuple[dict[str, str], list[str]]]:
    """(environment, arguments) of the launcher on each node."""
    done = submit(cluster, probe(cluster, SHOW), *arguments, **changes)
    assert done.returncode == 0, done.stderr
    count = int(changes.get("SLURM_JOB_NUM_NODES", 4))
    return [json.loads(log(cluster, node).read_text()) for node in range(count)]


def options(cluster) -> dict[str, str]:
    return json.loads((cluster[0] / "srun.json").read_text())
