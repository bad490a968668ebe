"""Requests, their answers, and what became of them."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from flowkv.cache.kv import Tokens
from flowkv.cache.sequence import Retain
from flowkv.core import interrupts
from flowkv.core.errors import ConfigError, StateError
from flowkv.core.keys import Salt
from flowkv.policy.base import Lease

Reason = Literal["stop", "length", "cancelled", "deadline"]
"""Why a completion ended: by itself; at `max_new_tokens`; called off; too late."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What an engine is asked to continue.

    Attributes:
        prompt: Token ids.
        max_new_tokens: Most new tokens, at least 1.
        priority: Larger is more urgent; read by `scheduler="priority"`.
        deadline_s: Seconds after submission at which it is of no use any more.
        seed: Of sampling; None takes one from the engine. What is drawn depends on it alone.
        options: How tokens are chosen, as `generate` of the model takes it (`do_sample`,
            `temperature`, `top_p`, `repetition_penalty`, `eos_token_id`, `stopping_criteria`, ...).
        tenant: See `KV.open`.
        session: See `KV.open`.
        lease: See `KV.open`.
        retain: See `KV.open`.
        salts: See `KV.open`.
    """

    prompt: Tokens
    max_new_tokens: int = 128
    priority: int = 0
    deadline_s: float | None = None
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    tenant: str | None = None
    session: str | int | None = None
    lease: str | Lease = ""
    retain: tuple[Retain, ...] = ()
    salts: tuple[Salt, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What became of a request.

    Attributes:
        tokens: The new tokens.
        reason: Why it ended.
        prompt_tokens: Tokens of its prompt.
        reused_tokens: Those of them that were not computed.
        queued_s: From submission until it was first admitted.
        ttft_s: From submission to the first new token; 0.0 if there was none.
        tpot_s: Mean time of a further token; 0.0 if there was none.
        seconds: From submission to the end.
        preempted: How often it made room for others.
        restore_s: From the beginning of the load of its prefix to its end.
        exposed_s: The part of that in which nothing of it was computed.
    """

    tokens: list[int]
    reason: Reason
    prompt_tokens: int
    reused_tokens: int = 0
    queued_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    seconds: float = 0.0
    preempted: int = 0
    restore_s: float = 0.0
    exposed_s: float = 0.0


# What `submit` returns: a future of the completion, and its tokens as they come.

_log = logging.getLogger("flowkv")


class AnswerSource:
    """What answers need of an engine.

    Args:
        call_off: Cancels the request of a number; returns at once.

    Attributes:
        driver: Identity of the thread that runs the model; 0 while none does.
        pid: The process that it works in.
    """

    def __init__(self, call_off: Callable[[int], None]) -> None:
        self.call_off, self.driver, self.pid = call_off, 0, os.getpid()


_OVER = AnswerSource(lambda number: None)
"""Of answers that are given: there is nothing to call off."""


