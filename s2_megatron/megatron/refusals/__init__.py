"""What S2-Attention refuses of Megatron's command line, each refusal with the flag to change.

A new refusal goes into the tuple of its topic: model.py (which Megatron, which model, which layer spec), attention.py
(what attention computes), parallel.py (how the model is spread over ranks), execution.py (CUDA graphs, recomputation,
inference, checkpoints), unproven.py (what failed on a GPU, or has not been run there), flags.py (what
`s2-megatron inspect` refuses, too). What depends on the sparsity of the layers goes into sparsity.py. table.py has them
all. A test compares it and the settings that are honoured (tests/megatron/decided.py) with Megatron's own parser: every
attention flag of a new Megatron has to be decided.
"""
