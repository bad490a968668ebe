"""Deferral of signals while an exception of their handlers would leave a change half done.

Python runs a signal's handler in the main thread, between any two bytecodes. A handler that raises
(Ctrl-C, a timeout by SIGALRM) would leave pages in no table and rows in no step during a change of
the cache, and a lock taken for ever during its acquisition. So FlowKV installs a handler in front
of each handler that is set. The front passes the signal on, except while the main thread holds a
watched lock or runs a marked function; then it sends the signal again a moment later. Outside of
signals this costs nothing.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # importing `signal` costs 20 times as much
import _thread
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar, cast

_NAMES = "INT TERM ALRM VTALRM PROF HUP QUIT USR1 USR2 XCPU"
_SIGNALS = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES.split())
_AGAIN_S = 0.001
_MARK = "flowkv_signal"

Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")


_watched: set[weakref.ref[Any]] = set()
# A condition's lock is taken in a Python function, after which a handler could run. Python drops an
# exception that is raised in the callback of a weak reference.
_weak = weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary
_unbroken: set[CodeType] = {
    threading.Condition.__enter__.__code__,
    threading.Condition.__exit__.__code__,
    *(one for weak in _weak for one in weak.__init__.__code__.co_consts if type(one) is CodeType),
}
_waiting: set[int] = set()


def watch(lock: Any) -> None:
    """Defer signals while the main thread holds a `threading.RLock`."""
    _watched.add(weakref.ref(lock, _watched.discard))


def unbroken(function: Function) -> Function:
    """Mark a short function: signals wait until it has returned, with all that it calls."""
    _unbroken.add(function.__code__)
    return function


def waiting() -> bool:
    """Return whether a signal waits for this thread, so that a mere wait should end."""
    return bool(_waiting) and _thread.get_ident() == threading.main_thread().ident


class Setting(Generic[Value]):
    """Context manager that sets a context variable, and always restores it: `with Setting(...)`.

    Args:
        variable: The variable.
        value: Its value within.
    """

    def __init__(self, variable: ContextVar[Value], value: Value) -> None:
        self._variable, self._value = variable, value

    @unbroken
    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    @unbroken
    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # a generator may be closed in another context
            self._variable.reset(self._token)


def by_signal(error: BaseException) -> bool:
    """Return whether an exception was raised by a signal's handler, not by the interrupted code."""
    return _MARK in vars(error)


def cover() -> None:
    """Put FlowKV's handler in front of those that are set now; off the main thread, do nothing."""
    if _thread.get_ident() != threading.main_thread().ident:
        return
    for number in _SIGNALS:
        handler = _signal.getsignal(number)
        if callable(handler) and type(handler) is not _Front:
            _signal.signal(number, _Front(handler))


class _Front:
    """Handler in front of another one."""

    __slots__ = ("behind",)

    def __init__(self, behind: Callable[[int, FrameType | None], object]) -> None:
        self.behind = behind

    def __call__(self, number: int, frame: FrameType | None) -> object:
        if _busy(frame):
            _waiting.add(number)
            # The module `threading` may be in the middle of a change, too.
            _thread.start_new_thread(_again, (number,))
            return None
        _waiting.discard(number)
        try:
            return self.behind(number, frame)
        except BaseException as error:
            vars(error)[_MARK] = number
            raise


def _busy(frame: FrameType | None) -> bool:
    """Return whether the main thread holds a watched lock or runs a marked function."""
    if any(lock._is_owned() for known in list(_watched) if (lock := known()) is not None):
        return True
    while frame is not None:
        if frame.f_code in _unbroken:
            return True
        frame = frame.f_back
    return False


def _again(number: int) -> None:
    time.sleep(_AGAIN_S)
    main = cast(int, threading.main_thread().ident)
    signal.pthread_kill(main, number)  # this also wakes a thread that waits for a lock by now
