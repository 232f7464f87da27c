"""What all kernels are compiled with, so that a new default of Triton changes none of them."""

# a * b + c is computed at once and rounded once. Triton 3.10 turns that off by default.
OPTIONS = {"enable_fp_fusion": True}
