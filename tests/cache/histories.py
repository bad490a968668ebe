"""Histories of several caches, and the answers in them that no order of operations explains.

Each page of a prompt is a register that may hold several contents at a time, as caches compute the
same page apart: a *write* adds a content, an *erase* takes all of them away, a *read* gives one
that is there, or nothing: misses are always allowed. An operation happens at one moment between its
start and its end; one that never ended, at any moment after its start or not at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from flowkv import KV, Step, kernels
from tests.cache.toy import PAGE, content

NEVER = math.inf


@dataclass(frozen=True)
class Operation:
    """What somebody did.

    Attributes:
        kind: "read", "write" or "erase".
        pages: Registers; one, unless it erases.
        value: The content read or written.
        start: When it began.
        end: When it ended; `NEVER` if nobody knows.
        who: By whom.
    """

    kind: str
    pages: frozenset[Hashable]
    value: Hashable = None
    start: float = 0.0
    end: float = NEVER
    who: str = ""


Span = tuple[float, float]
Said = tuple[float, float, str]
"""Start, end and who."""


def explain(history: Sequence[Operation]) -> list[str]:
    """What no order of operations explains; empty if there is one.

    A content that was read must have been there from its write until each of its reads. The write
    is best placed as late, reads as early as possible: between them no erase may happen. Nothing
    else ties contents together, so that each erase needs one moment, between its start and its end,
    that lies within no such time of any of its pages.
    """
    wrong, needed = list[str](), dict[Hashable, list[Span]]()
    writes = {
        (page, one.value): one for one in history if one.kind == "write" for page in one.pages
    }
    reads: dict[tuple[Hashable, Hashable], list[Operation]] = {}
    for one in history:
        if one.kind == "read" and one.value is not None:
            (page,) = one.pages
            reads.setdefault((page, one.value), []).append(one)
    for (page, value), those in reads.items():
        write = writes.get((page, value))
        first = min(one.end for one in those)
        if write is None or first < write.start:
            wrong.append(f"{value} was read of {page} before anybody wrote it")
            continue
        needed.setdefault(page, []).append((min(write.end, first), max(one.start for one in those)))
    for erase in history:
        if erase.kind != "erase" or erase.end == NEVER:
            continue
        spans = [span for page in erase.pages for span in needed.get(page, ())]
        moments = [erase.start, erase.end, *(edge for span in spans for edge in span)]
        # If any moment is free, one of these is: the times that are not are open intervals.
        free = any(
            erase.start <= moment <= erase.end
            and not any(begin < moment < end for begin, end in spans)
            for moment in moments
        )
        if not free:
            wrong.append(f"what {erase.who} erased until {erase.end:.6f} was read afterwards")
    return wrong


# ---- caches that write down what they do

PROMPTS = {name: [number] * (2 * PAGE) for number, name in enumerate("abcdef", 1)}
"""Of two full pages each; none continues another."""


def pages_of(name: str, tenant: str = "") -> frozenset[Hashable]:
    return frozenset((tenant, name, page) for page in range(2))


def everything(tenant: str | None = None) -> frozenset[Hashable]:
    tenants = ("", "alice") if tenant is None else (tenant,)
    return frozenset().union(*(pages_of(name, who) for name in PROMPTS for who in tenants))


def fill(step: Step, value: int) -> None:
    """A model that computes one number for all tokens."""
    for g, group in enumerate(step.seqs[0].planner.geometry.groups):
        for layer in group.layers:
            tokens = int(step.counts.sum())
            k = torch.full((tokens, group.kv_heads, group.head_dim), float(value))
            v = torch.full((tokens, group.kv_heads, group.value_dim), float(value))
            kernels.append(k, v, step.pages(layer), step.batch(g))


def values(kv: KV, seq: Any) -> list[int]:
    """What each full page of a sequence holds."""
    tokens = content(kv, seq, 0)[0][:, 0, 0]
    found = [tokens[at : at + PAGE] for at in range(0, len(tokens) - PAGE + 1, PAGE)]
    assert all((page == page[0]).all() for page in found), "a page is torn"
    return [int(page[0]) for page in found]


@dataclass
class Witness:
    """Has caches do things, and writes down what came of it.

    Attributes:
        history: All of it.
        numbers: Contents that nobody has used yet.
    """

    history: list[Operation] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def check(self) -> None:
        wrong = explain(self.history)
        assert not wrong, wrong

    def ask(self, kv: KV, name: str, *, tenant: str = "", who: str = "", known: bool = True) -> int:
        """A request for a prompt; returns how many of its pages needed no computing."""
        start, value = time.monotonic(), next(self.numbers)
        seq = kv.open([*PROMPTS[name], 0], tenant=tenant, reuse=known)
        try:
            end = time.monotonic()
            self.read(kv, seq, name, tenant, (start, end, who))
            have = seq.length // PAGE
            fresh = [
                Operation("write", frozenset([(tenant, name, page)]), value, start, NEVER, who)
                for page in range(have, 2)
            ]
            self.history += fresh  # first, so that they are there if this ends here
            for step in kv.prefill([seq], chunk=64):
                fill(step, value)
        finally:
            seq.close()
        for one in fresh:
            self.history[self.history.index(one)] = _ended(one)
        return have

    def read(
        self, kv: KV, seq: Any, name: str, tenant: str, said: tuple[float, float, str]
    ) -> None:
        """Writes down what a prompt was served."""
        for page, value in enumerate(values(kv, seq)[:2]):
            self.history.append(Operation("read", frozenset([(tenant, name, page)]), value, *said))

    @contextmanager
    def erases(self, pages: Collection[Hashable], who: str = "") -> Iterator[None]:
        """What is done within it erases pages, unless it raises."""
        start = time.monotonic()
        yield
        end = time.monotonic()
        self.history.append(Operation("erase", frozenset(pages), None, start, end, who))

    def forget(self, kv: KV, name: str, *, tenant: str = "", who: str = "") -> None:
        with self.erases(pages_of(name, tenant), who):
            kv.forget(PROMPTS[name], tenant=tenant)

    def forget_tenant(self, kv: KV, tenant: str, who: str = "") -> None:
        with self.erases(everything(tenant), who):
            kv.forget(tenant=tenant)

    def invalidate(self, kv: KV, who: str = "") -> None:
        with self.erases(everything(), who):
            kv.invalidate()


def _ended(one: Operation) -> Operation:
    return Operation(one.kind, one.pages, one.value, one.start, time.monotonic(), one.who)
