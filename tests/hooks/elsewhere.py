"""A process in which torch's default device is not the model's; `python -m tests.hooks.elsewhere`.

Of its own, since what it tests once ended the process.

Each argument is a case, MOMENT:WAY:MODEL: a moment (the default changes around `attach`, or later),
a way to change it, and the name of a model.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from transformers import DynamicCache

import flowkv
from tests.hooks import models

torch.set_num_threads(1)
warnings.simplefilter("ignore", DeprecationWarning)


@contextlib.contextmanager
def default() -> Iterator[None]:
    """As `torch.set_default_device` says, of this thread."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """As accelerate has once made empty weights: the whole process, whatever device is asked."""

    def elsewhere(make: Any) -> Any:
        return lambda *args, **options: make(*args, **options | {"device": "meta"})

    with contextlib.ExitStack() as stack:
        for name in ("empty", "zeros", "ones", "full"):
            stack.enter_context(patch.object(torch, name, elsewhere(getattr(torch, name))))
        yield


WAYS = {"context": lambda: torch.device("meta"), "default": default, "patched": patched}
CODECS: dict[str, Any] = {"kv8": {"codec": "kv8", "recent_tokens": 16}}


def forwards(model: Any, ids: torch.Tensor, way: Any) -> list[torch.Tensor]:
    """Logits of a prompt, of a chunk and of a token, each where `way` holds."""
    found, cache = [], DynamicCache(config=model.config)
    with torch.no_grad():
        for part in ids.split([ids.shape[1] - 34, 33, 1], 1):
            with way():
                out = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            found.append(out.logits)
    return found


def main(moment: str, name: str, which: str) -> None:
    """Every answer is the plain model's, and serving or standing aside is no error."""
    architecture, _, codec = which.partition("/")
    way, model, ids = WAYS[name], models.causal(architecture), models.prompt(90)
    wanted = forwards(copy.deepcopy(model), ids, contextlib.nullcontext)
    around, within = (way, contextlib.nullcontext) if moment == "attach" else (None, way)
    with (around or contextlib.nullcontext)():
        kv = flowkv.attach(model, gpu="4MiB", host="4MiB", page_size=16, **CODECS.get(codec, {}))
    for _ in range(2):  # the second finds the prompt's pages
        for got, plain in zip(forwards(model, ids, within), wanted, strict=True):
            assert got.device.type == "cpu"
            loose = 0.1 if codec else 1e-4
            torch.testing.assert_close(
                got, plain, rtol=loose, atol=loose * float(plain.abs().max())
            )
    print(moment, name, which, "reused", kv.stats()["tokens_reused"], flush=True)
    kv.close()


if __name__ == "__main__":
    for case in sys.argv[1:]:
        main(*case.split(":"))
