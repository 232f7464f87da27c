"""Models between Megatron's checkpoints and Hugging Face folders: `s2-megatron export-hf` and `import-hf`."""
