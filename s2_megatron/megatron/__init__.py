"""S2-Attention inside Megatron-core: flags, refusals, layer specs, the core-attention module, data, accounting."""
