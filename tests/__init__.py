"""A regular package, because a Megatron-LM checkout on PYTHONPATH has one of this name, which would hide a folder."""
