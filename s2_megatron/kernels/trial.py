"""Which versions of Triton the Hopper kernels run on. Gluon, the language that they are written in, changes from one to
the next.

They were measured on 3.6 and 3.9 (hopper/gluon_versions.py has what differs). On an older one they do not run. On one
between them, and on a newer one, they are tried: a process of its own (s2_megatron.testing.kernel_trial) compiles the
kernels of a kind, and compares a small call with the portable kernels; of its own, because what the wrong code does to
a GPU may end a process or never return. The verdict is stored in Triton's cache folder, for this version of Triton, these sources, this GPU and
this kind of call.
"""
from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.runtime.cache import get_cache_manager

from s2_megatron.printing import print_once

MEASURED = ((3, 6), (3, 9))  # the kernels were, on a GPU
OLDEST = MEASURED[0]
SECONDS = 600  # that a trial may take
FILE = "s2_hopper_trial.json"
MODULE = "s2_megatron.testing.kernel_trial"


class Kind(NamedTuple):
    """Calls for which the same kernels are compiled, or ones that differ in little."""

    dtype: str
    head_dim: int
    heads_of_kv_head: int
    n_ranges: int  # 0: lists of blocks, as of a block mask
    heads_pair: bool
    mixed: bool  # the heads of a group have different strides
    packed: bool
    placed: bool
    deterministic: bool
    tokens: bool  # a window or a sink in tokens

    def __str__(self):
        words = [f"head dim {self.head_dim}", self.dtype]
        words += [name for name in ("packed", "placed", "deterministic", "tokens") if getattr(self, name)]
        return ", ".join([*words, "block mask" if self.n_ranges == 0 else f"{self.n_ranges} ranges"])


def release() -> tuple[int, int]:
    """Major and minor number of the installed Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


@cache
def no_gluon() -> str | None:
    """Why no Hopper kernel can be loaded with the installed Triton, or None."""
    if release() < OLDEST:
        return f"the kernels for Hopper need Triton {_version(OLDEST)} or newer, and this is Triton {triton.__version__}"
    if release() not in MEASURED:
        try:
            import s2_megatron.kernels.hopper.launch  # noqa: F401
        except (ImportError, AttributeError) as error:
            return f"the Gluon of Triton {triton.__version__} lacks what the kernels for Hopper need: {error}"
    return None


def refusal(query, call) -> str | None:
    """Why a call does not run on the Hopper kernels with the installed Triton, or None. Takes a minute at the first
    call of a kind, on a version that was not measured."""
    return None if release() in MEASURED else _verdict(query.device, _kind(query, call), call.layout.pattern)


def _version(numbers) -> str:
    return ".".join(map(str, numbers))


def _kind(query, call) -> Kind:
    layout, pattern = call.layout, call.layout.pattern
    ranged = hasattr(layout, "ranges") and layout.block_size == 64  # larger blocks come as lists, like a mask's
    return Kind(
        str(query.dtype).removeprefix("torch."), query.shape[3], pattern.num_heads // pattern.num_kv_heads,
        layout.ranges.shape[1] if ranged else 0, bool(layout.heads_pair), ranged and layout.pair_distances is not None,
        call.packed is not None, call.placement is not None, call.deterministic,
        getattr(layout, "tokens", None) is not None)


_known: dict[tuple, str | None] = {}


def _verdict(device, kind: Kind, pattern) -> str | None:
    """Why the kernels of a kind failed in their trial, or None: from this process, from the cache folder, or from a
    trial now."""
    place = device, kind
    if place not in _known:
        stored = _stored(device, kind)
        found = stored.read()
        if found is None:
            found = _try(device, kind, pattern)
            stored.write(found)
        reason = found["reason"]
        if reason is not None:
            reason = (f"the kernels for Hopper were measured on Triton {' and '.join(map(_version, MEASURED))}, this is {triton.__version__}, "
                      f"and their trial ({kind}) failed: {reason}")
        else:
            print_once(f"S2 attention: the kernels for Hopper have not been measured on Triton {triton.__version__}; in a trial ({kind}) they "
                       "agree with the portable ones")
        _known[place] = reason
    return _known[place]


class _Stored:
    """A verdict in Triton's cache folder, as far as there is one."""

    def __init__(self, key: str):
        try:
            self.folder = get_cache_manager(key)
        except (OSError, RuntimeError):
            self.folder = None

    def read(self) -> dict | None:
        try:
            path = self.folder and self.folder.get_file(FILE)
            return path and json.loads(Path(path).read_text())
        except (OSError, ValueError):
            return None

    def write(self, found: dict) -> None:
        try:
            if self.folder:
                self.folder.put(json.dumps(found), FILE, binary=False)
        except OSError:  # then the next run tries again
            pass


def _stored(device, kind) -> _Stored:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    said = "\n".join([triton.__version__, torch.__version__, gpu, repr(kind), _sources()])
    return _Stored(hashlib.sha256(said.encode()).hexdigest())


@cache
def _sources() -> str:
    """A hash of all kernels."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _try(device, kind: Kind, pattern) -> dict:
    """{"reason": why the trial failed, or None}."""
    print_once(f"S2 attention: trying the kernels for Hopper on Triton {triton.__version__}, which they have not been measured on")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    given = pickle.dumps((str(device), kind._asdict(), pattern if kind.n_ranges else (pattern.num_heads, pattern.num_kv_heads)))
    try:
        done = subprocess.run([sys.executable, "-m", MODULE], input=given, env=environment, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"reason": f"not over after {SECONDS} seconds"}
    lines = [line for line in (done.stdout + b"\n" + done.stderr).decode(errors="replace").splitlines() if line.strip()]
    if done.returncode != 0:
        return {"reason": f"it ended with status {done.returncode}: {lines[-1] if lines else 'no message'}"}
    return json.loads(done.stdout.decode().splitlines()[-1])
