"""A SLURM of its own on one machine, to try job scripts on: munge, the controller and several nodes, all in one folder.

    python -m tests.slurm --nodes 2 -- sbatch --wait --nodes 2 job.sh

starts it, runs the command with SLURM_CONF set, and stops all of it. Every node is a slurmd with process and mount
namespaces and a host name of its own, so that `Slurm.kill(node)` does what a power failure does: the daemon and every
process of every job there are gone at once. For that it wants root. Debian's packages do: apt-get install slurm-wlm
munge. Nothing is written outside the folder, and the machine's own SLURM, if there is one, is not touched.

Partitions: `normal` (the default); `urgent`, whose jobs pre-empt those of the others; `graceful`, whose jobs get
SIGTERM GRACE_SECONDS before they are pre-empted. A pre-empted job is queued again. There is no accounting, so no QOS.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

GRACE_SECONDS = 120
REQUEUE_SECONDS = 10  # how long a job that is queued again waits at least; SLURM's default is 120
KILL_SECONDS = 60  # from SIGTERM to SIGKILL, for CPUs that have more to do; SLURM's default is 30
DOWN_SECONDS = 15  # how long a node is silent before it is taken for dead; SLURM's default is 300
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare", "setpriv")
NAMESPACES = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
# A shell stays the first process of the namespace: it reaps what the daemon leaves behind.
INSIDE = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && "$@"; exit $?'
MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}

CONFIGURATION = """\
ClusterName=one-machine
SlurmctldHost=controller(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={requeue_seconds}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout={down_seconds}
KillWait={kill_seconds}
FirstJobId={first_job}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1
PartitionName=graceful Nodes=ALL PriorityTier=1 GraceTime={grace_seconds}
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def refusal() -> str | None:
    """Why no SLURM can be started here, with what to do; None where it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed; as root: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "a SLURM of several nodes on one machine needs root, for its namespaces; run this as root"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode:
        return f"{' '.join(NAMESPACES)}: {tried.stderr.strip()}; in a container: docker run --privileged"
    return None


def wait_until(condition: Callable[[], object], seconds: float, what: str, interval: float = 0.5):
    """The first true value of `condition()`. Raises TimeoutError, which names `what`, after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(interval)
    return value


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on at this moment."""
    with_sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in with_sockets]
    for server in with_sockets:
        server.close()
    return ports


class Slurm:
    """A context: the daemons run inside it, and end with it, or with this process, however that ends.

    folder: an empty or new folder for configuration, state and logs (log_of). nodes: how many, named n1, n2, ... .
    gpus: how many each node has, for --gpus-per-node; they are numbers only, no devices. cpus: cores of each node, on
    paper too.

    Raises RuntimeError where refusal() says no, and TimeoutError when the nodes are not ready after a minute.
    """

    def __init__(self, folder: str | Path, nodes: int = 2, gpus: int = 1, cpus: int = 2):
        if (reason := refusal()) is not None:
            raise RuntimeError(reason)
        self.folder = Path(folder).resolve()
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.gpus, self.cpus = gpus, cpus
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Slurm:
        try:
            self._configure()
            munge = self.folder / "munge"
            self._start(
                "munged",
                "controller",
                ["munged", "--foreground", "--force", *(f"--{name}={munge / file}" for name, file in MUNGE.items())],
            )
            wait_until((munge / "socket").exists, 30, "munged's socket")
            self.start_controller()
            for node in self.nodes:
                self.start(node)
            self.wait_for_nodes("idle", self.nodes)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def _configure(self) -> None:
        for name in ("munge", "state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, mode=0o711)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        ports = free_ports(1 + len(self.nodes))
        lines = [
            f"NodeName={node} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} Gres=gpu:{self.gpus} State=UNKNOWN"
            for node, port in zip(self.nodes, ports[1:])
        ]
        configuration = CONFIGURATION.format(
            folder=self.folder,
            ports=ports,
            nodes="\n".join(lines),
            first_job=1000 + int.from_bytes(os.urandom(2)),  # MASTER_PORT is made from it
            requeue_seconds=REQUEUE_SECONDS,
            down_seconds=DOWN_SECONDS,
            kill_seconds=KILL_SECONDS,
            grace_seconds=GRACE_SECONDS,
        )
        (self.folder / "slurm.conf").write_text(configuration)
        (self.folder / "gres.conf").write_text(
            "".join(f"Name=gpu File={self.folder}/gpu{number}\n" for number in range(self.gpus))
        )
        for number in range(self.gpus):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "cgroup.conf").write_text("")
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost controller {' '.join(self.nodes)}\n")

    def log_of(self, name: str) -> Path:
        """The log of munged, slurmctld or a node's slurmd."""
        return self.folder / f"{name}.log"

    def _start(self, name: str, host: str, command: list[str]) -> None:
        inside = ["sh", "-c", INSIDE, "daemon", str(self.folder / "hosts"), host, *command]
        with self.log_of(name).open("a") as log:
            self.daemons[name] = subprocess.Popen(
                # The kernel kills it when this process ends, so that not even SIGKILL here leaves a daemon behind.
                ["setpriv", "--pdeathsig", "KILL", *NAMESPACES, *inside],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.environment,
            )

    def start_controller(self) -> None:
        """It takes up what an earlier one has left in the folder."""
        self._start("slurmctld", "controller", ["slurmctld", "-D", "-f", self.environment["SLURM_CONF"]])

    def start(self, node: str) -> None:
        """Boot a node; it takes jobs again once it has registered (wait_for_nodes)."""
        self._start(node, node, ["slurmd", "-D", "-N", node, "-f", self.environment["SLURM_CONF"]])

    def kill(self, name: str) -> None:
        """The power failure of a node (or of slurmctld, munged): every process of it is killed at once."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait(timeout=30)

    def stop(self) -> None:
        for name in reversed(list(self.daemons)):
            self.kill(name)

    def run(self, *command: str, timeout: float = 60, **options) -> subprocess.CompletedProcess:
        """A command of SLURM; its output is text. Raises CalledProcessError and TimeoutExpired."""
        environment = self.environment | options.pop("env", {})
        options = {"check": True, "capture_output": True, "text": True} | options
        return subprocess.run(list(command), env=environment, timeout=timeout, **options)

    def wait_for_nodes(self, state: str, nodes: Iterable[str], seconds: float = 60) -> None:
        """Wait until each of these nodes is in this state, as sinfo names it: idle, down, ..."""
        wanted = set(nodes)

        def reached() -> bool:
            done = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False)
            states = dict(line.split() for line in done.stdout.splitlines())
            return all(states.get(node, "").rstrip("*") == state for node in wanted)

        logs = " ".join(str(self.log_of(name)) for name in ("slurmctld", *sorted(wanted)))
        wait_until(reached, seconds, f"nodes {sorted(wanted)} to be {state}; their logs: {logs}")

    def submit(self, *arguments: str, **options) -> str:
        """sbatch; returns the job's id."""
        return self.run("sbatch", "--parsable", *arguments, **options).stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, ExitCode, Restarts, Reason, ..."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait_for_job(self, job: str, *states: str, seconds: float) -> dict[str, str]:
        """Wait until the job is in one of these states (RUNNING, PENDING, COMPLETED, ...); returns `job(job)`."""
        found: dict[str, str] = {}

        def reached() -> bool:
            found.update(self.job(job))
            return found["JobState"] in states

        try:
            wait_until(reached, seconds, f"job {job} to be {' or '.join(states)}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it is {found.get('JobState')} ({found.get('Reason')})") from None
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.slurm", description="Run a command with a SLURM of its own on this machine."
    )
    parser.add_argument("--nodes", type=int, default=2, help="how many, named n1, n2, ...")
    parser.add_argument("--gpus", type=int, default=1, help="of each node, in SLURM's books only")
    parser.add_argument("command", nargs="+", help="e.g. bash, or sbatch --wait --nodes 2 job.sh")
    given = parser.parse_args()
    if (reason := refusal()) is not None:
        parser.error(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Slurm(folder, given.nodes, given.gpus) as slurm:
        return subprocess.run(given.command, env=slurm.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
