"""Checkpoints: which one is loaded, whether it is whole and fits the run; what is done around saving and loading."""
