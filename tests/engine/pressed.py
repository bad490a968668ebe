"""An engine over a model made of arithmetic, driven turn by turn, that can be put under pressure.

The model checks every page that it reads (`links.forward`), and its next token is a hash of all
tokens before it, so that anything wrong shows at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any

import torch

from flowkv import KV, Engine, Step
from flowkv.policy.scheduling import ASIDE, COMING, OVER, RUNNING, WAITING
from tests.inside import PackedRunner, RunningRequest, make_request

from ..cache.audit import audit
from ..cache.links import forward, texts
from ..cache.toy import history

VOCABULARY, STOP = 11, 10


def next_token(known: Items[int]) -> int:
    """What the model says behind some tokens."""
    return int(history(known)[-1] >> 7) % VOCABULARY


def made(prompt: Items[int], limit: int) -> list[int]:
    """The new tokens of a request that is left in peace."""
    known = list(prompt)
    while len(known) < len(prompt) + limit and known[len(prompt) :][-1:] != [STOP]:
        known.append(next_token(known))
    return known[len(prompt) :]


class Model:
    """The model as a forward, and what is wrong with it.

    Attributes:
        steps: Forwards so far.
        poison: A prompt that begins with this token fails whatever step it is in.
        fail: Forwards that are still to fail, whoever is in them.
        rows: Rows of each forward.
    """

    def __init__(self, within: float = 0.0) -> None:
        self.steps, self.fail, self.poison, self.within = 0, 0, -1, within
        self.rows: list[int] = []

    def __call__(self, step: Step, last: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.rows.append(len(step.seqs))
        forward(step, self.within)
        if self.fail:
            self.fail -= 1
            raise ZeroDivisionError("a step failed")
        logits = torch.zeros(len(step.seqs), VOCABULARY)
        for b, known in enumerate(texts(step)):
            if known[0] == self.poison:
                raise ArithmeticError("a request is poison")
            logits[b, next_token(known)] = 1.0
        return logits


class Pressed:
    """An engine whose turns are taken by hand.

    Args:
        kv: Its cache.
        within: See `links.forward`.
        **settings: Of the engine.
    """

    def __init__(self, kv: KV, within: float = 0.0, **settings: Any) -> None:
        self.kv, self.model = kv, Model(within)
        settings = {"max_rows": 4, "token_budget": 24, "patience_s": 0.0} | settings
        self.engine = Engine(self.model, kv, runner=PackedRunner(kv, self.model), **settings)
        self.loop = self.engine._loop
        self.keeper = self.loop.keeper

    def submit(self, prompt: Items[int], limit: int = 8, **fields: Any) -> RunningRequest:
        fields = {"max_new_tokens": limit, "options": {"eos_token_id": STOP}} | fields
        return self.engine._hand_in(make_request(list(prompt), fields), limited=True)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.turn()

    def run(self, most: int = 3000) -> int:
        """Turns until nothing is under way; returns how many that took."""
        for count in range(most):
            if self.loop.idle and not self.loop.inbox.pending:
                return count
            self.loop.turn()
        raise AssertionError(f"nothing ends: {self.loop.active} {self.loop.waiting}")

    def preempt(self, live: RunningRequest, keep: bool) -> None:
        self.loop._leave(live, keep, time.perf_counter())

    def finish(self) -> None:
        """Ends it, and sees that nothing is left."""
        self.engine.close(drain=False)
        check_idle(self)

    def audit(self) -> None:
        """What the engine believes is what the cache says."""
        audit(self.kv)
        loop = self.loop
        lives = [*loop.active, *loop.waiting]
        assert {live.number for live in lives} == set(loop._lives)
        assert len(set(map(id, lives))) == len(lives)
        for live in loop.active:
            assert live.state in (COMING, RUNNING) and live.row is not None
            seq = live.row.seq
            if live.state == RUNNING:
                assert seq.restoration is None
                assert live.ready == seq.length < live.prompt + live.made
            assert seq.tokens[: live.prompt].tolist() == live.begin.tolist()
        for live in loop.waiting:
            assert live.state in (WAITING, ASIDE)
            assert (live.row is None) == (live.state == WAITING)
            assert live.pages == 0
        assert all(live.state != OVER for live in lives)
        assert set(self.keeper._counted) <= set(loop.active)
        waits = self.keeper.coming._waits
        assert set(waits) == {live for live in loop.active if live.state == COMING}
        # Others of the cache are held up only while something comes for the engine.
        assert waits or self.kv.restores._allowance_s == math.inf
        self._audit_queue(lives)

    def _audit_queue(self, lives: list[RunningRequest]) -> None:
        ahead = self.keeper.ahead
        queued = {live for live in lives if live.queued is not None}
        assert ahead._queued == queued
        assert all(live.state == WAITING for live in queued)
        handles = [one for waiting in self.kv.queue._waiting.values() for one in waiting]
        assert {id(one) for one in handles} <= {id(live.queued) for live in queued}
        assert set(ahead._probes) <= set(lives)


def check_idle(pressed: Pressed) -> None:
    """No sequence is open, no byte is kept for one, nobody waits."""
    kv = pressed.kv
    assert not kv._open and kv.planner.aside_bytes == 0
    assert not kv.queue._waiting
    keeper = pressed.keeper
    assert not keeper.coming._waits and not keeper.ahead._queued and not keeper.ahead._probes
    kv.flush()
    audit(kv)


@contextmanager
def pressed(kv: KV, within: float = 0.0, **settings: Any) -> Iterator[Pressed]:
    """An engine that is closed with its cache."""
    one = Pressed(kv, within, **settings)
    try:
        yield one
        one.finish()
    finally:
        kv.close()
