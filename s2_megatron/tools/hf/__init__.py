"""Models between Megatron's checkpoints and Hugging Face folders: `s2-megatron export-hf` and `import-hf`; and what
else reads such checkpoints without Megatron's trainer."""


def require_transformers() -> None:
    """Raises ValueError, with how to get it, when transformers is missing or too old."""
    try:
        import s2_megatron.huggingface  # noqa: F401
    except ImportError as error:
        raise ValueError(str(error)) from error
