"""Compare two torch_dist checkpoints as global tensors: weights and optimizer state, whatever layouts saved them.

Usage: compare_checkpoints.py FOLDER FOLDER (those with the .metadata file); prints the number of equal tensors, or the
names that differ.
"""

import sys
from pathlib import Path


def main():
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    def tensors(folder):
        reader = dcp.FileSystemReader(Path(folder))
        stored = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in stored.items()
            if isinstance(entry, TensorStorageMetadata) and "rng_state" not in name
        }
        dcp.load(state, storage_reader=reader, no_dist=True)
        return state

    first, second = (tensors(folder) for folder in sys.argv[1:3])
    names = first.keys() & second.keys()
    only_one = sorted(first.keys() ^ second.keys())
    differing = sorted(name for name in names if not torch.equal(first[name], second[name]))
    moments = [name for name in names if "exp_avg" in name]
    assert not only_one, f"only in one checkpoint: {only_one}"
    assert not differing, f"differ: {differing}"
    print(f"equal tensors: {len(names)}, of them optimizer moments: {len(moments)}")


if __name__ == "__main__":
    main()
