"""examples/existing_launch/stock.py with a loss log: LOSS_LOG."""

import os
import runpy
from pathlib import Path

from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

install_if_no_gpu()

from s2_megatron.megatron.patches import install_loss_log  # noqa: E402

if __name__ == "__main__":
    install_loss_log(os.environ["LOSS_LOG"])
    example = Path(__file__).resolve().parents[3] / "examples" / "existing_launch" / "stock.py"
    runpy.run_path(str(example), run_name="__main__")
