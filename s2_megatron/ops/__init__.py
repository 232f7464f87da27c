"""The attention op: its API, its autograd, the block geometry that kernels read, and the reference in PyTorch."""
