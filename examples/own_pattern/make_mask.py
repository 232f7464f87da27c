"""Writes the block mask of pattern.yaml: the first block of the sequence, the block before, the own block.

    python examples/own_pattern/make_mask.py mask.npz --blocks 16

Compressed sparse rows, one row a query block: `indices` has the key blocks of all rows one after the other, `indptr`
says where each row begins. A mask for P heads has P rows of `indptr`.
"""

import argparse

import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("file")
parser.add_argument("--blocks", type=int, required=True, help="--seq-length / block_size")
arguments = parser.parse_args()

rows = [sorted({0, max(0, query - 1), query}) for query in range(arguments.blocks)]
np.savez(arguments.file, indptr=np.cumsum([0] + [len(row) for row in rows]), indices=np.concatenate(rows))
print(f"{arguments.file}: {arguments.blocks} query blocks, {sum(map(len, rows))} blocks attended")
