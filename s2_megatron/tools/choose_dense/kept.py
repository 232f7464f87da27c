"""Losses that are measured once: in a file, from which another choice takes them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

from s2_megatron.config.errors import printable
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.checkpoints.checksums import read_checksums, sha256_of


def weights_sha256(folder: Path) -> str:
    """One hash of a checkpoint's weights: of its shards' checksums, which are computed for those that have none."""
    known = read_checksums(folder) if folder.is_dir() else {}
    shards = sorted(path for path in folder.rglob("*.distcp") if path.is_file())
    lines = [f"{known.get(str(path.relative_to(folder))) or sha256_of(path)}  {path.name}" for path in shards]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Kept:
    """The mean losses of plans, as what each sequence adds to them. measure: computes one. of: what they depend on
    beside the plan, as words for a message and hashes. losses: by the plan's hash."""

    def __init__(self, measure: Callable[[ResolvedSparsity], list[float]], of: dict[str, str]):
        self.measure, self.of = measure, of
        self.losses: dict[str, list[float]] = {}
        self.measured = 0  # new ones

    def take(self, file: Path) -> None:
        """The losses of a file of --json. Raises ValueError for another file, and for losses of something else."""
        shown = f"--from-json {printable(file, 200)}"
        try:
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise OSError(0, "a device or a pipe")
            content = json.loads(file.read_text(encoding="utf-8"))
            of, losses = content["measured_of"], content["losses"]
            counts = {len(each) for each in losses.values()}
            numbers = all(isinstance(own, float) and math.isfinite(own) for each in losses.values() for own in each)
            if not numbers or 0 in counts or len(counts) > 1 or not isinstance(of, dict):
                raise ValueError("other values")
        except OSError as error:
            raise ValueError(f"{shown}: {error.strerror}; expected a file that --json wrote; correct it") from error
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{shown}: has no losses by sequence; expected a file that --json of this release wrote; leave "
                "--from-json out to measure anew"
            ) from error
        other = [name for name, value in self.of.items() if of.get(name) != value]
        if other:
            raise ValueError(
                f"{shown}: measured with another {' and another '.join(other)}; expected losses of this checkpoint on "
                "these sequences; give the options of that run, or leave --from-json out to measure anew"
            )
        self.losses.update(losses)

    def loss(self, sparsity: ResolvedSparsity) -> float:
        return math.fsum(self.shares(sparsity))

    def shares(self, sparsity: ResolvedSparsity) -> list[float]:
        plan = hashlib.sha256(sparsity.canonical_json().encode()).hexdigest()
        if plan not in self.losses:
            self.losses[plan] = self.measure(sparsity)
            self.measured += 1
        return self.losses[plan]

    def facts(self) -> dict:
        return {"measured_of": self.of, "losses": self.losses}