class Answer(Future[Completion]):
    """A request's completion, some day. Thread-safe.

    It is a `concurrent.futures.Future`, it can be awaited, and iterated: `for token in answer` and
    `async for token in answer` give its tokens as they come, from the first one on, any number of
    times. A request that was called off or came too late has a result like others, which says so;
    one that failed raises.

    Callbacks run on the engine's thread: they should be quick, and cannot wait for answers.

    Args:
        desk: Its engine.
        number: Of its request, unlike that of any other in the process.
    """

    def __init__(self, desk: AnswerSource, number: int) -> None:
        super().__init__()
        self._desk, self.number = desk, number
        self._made: list[int] = []
        # Who waits for the next token; replaced whole, so that the engine needs no lock.
        self._ears: tuple[_Ear, ...] = ()
        self._ears_lock = threading.Lock()
        self.set_running_or_notify_cancel()

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far."""
        return self._made.copy()

    def cancel(self) -> bool:
        """Calls the request off, whatever it is doing; False if it is over.

        A step that is under way ends first. The result then says "cancelled", with the tokens that
        there were.
        """
        if self.done():
            return False
        self._desk.call_off(self.number)
        return True

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the completion.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            Exception: What the request failed with.
            StateError: Called by the thread that would have to make it.
            TimeoutError: It took longer.
        """
        self._may_wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end; what the request failed with, None if it did not.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            StateError: Called by the thread that would have to make it.
            TimeoutError: It took longer.
        """
        self._may_wait()
        return super().exception(timeout)

    def _may_wait(self) -> None:
        desk = self._desk  # before: whoever gives the answer takes it away
        if self.done():
            return
        if desk.pid != os.getpid():
            raise StateError(
                "the answer is made in the parent process", "Wait for it there, or submit anew"
            )
        if desk.driver == threading.get_ident():
            raise StateError(
                "the engine's own thread cannot wait for an answer",
                "Use add_done_callback there, or wait in another thread",
            )

    # ---- tokens as they come

    def __iter__(self) -> Iterator[int]:
        heard = threading.Semaphore(0)
        ear, at = _Ear(heard.release), 0
        self._listen(ear)
        try:
            while True:
                over, made = self.done(), self._made
                while at < len(made):
                    yield made[at]
                    at += 1
                if over:
                    break
                self._may_wait()
                heard.acquire()
                ear.told = False
        finally:
            self._leave(ear)
        if (error := super().exception()) is not None:
            raise error

    async def __aiter__(self) -> AsyncIterator[int]:
        heard = asyncio.Event()
        ear, at = _Ear(heard.set, asyncio.get_running_loop()), 0
        self._listen(ear)
        try:
            while True:
                heard.clear()
                ear.told = False
                over, made = self.done(), self._made
                while at < len(made):
                    yield made[at]
                    at += 1
                if over:
                    break
                await heard.wait()
        finally:
            self._leave(ear)
        if (error := super().exception()) is not None:
            raise error

    def __await__(self) -> Generator[Any, None, Completion]:
        return asyncio.wrap_future(self).__await__()

    def _listen(self, ear: _Ear) -> None:
        with self._ears_lock:
            self._ears = (*self._ears, ear)

    def _leave(self, ear: _Ear) -> None:
        with self._ears_lock:
            self._ears = tuple(other for other in self._ears if other is not ear)

    # ---- of the engine

    @property
    def heard(self) -> bool:
        """Whether anybody waits for tokens."""
        return bool(self._ears)

    def settle(self, completion: Completion, error: BaseException | None = None) -> None:
        """Ends it, once, and wakes whoever waits."""
        if self.done():
            return
        if isinstance(error, StopIteration) or not isinstance(error, Exception | None):
            # No event loop lets these pass: it would wait on, or end with all its tasks.
            said = f"the model, or a function of yours, raised {error!r}"
            error, cause = RuntimeError(said), error
            error.__cause__ = cause
        try:
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(completion)
        finally:
            self._desk = _OVER  # who keeps an answer keeps no engine, and no cache
            if self._ears:
                tell([self])


class _Ear:
    """One who waits for tokens.

    Args:
        wake: Wakes it, on its event loop if it has one.
        loop: Where it waits.
    """

    __slots__ = ("loop", "told", "wake")

    def __init__(
        self, wake: Callable[[], object], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.wake, self.loop = wake, loop
        self.told = False  # it was woken, and has not looked yet


def tell(answers: Iterable[Answer]) -> None:
    """Wakes those who wait for the next token; each event loop is called once for all of them."""
    loops: dict[asyncio.AbstractEventLoop, list[_Ear]] = {}
    for answer in answers:
        for ear in answer._ears:
            if ear.told:
                continue
            ear.told = True
            if ear.loop is None:
                ear.wake()
            else:
                loops.setdefault(ear.loop, []).append(ear)
    for loop, ears in loops.items():
        try:
            loop.call_soon_threadsafe(_wake, ears)
        except RuntimeError:  # it was closed: nobody waits there any more
            _log.debug("an event loop was closed while answers were under way")


def _wake(ears: list[_Ear]) -> None:
    for ear in ears:
        ear.wake()


def yours(error: BaseException) -> bool:
    """Whether an exception belongs to the code that raised it, and not to the thread it ran on.

    Signals interrupt the main thread only: elsewhere everything was raised by a model or a function
    of the user's own.
    """
    if isinstance(error, Exception) or threading.current_thread() is not threading.main_thread():
        return True
    return isinstance(error, SystemExit | GeneratorExit) and not interrupts.by_signal(error)


# Numbers that users pass: whole ones, and any.


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, of Python or numpy; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a number, of Python or numpy; True and False are none."""
    return is_whole(value) or isinstance(value, float | np.floating)


def whole(name: str, value: Any, least: float = -math.inf) -> None:
    """Checks a whole number.

    Raises:
        ConfigError: It is none, or smaller than `least`.
    """
    if not is_whole(value) or value < least:
        bound = f", at least {least}" if least > -math.inf else ""
        raise ConfigError(f"{name}={value!r}", f"Use a whole number{bound}")
