"""Names for an engine's bytes: its model by content, and all that decides what a frame holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from flowkv.core.errors import ConfigError
from flowkv.core.files import open_regular
from flowkv.core.keys import Namespace

_READ_BYTES = 1 << 24
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_USES = ("config.json", "*quant*.json", "params.json", "*.py")
"""What says how weights are used, beside them."""


def identify(
    model: str, made_by: Mapping[str, Any], weights: str = "", revision: str = ""
) -> tuple[bytes, bytes]:
    """Names what an engine computes with a model.

    Args:
        model: As the engine calls it: a path or a name.
        made_by: Everything but weights and tokens that decides which bytes there are; for JSON.
        weights: Names the weights; default `fingerprint(model)`.
        revision: Of the model, where that says more.

    Returns:
        A namespace of 32 bytes, and a layout of 16.

    Raises:
        ConfigError: The weights have no name.
    """
    geometry = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()
    namespace = Namespace(
        model=Path(model).name,
        revision=revision,
        weights=weights or fingerprint(model),
        geometry=geometry,
    )
    return namespace.digest(), bytes.fromhex(geometry[:32])


def fingerprint(model: str, revision: str | None = None) -> str:
    """Names a model by all bytes of its weights, configuration and code: hex.

    Args:
        model: A directory, a file, or a name whose files lie in Hugging Face's cache.
        revision: Which of those in the cache; without it there must be one alone.

    Raises:
        ConfigError: They are not on this machine, or in several revisions, so nobody can say
            which they are.
    """
    path = Path(model)
    if not path.exists():
        try:
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception as error:  # of a library that may be anything
            raise _nameless(model) from error
        if revision is None and len(list(path.parent.iterdir())) > 1:
            raise _nameless(model)
    found = [path] if path.is_file() else sorted({f for kind in _WEIGHTS for f in path.glob(kind)})
    if not found:
        raise _nameless(model)
    home = path.parent if path.is_file() else path
    found += sorted({f for kind in _USES for f in home.glob(kind)})
    digest = xxhash.xxh3_128()
    try:
        for file in found:
            digest.update(os.fsencode(f"{file.name} {file.stat().st_size} "))
            with open_regular(file) as data:
                while part := data.read(_READ_BYTES):
                    digest.update(part)
    except OSError as error:
        raise ConfigError(
            f"the weights of {model!r} cannot be read ({error})", "Correct the path of the model"
        ) from error
    return digest.hexdigest()


def _nameless(model: str) -> ConfigError:
    return ConfigError(
        f"the weights of {model!r} cannot be found, or lie here in several revisions, and its name "
        "alone does not say which they are",
        'Give its path, or set "weights" to something that changes with them, such as a commit',
    )
