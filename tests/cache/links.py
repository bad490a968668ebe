"""A link that answers when it is told to, wrongly or never, so that tests see every moment."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flowkv import KV, Geometry, Step, kernels
from flowkv.testing import MemoryTier
from flowkv.tiers import Completion, Load, Outcome
from tests.inside import as_slots

from . import toy
from .fakes import Wrapped


class Trouble(NamedTuple):
    """How often a load goes wrong; probabilities."""

    miss: float = 0.0
    damage: float = 0.0
    fail: float = 0.0
    hang: float = 0.0


NO_TROUBLE = Trouble()


class Link(Wrapped):
    """A tier whose loads are carried out one by one, in order, each poll a few.

    Args:
        per_poll: Loads that each poll carries out; 0 for none until `work`.
        trouble: What goes wrong.
        seed: Of what goes wrong.
    """

    def __init__(
        self, *, per_poll: int = 1, trouble: Trouble = NO_TROUBLE, seed: int = 0, name: str = "link"
    ) -> None:
        super().__init__(MemoryTier(name=name), kind="disk")
        self.per_poll, self.trouble, self.random = per_poll, trouble, random.Random(seed)
        self.asked: list[Load] = []
        self.carried: list[Load] = []
        self._waiting: list[tuple[int, int, Load]] = []
        self._hung: list[tuple[int, int, Load]] = []
        self._ready: list[Completion] = []
        self._jobs = 0

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        self._jobs -= 1
        self.asked += items
        self._waiting += [(self._jobs, index, item) for index, item in enumerate(items)]
        return self._jobs

    def work(self, count: int = 1) -> None:
        for job, index, item in self._waiting[:count]:
            self._carry_out(job, index, item)
        del self._waiting[:count]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def release(self) -> None:
        """What hung is carried out at last, into memory that nobody may use by now."""
        for job, index, item in self._hung:
            item.target.cast("B")[:] = b"\xee" * item.target.nbytes
            self._ready.append(Completion(job, index, item.key, Outcome.MISS))
        self._hung = []

    def _carry_out(self, job: int, index: int, item: Load) -> None:
        dice, trouble = self.random.random(), self.trouble
        self.carried.append(item)
        item.target.cast("B")[:] = b"\xee" * item.target.nbytes  # undefined unless it is a hit
        if dice < trouble.hang:
            self._hung.append((job, index, item))
            return
        dice -= trouble.hang
        if dice < trouble.fail:
            answer = Completion(0, 0, item.key, Outcome.FAILED, "injected")
        elif dice < trouble.fail + trouble.miss:
            self.inner.delete([item.key])
            answer = Completion(0, 0, item.key, Outcome.MISS)
        elif dice < trouble.fail + trouble.miss + trouble.damage:
            self.inner.delete([item.key])
            answer = Completion(0, 0, item.key, Outcome.MISS, "digest")
        else:
            self.inner.submit_load([item])
            (answer,) = self.inner.poll(0.0)
        self._ready.append(answer._replace(job=job, item=index))

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        self.work(self.per_poll)
        ready, self._ready = self._ready, []
        return ready + self.inner.poll(0.0)

    def cancel(self, job: int) -> None:
        mine = [one for one in self._waiting if one[0] == job]
        self._waiting = [one for one in self._waiting if one[0] != job]
        for _, index, item in mine:
            answer = Completion(job, index, item.key, Outcome.FAILED, "cancelled")
            self._ready.append(answer)


def evict(kv: KV, keep: int = 0) -> None:
    """Takes pages that nobody uses off their device, but for the first few of each group."""
    assert kv.planner is not None and kv.flush()
    store = kv.planner.store
    seen: dict[int, int] = {}
    store.tails.drop()
    for block in list(store.index):
        if block.kind == "page" and block.page >= 0 and not block.holds:
            seen[block.group] = seen.get(block.group, 0) + 1
            if seen[block.group] > keep:
                store.device_places[store.devices[block.group]].policy.remove(
                    as_slots([block.slot])
                )
                store.eviction.leave([block], "space")


def forward(step: Step, within: float = 0.0) -> int:
    """The toy model, layer by layer; whatever a layer may attend to is what it should be."""
    shape = step.seqs[0].planner.geometry
    for layer in sorted(layer for group in shape.groups for layer in group.layers):
        g, _ = shape.locate(layer)
        parts, known = [], []
        for seq, tokens in zip(step.seqs, texts(step), strict=True):
            known.append(tokens)
            parts.append(toy.keys_values(shape, layer, known[-1], seq.length))
        k, v = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        kernels.append(k, v, step.pages(layer), step.batch(g))
        step.appended(layer)
        _look(step, shape, layer, known, within)
    return int(step.counts.sum())


def texts(step: Step) -> list[list[int]]:
    """The tokens of each row up to the end of a step, some of which the step alone may know."""
    found = []
    for seq, count, first in zip(step.seqs, step.counts, step.advance.starts, strict=False):
        known = seq.tokens[: seq.length + count].tolist()
        if len(known) < seq.length + count:
            assert step.tokens is not None and len(known) == seq.length
            known += step.tokens[0, first : first + count].tolist()
        found.append(known)
    return found


def _look(step: Step, shape: Geometry, layer: int, known: list[list[int]], within: float) -> None:
    g, _ = shape.locate(layer)
    window = shape.groups[g].window
    longest = max(map(len, known))
    found = kernels.gather_dense(step.pages(layer), step.batch(g), longest)
    for b, (seq, tokens) in enumerate(zip(step.seqs, known, strict=True)):
        first = 0 if window is None else max(0, seq.length - window + 1)
        wanted = toy.keys_values(shape, layer, tokens, first)
        for got, want in zip(found, wanted, strict=True):
            mine = got[b].transpose(0, 1)[longest - len(tokens) + first :]  # right-aligned
            worst = float((mine - want).abs().max())
            assert worst <= within, f"layer {layer} attends to what is wrong by {worst}"
