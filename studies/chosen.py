"""Choose the dense heads of a run on its dense checkpoint, unless that has been done, then train it.

    python -m studies.chosen --write chosen.yaml --heads 16 --load ... -- pretrain_gpt_s2.py ...

What stands before `--` is for `s2-megatron choose-dense`, on SEQUENCES sequences; what stands behind it is the script,
whose --s2-config is that YAML, with its flags. Runs that share the YAML, or the losses in --known, may start at once:
one makes it, the others wait.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from s2_megatron.megatron.host.processes import signal_when_parent_ends

SEQUENCES = 16


def make_yaml(write: Path, options: list[str], known: Path | None = None) -> int:
    """Make the file with choose-dense, in a process of its own: Megatron is set up once a process. known: losses on the
    same sequences that other arms measured, which this one adds to. Returns its status; 0 where the file is there."""
    write.parent.mkdir(parents=True, exist_ok=True)
    shared = known or write
    with shared.with_name(f"{shared.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, however this ends
        if write.exists():
            return 0
        write.with_suffix(".json").unlink(missing_ok=True)  # of a try that found no set
        given = [f"--write={write}", f"--json={write.with_suffix('.json')}", f"--sequences={SEQUENCES}", *options]
        if known is not None and known.exists():
            given.append(f"--from-json={known}")
        status = subprocess.run(
            [sys.executable, "-m", "s2_megatron", "choose-dense", *given],
            preexec_fn=functools.partial(signal_when_parent_ends, signal.SIGTERM),
        ).returncode
        if status == 0 and known is not None:
            shutil.copy(write.with_suffix(".json"), known)
        return status


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.chosen", description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, required=True, help="the YAML")
    parser.add_argument("--known", type=Path, help="losses that arms share")
    at = sys.argv.index("--")
    parsed, options = parser.parse_known_args(sys.argv[1:at])
    status = make_yaml(parsed.write, options, parsed.known)
    if status != 0:
        sys.exit(status)
    os.execv(sys.executable, [sys.executable, *sys.argv[at + 1 :]])


if __name__ == "__main__":
    main()
