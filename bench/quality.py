"""The protocol of quality: what a codec costs in bits per byte, window by window beside raw pages.

Texts are read in steps of one page through an attached model, so that every page is full, and
encoded as the cache is told to, before the next one is read. What is scored has therefore been
predicted from encoded pages, by layers whose own keys and values came from encoded pages. The same
windows are read with raw pages; a delta is the mean of the differences within windows, which is far
narrower than the difference of the means.

One figure is not enough. *Continuation bits* notice what harms every prediction, but hardly the
loss of a far page, as most bytes are predicted from the last few dozen. *Second-copy bits* do: in a
text that is followed by its own copy, the copy is cheap only while the first one's pages are right.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from flowkv.cache.block_table import Planner
from flowkv.cache.kv import KV
from flowkv.cache.sequence import Sequence
from flowkv.core.errors import ConfigError
from flowkv.hooks.huggingface import attach

_WARM_UP_TOKENS = 8
"""At the start of a second copy nothing says yet that it is one."""

Visit = Callable[[KV, Items[Sequence], int], None]
"""Called before each step with the rows and their length: to spoil pages, which must be noticed."""


class Task(NamedTuple):
    """Texts to read, and which of their tokens count.

    Attributes:
        name: What it is called in results.
        rows: int64 `[windows, T]`, token ids.
        first: Position of the first token whose bits count; all after it do.
    """

    name: str
    rows: torch.Tensor
    first: int


class Scores(NamedTuple):
    """What a model made of a task.

    Attributes:
        bits: float64 `[windows]`: mean bits per scored token of each window.
        n_bytes: Device bytes of all windows' pages when they were read to their end, by codec.
    """

    bits: torch.Tensor
    n_bytes: dict[str, int]

    @property
    def used_bytes(self) -> int:
        """Device bytes of all pages."""
        return sum(self.n_bytes.values())


class Delta(NamedTuple):
    """A paired difference.

    Attributes:
        mean: Of the differences within windows.
        error: Two standard errors of that mean; infinite for a single window.
    """

    mean: float
    error: float

    def within(self, bound: float) -> bool:
        """Whether the difference is surely (by two standard errors) no larger than `bound`."""
        return self.mean + self.error <= bound

    def beyond(self, bound: float) -> bool:
        """Whether the difference is surely larger than `bound`."""
        return self.mean - self.error > bound


def lost_page(number: int, at: int, *, swapped: bool = False) -> Visit:
    """A page that is lost: every row reads zeros, or another row's page, in its place.

    Args:
        number: Of the page in its row; it has the same codec in all rows.
        at: Position of the step before which it is lost.
        swapped: Each row gets the page of the next one instead of zeros.
    """

    def visit(kv: KV, seqs: Items[Sequence], start: int) -> None:
        if start != at:
            return
        planner = Planner.of(seqs[0])
        for group, table in enumerate(planner.tables.pages):
            pages = [int(table[seq.row, number]) for seq in seqs]
            n_bytes = planner.store.forms[group].layout(pages[0]).page_bytes
            views = [planner.store.pool(group).page_bytes(page, n_bytes) for page in pages]
            contents = torch.stack([*views[1:], views[0]]) * swapped
            for view, content in zip(views, contents, strict=True):
                view.copy_(content)

    return visit


def windows(text: bytes, count: int, length: int) -> torch.Tensor:
    """Evenly spaced windows of a text, int64 `[count, length]`, one id per byte.

    Raises:
        ConfigError: The text is shorter than a window.
    """
    if len(text) < length or count < 1:
        raise ConfigError(
            f"{count} windows of {length} bytes from a text of {len(text)}",
            "Give a longer text, or ask for shorter windows",
        )
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.linspace(0, len(text) - length, count, dtype=torch.float64).long().tolist()
    return torch.stack([ids[start : start + length] for start in starts]).long()


def continuation(text: bytes, count: int, *, length: int = 768, skip: int = 128) -> Task:
    """Plain text: all but the first `skip` bytes of each window count."""
    return Task("continuation", windows(text, count, length + 1), skip + 1)


def second_copy(text: bytes, count: int, *, period: int = 128, before: int = 0) -> Task:
    """Texts of `period` bytes that come twice; the second time counts.

    Args:
        text: What windows are cut from.
        count: How many.
        period: Bytes of the text that is repeated: how far back the second copy has to look.
        before: Bytes of the text's own past that are read ahead of it.
    """
    rows = windows(text, count, before + period)
    rows = torch.cat([rows, rows[:, before:]], 1)
    return Task(f"second copy after {period}", rows, before + period + _WARM_UP_TOKENS)


def score(model: Any, kv: KV, task: Task, *, batch: int = 16, visit: Visit | None = None) -> Scores:
    """Reads a task through a cache.

    Args:
        model: A causal language model.
        kv: The cache that is attached to it. Everything it knows is forgotten.
        task: What to read.
        batch: Windows a forward.
        visit: See `Visit`.

    Raises:
        ConfigError: What is scored does not begin at or after the second page, or the cache does
            not serve the model.
    """
    size = kv.page_size
    if task.first < size:
        raise ConfigError(
            f"tokens from {task.first} on are scored with pages of {size}",
            "Score what follows the first page",
        )
    if kv.geometry is None:
        raise ConfigError(
            "the cache does not serve the model", "See the warning that attach() gave"
        )
    parts, used = [], Counter[str]()
    for rows in torch.split(task.rows, batch):
        kv.invalidate()
        cache = kv.cache(rows[:, :-1].to(model.device))
        bits = _read(model, kv, cache, rows, visit)
        parts.append(bits[:, task.first - 1 :].double().mean(1))
        for device in kv.stats()["devices"].values():
            used.update(device["codecs"])
        del cache
    return Scores(torch.cat(parts), dict(used))


@torch.no_grad()
def _read(model: Any, kv: KV, cache: Any, rows: torch.Tensor, visit: Visit | None) -> torch.Tensor:
    """Bits of each token but the first, `[B, T - 1]`."""
    ids, parts = rows[:, :-1].to(model.device), []
    for start in range(0, ids.shape[1], kv.page_size):
        if visit is not None:
            visit(kv, cache.rows.seqs, start)
        here = slice(start, start + kv.page_size)
        logits = model(ids[:, here], past_key_values=cache).logits.float()
        wanted = rows[:, 1:][:, here].to(logits.device)
        parts.append(functional.cross_entropy(logits.mT, wanted, reduction="none"))
    return torch.cat(parts, 1).cpu() / math.log(2)


def measure(
    model: Any, task: Task, *, batch: int = 16, visit: Visit | None = None, **fields: Any
) -> Scores:
    """Attaches a cache of its own to the model, reads a task through it, and takes it off again.

    Args:
        model: A causal language model without a cache.
        task: What to read.
        batch: Windows a forward.
        visit: See `Visit`.
        **fields: Of the cache's configuration: codec, page_size, gpu, ...
    """
    kv = attach(model, write_back=False, **fields)
    try:
        return score(model, kv, task, batch=batch, visit=visit)
    finally:
        kv.close()


def delta(scores: Scores, raw: Scores) -> Delta:
    """How many more bits than with raw pages, over the same windows.

    Raises:
        ConfigError: The numbers of windows differ.
    """
    if scores.bits.shape != raw.bits.shape:
        raise ConfigError(
            f"{len(scores.bits)} windows beside {len(raw.bits)}", "Compare the same windows"
        )
    extra = scores.bits - raw.bits
    spread = extra.std().item() if len(extra) > 1 else math.inf
    return Delta(extra.mean().item(), 2 * spread / math.sqrt(len(extra)))
