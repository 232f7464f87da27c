"""S2-Attention in Megatron: sparse, sharded-context attention as a Megatron-core attention module.

Importing the package imports neither Megatron nor Triton; the modules do so when they need them.
"""
