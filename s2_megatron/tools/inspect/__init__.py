"""`s2-megatron inspect`: what a sparsity YAML means for a model, and what its training will take and hold."""
