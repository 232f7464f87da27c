"""Which key block each head attends: ranges of strides and block masks. NumPy only."""
