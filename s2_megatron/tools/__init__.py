"""Commands around a run, behind `s2-megatron`."""
