"""Generation from a model whose dense layers Megatron computes itself must be noticed.

Usage: stock_generation.py LOAD; prints the RuntimeError.
"""

import sys
from pathlib import Path


def main():
    from s2_megatron.tools.generate import chooser, continuation
    from s2_megatron.tools.hf.checkpoint_model import load_model
    from s2_megatron.tools.hf.torch_dist import iteration_folder

    loaded = load_model(iteration_folder(Path(sys.argv[1])), dense_core="stock")
    try:
        list(continuation(loaded.model, [1, 2, 3], 2, chooser(0, 0, 0, 100)))
    except RuntimeError as error:
        print(f"RuntimeError: {error}")


if __name__ == "__main__":
    main()
