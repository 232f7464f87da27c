"""The function of pattern.yaml."""

import numpy as np


def powers_of_two(head: int, query_block: int, key_blocks: np.ndarray) -> np.ndarray:
    """Which of the key blocks (int64 [n], none after the query block) a head attends, bool [n]: its own block and those
    1, 2, 4, ... blocks away; odd query heads those 1, 3, 9, ... blocks away."""
    base = 3 if head % 2 else 2
    distance = query_block - key_blocks
    return (distance == 0) | np.isin(distance, base ** np.arange(20))
