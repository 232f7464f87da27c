"""Megatron's local checkpoints: each rank's own, on a disk or in the memory of its node."""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess

import pytest

from s2_megatron.megatron.checkpoints.hooks import remove_unfinished
from tests.megatron.kill_trial import Trial, check_one_run

needs_extension = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None,
    reason="needs nvidia-resiliency-ext: pip install 's2-megatron[resiliency]' (glibc 2.39 or newer)",
)
LOCAL = "--non-persistent-ckpt-type local --non-persistent-save-interval 3"
ALGORITHM = "--non-persistent-local-ckpt-algo fully_parallel"


class LocalTrial(Trial):
    """Its checkpoints for all ranks together are as rare as they are slow."""

    def __post_init__(self):
        super().__post_init__()
        self.local = self.folder / "local"
        self.flags = f"{LOCAL} {ALGORITHM} --non-persistent-local-ckpt-dir {self.local}"

    def saved(self) -> int:
        """The newest iteration that every rank has a file of, or that the tracker names."""
        found = [
            {int(path.name.split("_")[1]) for path in (self.local / str(rank)).glob("iter_*_local.pt")}
            for rank in range(self.processes)
        ]
        return max(*set.intersection(*found), 0, super().saved())


@needs_extension
@pytest.mark.long
def test_a_killed_rank_costs_the_iterations_since_the_last_local_checkpoint(lab):
    """Two ranks, one of them killed; the job is back from the local copies, and says how many iterations it lost."""
    whole = lab.run("two_ranks", "--train-iters 20", processes=2)
    trial = LocalTrial(lab, "local", 20, save_interval=10)
    assert trial.kill_once("rank", "training", random.Random(3)) is not None
    last, saved = trial.trained(), trial.saved()
    assert saved % 3 == 0 and 0 < last - saved <= 3, (last, saved)
    trial.finish()
    output = trial.last_output()
    assert f"S2: goes on after iteration {saved} of the local checkpoint in {trial.local}" in output
    assert f"{last - saved} iterations were lost" in output
    check_one_run(trial, whole.losses)

    # With another sparsity: refused when the local copies have been loaded, by every layer's difference.
    for path in trial.checkpoints.glob("*"):
        path.rename(path.with_name(f"away_{path.name}"))
    other = lab.folder / "other.yaml"
    other.write_text(lab.sparsity.read_text().replace("stride: 4", "stride: 2"))
    flags = f"--train-iters 22 --load {trial.checkpoints} {trial.flags}"
    output = lab.run("local_other", flags, f"--s2-config {other}", processes=2, fails=True).output
    assert "was trained with another sparsity" in output and "stride 4 -> 2" in output
    assert f"the checkpoint in {trial.local} (iteration 18)" in output

    # A copy that was cut: one line, and its command takes the copies out of the way.
    copy = trial.local / "1" / "iter_0000018_1_local.pt"
    copy.write_bytes(copy.read_bytes()[:1000])
    output = lab.run("local_cut", flags, processes=2, fails=True).output
    (line,) = re.findall(r"^.*iteration 18 cannot be read on rank 1.*$", output, flags=re.M)
    subprocess.run(line.partition("do on every node: ")[2].partition(" (training")[0], shell=True, check=True)
    assert not list(trial.local.rglob("iter_0000018*"))


def test_what_a_killed_rank_had_not_written_goes(tmp_path):
    """The next save of that iteration would find the file there, and end the run."""
    names = ["iter_0000003_0_local.pt", "iter_0000006_0_local.dirty.pt", "iter_0000006_1_local.dirty.pt", "mine.pt"]
    for name in names:
        (tmp_path / name).write_text("x")
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003_0_local.pt", "mine.pt"]
    remove_unfinished(tmp_path / "none")
