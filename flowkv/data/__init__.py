"""Packaged files: a tiny, really trained model for demonstrations and tests."""

import pathlib

__all__ = ["tiny_path"]


def tiny_path() -> pathlib.Path:
    """Return the folder of the tiny byte-level Llama, in the Hugging Face format.

    The folder has `config.json`, `model.safetensors` (fp16, 1.6 MB) and `README.md`, the model
    card. Tokens are bytes, so no tokenizer is needed.

    Example:
        >>> (tiny_path() / "config.json").exists()
        True
    """
    return pathlib.Path(__file__).parent / "tiny"
