"""The trained fixture model, its text, and the two figures that show damage to its cache.

The text is the Python standard library's own source: it is there wherever Python is, and nothing
is downloaded. Files are split by a hash of their path, so that a file stays on its side whatever
other files there are.

Two figures, because one is not enough. *Validation bits* notice what harms every prediction. They
hardly notice the loss of a far page, as code is mostly predicted from the last few dozen bytes.
*Second-copy bits* do: in a text that is followed by its own copy, the second copy is cheap only as
long as the keys and values of the first are right, in the layers that copy (here the last one: a
far page lost in another layer shows in logits, not in bits).
"""

from __future__ import annotations

import functools
import hashlib
import math
import pathlib
import sysconfig
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

Logits: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A model: token ids `[B, T]` int64 to next-token logits `[B, T, 256]` of any float dtype."""

VALIDATION_PART = 20  # of 256
SEPARATOR = b"\0"  # no source file contains it, so a model can learn that a file ends
NOT_SOURCE = frozenset(
    {
        *("__pycache__", "dist-packages", "encodings", "idle_test", "idlelib", "lib2to3"),
        *("pydoc_data", "site-packages", "test", "tests"),
    }
)


class CopyBits(NamedTuple):
    """Bits per byte over a text, and over the same text when it comes again."""

    first: float
    second: float


def load_tiny(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Load the fixture model with transformers, in evaluation mode, on the CPU."""
    from transformers import AutoModelForCausalLM

    from flowkv.data import tiny_path

    return AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=dtype).eval()


@functools.cache
def corpus(split: Literal["train", "validation"]) -> bytes:
    """Return the source files of one split, sorted by path, each followed by a zero byte."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return b"".join(
        files[name].read_bytes() + SEPARATOR
        for name in sorted(files)
        if _is_source(name) and _is_validation(name) == (split == "validation")
    )


def stdlib_text(n_bytes: int) -> bytes:
    """Return the first `n_bytes` bytes of real source text that the model was not trained on.

    A zero byte ends each file, and is the model's padding id: give `generate` an attention mask,
    or it takes those bytes for padding.

    Raises:
        ValueError: The validation split is shorter.
    """
    text = corpus("validation")
    if n_bytes > len(text):
        raise ValueError(f"there are {len(text)} bytes of validation text: ask for at most those")
    return text[:n_bytes]


def validation_bits(logits: Logits, windows: int = 128, length: int = 512, batch: int = 8) -> float:
    """Return the mean bits per byte over evenly spaced windows of validation text.

    Args:
        logits: The model, called with at most `batch` rows of `length` tokens.
        windows: Number of windows; more of them take longer and narrow the estimate.
        length: Bytes predicted in a window. Longer windows give more context, hence fewer bits.
        batch: Rows a call.
    """
    rows = _windows(windows, length + 1)
    return torch.cat([_bits(logits, part) for part in rows.split(batch)]).mean().item()


def second_copy_bits(
    logits: Logits, windows: int = 128, period: int = 128, batch: int = 8
) -> CopyBits:
    """Return the bits per byte over validation texts that are followed by their own copy.

    Args:
        logits: The model, called with at most `batch` rows of `2 * period - 1` tokens.
        windows: Number of texts, evenly spaced over the validation split.
        period: Bytes in a text, at least 32: how far back the second copy has to look.
        batch: Rows a call.
    """
    # At the start of the first copy nothing says which file this is, at the start of the second
    # nothing says that it is a copy. Neither has to do with the cache.
    first_skip, second_skip = 16, 8
    rows = _windows(windows, period).repeat(1, 2)
    bits = torch.cat([_bits(logits, part) for part in rows.split(batch)])
    return CopyBits(
        first=bits[:, first_skip : period - 1].mean().item(),
        second=bits[:, period + second_skip :].mean().item(),
    )


def _is_source(name: str) -> bool:
    *folders, file = name.split("/")
    # What the build writes about itself holds paths of the machine that built this Python.
    generated = file.startswith("_sysconfigdata") or name.startswith("config-")
    return not generated and NOT_SOURCE.isdisjoint(folders)


def _is_validation(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < VALIDATION_PART


def _windows(count: int, length: int) -> torch.Tensor:
    """Cut `count` evenly spaced rows `[count, length]` out of the validation text."""
    text = torch.frombuffer(bytearray(corpus("validation")), dtype=torch.uint8)
    starts = torch.linspace(0, len(text) - length, count, dtype=torch.float64)
    return torch.stack([text[start : start + length] for start in starts.long().tolist()]).long()


@torch.no_grad()
def _bits(logits: Logits, rows: torch.Tensor) -> torch.Tensor:
    """Return what each byte but the first costs: rows `[B, T]` to bits `[B, T - 1]`."""
    scores = logits(rows[:, :-1]).float()
    return functional.cross_entropy(scores.mT, rows[:, 1:], reduction="none") / math.log(2)
