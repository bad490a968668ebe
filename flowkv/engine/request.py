"""Requests of an engine, their answers and completions."""

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
from flowkv.core import interrupts
from flowkv.core.errors import ConfigError, StateError
from flowkv.core.keys import Salt
from flowkv.policy.base import Lease, Retain

Reason = Literal["stop", "length", "cancelled", "deadline"]
"""Why a request ended: a stop token, `max_new_tokens`, a cancellation, or its deadline."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompt that an engine continues, with its limits and sampling options.

    Attributes:
        prompt: Token ids.
        max_new_tokens: Most new tokens, at least 1.
        priority: Larger is more urgent; read by `scheduler="priority"`.
        deadline_s: Seconds after submission at which the request ends with the tokens it has.
        seed: Seed of sampling, on which draws depend alone; None takes one from the engine.
        options: Options of sampling, as the model's `generate` takes them (`do_sample`,
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
    """Result of a request: its new tokens and its timings.

    Attributes:
        tokens: The new tokens.
        reason: Why it ended.
        prompt_tokens: Tokens of its prompt.
        reused_tokens: Tokens of its prompt that were not computed.
        queued_s: Time from submission to the first admission.
        ttft_s: Time from submission to the first new token; 0.0 if there was none.
        tpot_s: Mean time of a further token; 0.0 if there was none.
        seconds: Time from submission to the end.
        preempted: Number of preemptions.
        restore_s: Duration of the restore of its prefix, from the begin of the wait to its end.
        exposed_s: Part of `restore_s` in which none of the request's tokens were computed.
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


# The answer that `submit` returns: a future of the completion, which streams its tokens.

_log = logging.getLogger("flowkv")


class AnswerSource:
    """Connection of answers to their engine.

    Args:
        call_off: Cancels the request with a given number; returns at once.

    Attributes:
        driver: Identity of the thread that runs the model; 0 while none does.
        pid: The process of the engine.
    """

    def __init__(self, call_off: Callable[[int], None]) -> None:
        self.call_off, self.driver, self.pid = call_off, 0, os.getpid()


_OVER = AnswerSource(lambda number: None)
"""Source of finished answers: there is no request to cancel."""


class Answer(Future[Completion]):
    """Future of a request's completion. Thread-safe.

    An answer is a `concurrent.futures.Future` that can be awaited and iterated: `for token in
    answer` and `async for token in answer` yield its tokens as they come, from the first one on,
    any number of times. A request that was cancelled or ran past its deadline has a result like
    others, with that reason; a failed request raises.

    Callbacks run on the engine's thread: they should be quick, and cannot wait for answers.

    Args:
        desk: Its engine.
        number: Number of its request, unique in the process.
    """

    def __init__(self, desk: AnswerSource, number: int) -> None:
        super().__init__()
        self._desk, self.number = desk, number
        self._made: list[int] = []
        # Waiters for the next token; the tuple is replaced whole, so the engine needs no lock.
        self._ears: tuple[_Ear, ...] = ()
        self._ears_lock = threading.Lock()
        self.set_running_or_notify_cancel()

    @property
    def tokens(self) -> list[int]:
        """Return a copy of the new tokens so far."""
        return self._made.copy()

    def cancel(self) -> bool:
        """Cancel the request in any state; return False if it is over.

        A step that is under way ends first. The result then has the reason "cancelled", and the
        tokens made until then.
        """
        if self.done():
            return False
        self._desk.call_off(self.number)
        return True

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the completion; return it.

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
        """Wait for the end; return the error that the request failed with, or None.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            StateError: Called by the thread that would have to make it.
            TimeoutError: It took longer.
        """
        self._may_wait()
        return super().exception(timeout)

    def _may_wait(self) -> None:
        desk = self._desk  # read first: `settle` replaces it
        if self.done():
            return
        if desk.pid != os.getpid():
            raise StateError(
                "the answer is made in the parent process", "Wait for it there, or submit it again"
            )
        if desk.driver == threading.get_ident():
            raise StateError(
                "the engine's own thread cannot wait for an answer",
                "Use add_done_callback there, or wait in another thread",
            )

    # ---- tokens as they come

    def __iter__(self) -> Iterator[int]:
        heard = threading.Semaphore(0)
        for token in self._stream(_Ear(heard.release)):
            if token is None:
                self._may_wait()
                heard.acquire()
            else:
                yield token

    async def __aiter__(self) -> AsyncIterator[int]:
        heard = asyncio.Event()
        for token in self._stream(_Ear(heard.set, asyncio.get_running_loop())):
            if token is None:
                await heard.wait()
                heard.clear()
            else:
                yield token

    def _stream(self, ear: _Ear) -> Iterator[int | None]:
        """Yield the tokens, and None where the caller waits until the ear is woken."""
        at = 0
        self._listen(ear)
        try:
            while True:
                ear.told = False
                over, made = self.done(), self._made
                while at < len(made):
                    yield made[at]
                    at += 1
                if over:
                    break
                yield None
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

    # ---- called by the engine

    @property
    def heard(self) -> bool:
        """Return whether a waiter reads tokens as they come."""
        return bool(self._ears)

    def settle(self, completion: Completion, error: BaseException | None = None) -> None:
        """Set the result or the error, once, and wake all waiters."""
        if self.done():
            return
        if isinstance(error, StopIteration) or not isinstance(error, Exception | None):
            # Event loops mishandle these: they would wait on, or end with all their tasks.
            said = f"the model, or a function of yours, raised {error!r}"
            error, cause = RuntimeError(said), error
            error.__cause__ = cause
        try:
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(completion)
        finally:
            self._desk = _OVER  # a kept answer must not keep the engine and its cache alive
            if self._ears:
                tell([self])


class _Ear:
    """Waiter for tokens of an answer.

    Args:
        wake: Wakes the waiter; runs on its event loop if it has one.
        loop: The event loop that the waiter runs on; None for a thread.
    """

    def __init__(
        self, wake: Callable[[], object], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.wake, self.loop = wake, loop
        self.told = False  # woken, and has not read the tokens yet


def tell(answers: Iterable[Answer]) -> None:
    """Wake the waiters for tokens of some answers; each event loop is called once for all."""
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
        except RuntimeError:  # the loop was closed, and no waiter is left there
            _log.debug("an event loop was closed while answers were under way")


def _wake(ears: list[_Ear]) -> None:
    for ear in ears:
        ear.wake()


def yours(error: BaseException) -> bool:
    """Return whether an exception was raised by the code itself, and not by a signal to its thread.

    Signals interrupt the main thread only: on other threads, all exceptions come from the model or
    from a function of the user's own.
    """
    if isinstance(error, Exception) or threading.current_thread() is not threading.main_thread():
        return True
    return isinstance(error, SystemExit | GeneratorExit) and not interrupts.by_signal(error)


# Checks of numbers that users pass.


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer of Python or numpy; booleans are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a number of Python or numpy; booleans are not."""
    return is_whole(value) or isinstance(value, float | np.floating)


def whole(name: str, value: Any, least: float = -math.inf) -> None:
    """Check that a value is an integer of at least `least`.

    Raises:
        ConfigError: The value is no integer, or smaller than `least`.
    """
    if not is_whole(value) or value < least:
        bound = f", at least {least}" if least > -math.inf else ""
        raise ConfigError(f"{name}={value!r}", f"Use a whole number{bound}")
