"""What concerns the machine: a CPU in the place of a GPU, processes and their end, compiled helpers."""
