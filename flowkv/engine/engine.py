"""`Engine`: many requests at once over one model and its cache."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import wait
from functools import partial
from typing import Any

from flowkv.core.errors import ConfigError, FlowKVError, StateError
from flowkv.engine.answer import Answer
from flowkv.engine.counted import Counted
from flowkv.engine.inbox import Inbox
from flowkv.engine.intake import Intake, make_request
from flowkv.engine.keeper import Keeper
from flowkv.engine.live import Live
from flowkv.engine.loop import Loop
from flowkv.engine.request import Completion, Request
from flowkv.engine.runner import Runner
from flowkv.engine.sampling import Sampler
from flowkv.engine.served import serve
from flowkv.engine.settings import make_settings
from flowkv.engine.thread import drive_until, start
from flowkv.policy.scheduling import Limits
from flowkv.runtime.cache import KV
from flowkv.runtime.opening import Tokens


class Engine:
    """Serves many requests at once: they join and leave at every step. Thread-safe.

        with flowkv.Engine(model, kv, max_rows=16) as engine:
            for completion in engine.run(prompts):          # all of them, in order
                ...
            answer = engine.submit(prompt, max_new_tokens=64)
            for token in answer:                            # as they come; or `async for`
                ...
            answer.result()                                 # or `await answer`

    Prompts are computed in chunks beside the tokens of those who decode, packed, without padding.
    What the cache knows of a prompt is not computed again. Where device memory does not suffice,
    requests make room for others, and go on later where they were.

    The model is run by one thread: the engine's own, from the first `submit` on, or the one that
    calls `run` before that.

    Args:
        model: A Hugging Face model that is attached to `kv`; or your own, called with
            `(tokens [1, N], positions [1, N])` and returning logits `[1, N, V]`, whose attention
            calls `flowkv.attention`.
        kv: Its cache. The engine does not close it.
        runner: Runs the model in another way.
        sampler: Reads the options of requests in another way.
        **settings: See `flowkv.engine.settings.Settings`: scheduler, max_rows, token_budget, ...

    Raises:
        ConfigError: A setting is wrong, or the model is not attached to this cache.
        StateError: The cache is closed, or does not know its model.
        UnsupportedModelError: The model cannot be continued from token ids alone.
        CapacityError: The cache has no room to try how rows of the model run together.
    """

    def __init__(
        self,
        model: Any,
        kv: KV,
        *,
        runner: Runner | None = None,
        sampler: Sampler | None = None,
        **settings: Any,
    ) -> None:
        self.settings = made = make_settings(**settings)
        self.kv = kv
        served = serve(model, kv, runner, sampler, fixed=made.invariant)
        if made.max_rows > kv.config.max_rows:
            raise ConfigError(
                f"max_rows={made.max_rows} with a cache for {kv.config.max_rows} sequences",
                "Lower it, or give the cache a larger max_rows",
            )
        keeper = Keeper(kv, served.runner, made.swap_bytes)
        limits = Limits(made.max_rows, made.token_budget, kv.page_size, made.watermark)
        turns = Counted(made.order(), limits, keeper)
        self._inbox = Inbox(made.max_waiting)
        self._loop = Loop(
            *(served.runner, keeper, turns, self._inbox, kv.bus), patience_s=made.patience_s
        )
        longest = partial(keeper.longest, made.token_budget)
        self._intake = Intake(served, made, longest, self._loop)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        # What was submitted is still computed when nobody holds the engine any more.
        weakref.finalize(self, _retire, self._loop).atexit = False

    # ---- requests

    def submit(self, prompt: Tokens | Request, **fields: Any) -> Answer:
        """Hands in a request; returns at once. From any thread, event loops included.

        Args:
            prompt: Token ids, or a whole request.
            **fields: Further fields of `Request`: max_new_tokens, priority, deadline_s, options...

        Returns:
            The answer, some day: a future that can be awaited and iterated, see `Answer`.

        Raises:
            BusyError: Too many requests wait.
            CapacityError: It can never fit.
            ConfigError: A field or option of it is wrong.
            StateError: The engine is closed, or failed, or belongs to a parent process.
            TokenError: The prompt is empty, or holds what are no token ids of the model.
            UnsupportedModelError: It needs more than token ids.
        """
        live = self._hand_in(make_request(prompt, fields), limited=True)
        self._start()
        return live.answer

    def run(self, requests: Iterable[Tokens | Request], **fields: Any) -> list[Completion]:
        """Serves requests, and waits for all of them. If one is refused, none is served.

        Args:
            requests: Prompts, or whole requests; as many as there are, `max_waiting` or not.
            **fields: Fields of all of them, see `submit`.

        Returns:
            What became of them, in their order.

        Raises:
            Exception: What the first of them failed with; the others are served nevertheless.
            StateError: Called by the engine's own thread, for instance in a callback.
        """
        if self._loop.driver == threading.get_ident():
            raise StateError(
                "the engine's own thread cannot run requests", "Use submit in callbacks"
            )
        answers = self._all(requests, fields)
        try:
            self._drive(answers)
            return [answer.result() for answer in answers]
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise

    async def arun(self, requests: Iterable[Tokens | Request], **fields: Any) -> list[Completion]:
        """`run` for event loops: what it waits for, it awaits."""
        answers = self._all(requests, fields)
        self._start()
        try:
            await asyncio.gather(*map(asyncio.wrap_future, answers), return_exceptions=True)
            return [answer.result() for answer in answers]
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise

    def _hand_in(self, request: Request, *, limited: bool) -> Live:
        live = self._live(request)
        self._inbox.put(live, limited=limited)
        return live

    def _all(self, requests: Iterable[Tokens | Request], fields: dict[str, Any]) -> list[Answer]:
        """Hands in all of them, or none."""
        lives: list[Live] = []
        for place, one in enumerate(requests):
            try:
                lives.append(self._live(make_request(one, fields)))
            except FlowKVError as error:
                error.add_note(f"It is number {place} of the requests, counted from 0.")
                raise
        self._inbox.put(*lives, limited=False)
        return [live.answer for live in lives]

    def _live(self, request: Request) -> Live:
        if os.getpid() != self._loop.pid:
            raise StateError(
                "the engine belongs to the parent process", "Make another one in this process"
            )
        self._inbox.check()
        if self.kv.closed:
            raise StateError("the engine's cache is closed", "Make a new engine over an open one")
        return self._intake.take(request)

    # ---- threads

    def _drive(self, answers: list[Answer]) -> None:
        """Sees to it that answers are made: here, unless another thread does already."""
        loop = self._loop
        if self._thread is None and loop.drive.acquire(blocking=False):
            try:
                drive_until(loop, answers)
            finally:
                loop.drive.release()
            return
        self._start()
        wait(answers)

    def _start(self) -> threading.Thread:
        with self._starting:
            if self._thread is None:
                self._thread = start(self._loop)
            return self._thread

    # ---- the end

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Takes nothing any more, and ends once all is answered. Safe to call again.

        Args:
            drain: False calls off what is under way: it ends as "cancelled".
            timeout_s: Seconds after which what is still under way is called off, too.
        """
        if os.getpid() != self._loop.pid:
            return
        self._inbox.close(now=not drain)
        if self._loop.driver == threading.get_ident():
            return  # in a callback: it ends once this turn and the rest are over
        if self._thread is None and not self._loop.busy:
            return
        thread = self._start()
        thread.join(timeout_s)
        if thread.is_alive():
            self._inbox.close(now=True)
            thread.join()

    async def aclose(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """`close` for event loops."""
        await asyncio.to_thread(self.close, drain=drain, timeout_s=timeout_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.aclose(drain=kind is None)

    def __repr__(self) -> str:
        loop = self._loop
        state = "closed" if self._inbox.closed else "open"
        return f"<flowkv.Engine {state}: {len(loop.active)} rows, {len(loop.waiting)} waiting>"


def _retire(loop: Loop) -> None:
    if loop.pid == os.getpid():  # else a lock may be held by a thread that is not here
        loop.inbox.close()
