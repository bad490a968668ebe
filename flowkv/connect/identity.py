"""Names for an engine's KV bytes: the model by content, and all settings that shape the bytes."""

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
"""Files beside the weights that define how they are used."""


def identify(
    model: str, made_by: Mapping[str, Any], weights: str = "", revision: str = ""
) -> tuple[bytes, bytes]:
    """Return a name for an engine's KV bytes of a model.

    Args:
        model: The engine's name of the model: a path, or a name.
        made_by: All settings but weights and tokens that the bytes depend on; serializable to JSON.
        weights: Name of the weights; default `fingerprint(model)`.
        revision: Revision of the model, if the weights alone do not identify it.

    Returns:
        A namespace of 32 bytes, and a layout of 16.

    Raises:
        ConfigError: The weights cannot be identified.
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
    """Return a digest over all bytes of a model's weights, configuration and code: hex.

    Args:
        model: A directory, a file, or a name with files in Hugging Face's cache.
        revision: The revision in that cache; without it there must be only one.

    Raises:
        ConfigError: The files are not on this machine, or there in several revisions.
    """
    path = Path(model)
    if not path.exists():
        try:
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception as error:  # the library documents no base class of its errors
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
        f"the weights of {model!r} cannot be found, or exist in several revisions, and the name "
        "alone does not identify them",
        'Pass its path, or set "weights" to a value that changes with them, such as a commit',
    )
