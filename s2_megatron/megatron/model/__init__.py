"""What stands in Megatron's model: the core attention of S2 and of dense layers, norms, RoPE scaling, and its check."""
