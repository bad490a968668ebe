"""The engine under a load."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

from bench.serve.served import Outcome, Served
from bench.serve.workload import Ask
from flowkv.observe.events import EngineStep

_STRANGERS = itertools.count()


class Engined:
    """An engine, asked by clients of its own.

    Args:
        engine: The engine.
        kv: Its cache.
        name: In the column `baseline`; "" for the engine itself.
        caching: Without, every request is a tenant of its own, so that it finds nobody's pages.
    """

    def __init__(self, engine: Any, kv: Any, *, name: str = "", caching: bool = True) -> None:
        self._engine, self._kv = engine, kv
        self.name, self._caching = name, caching

    def serve(self, asks: Sequence[Ask], clients: int) -> Outcome:
        load = _Clients(self._engine, asks, caching=self._caching)
        pages = _Pages()
        following = self._kv.bus.subscribe(pages, EngineStep)
        try:
            served = load.run(clients)
        finally:
            following.close()
        return Outcome(served, pages.share)

    def among_strangers(self, name: str) -> Engined:
        """The same engine, asked by tenants who find nobody's pages."""
        return Engined(self._engine, self._kv, name=name, caching=False)

    def close(self) -> None:
        """Belongs to whoever made the engine."""


class _Pages:
    """Share of the pages that anybody holds, by the steps' own events."""

    def __init__(self) -> None:
        self._held = self._all = 0

    def __call__(self, step: EngineStep) -> None:
        self._held, self._all = self._held + step.pages, self._all + step.total_pages

    @property
    def share(self) -> float | None:
        return self._held / self._all if self._all else None


class _Clients:
    """Clients of a load: each asks anew once it is answered, or all ask when it is time."""

    def __init__(self, engine: Any, asks: Sequence[Ask], *, caching: bool) -> None:
        self._engine, self._asks, self._caching = engine, asks, caching
        self._answers: list[Any] = [None] * len(asks)
        self._times = [0.0] * len(asks)
        self._coming = iter(range(len(asks)))
        self._lock = threading.Lock()
        self._over = threading.Semaphore(0)
        self._failed: list[BaseException] = []

    def run(self, clients: int) -> list[Served]:
        began_s, closed = time.perf_counter(), not any(ask.at_s for ask in self._asks)
        if closed:
            for _ in range(min(clients, len(self._asks))):
                self._next()
        else:
            for ask in self._asks:
                time.sleep(max(0.0, began_s + ask.at_s - time.perf_counter()))
                self._next(follow=False)
        for _ in self._asks:
            self._over.acquire()
            if self._failed:
                raise self._failed[0]
        return [self._served(number) for number in range(len(self._asks))]

    def _next(self, *, follow: bool = True) -> None:
        with self._lock:
            number = next(self._coming, None)
        if number is None:
            return
        ask = self._asks[number]
        tenant = None if self._caching else f"stranger {next(_STRANGERS)}"
        self._times[number] = time.perf_counter()
        answer = self._engine.submit(
            ask.prompt, max_new_tokens=ask.new_tokens, priority=ask.priority, tenant=tenant
        )
        self._answers[number] = answer
        answer.add_done_callback(lambda _: self._done(follow))

    def _done(self, follow: bool) -> None:
        try:
            if follow:
                self._next()
        except BaseException as error:
            self._failed.append(error)
        finally:
            self._over.release()

    def _served(self, number: int) -> Served:
        done, sent_s = self._answers[number].result(), self._times[number]
        first_s = sent_s + done.ttft_s
        return Served(
            sent_s,
            first_s,
            first_s + done.tpot_s * (len(done.tokens) - 1),
            done.tokens,
            done.reused_tokens,
            done.preempted,
            done.restore_s,
            done.exposed_s,
            done.queued_s,
        )
