"""Calls that may hang, made on a thread of their own, and waited for no longer than agreed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Aside:
    """Runs calls on threads of their own; few may hang at a time, further ones are refused.

    Args:
        name: Of the threads.
        most: Calls that may be under way, those that nobody waits for any more among them.
    """

    def __init__(self, name: str, most: int = 4) -> None:
        self._name, self._free = name, threading.Semaphore(most)

    def call(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """The result of `work`.

        Raises:
            TimeoutError: It takes longer, or too many calls hang.
            OSError: As `work` does.
        """
        if not self._free.acquire(blocking=False):
            raise TimeoutError("earlier calls to the engine still hang")
        task = _Task(work, self._free)
        threading.Thread(target=task.run, name=f"flowkv {self._name}", daemon=True).start()
        return task.result(timeout_s)


class _Task(Generic[Result]):
    def __init__(self, work: Callable[[], Result], free: threading.Semaphore) -> None:
        self._work, self._free, self._ended = work, free, threading.Event()
        self._result: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:  # handed to whoever waits
            self._error = error
        finally:
            self._free.release()
            self._ended.set()

    def result(self, timeout_s: float) -> Result:
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"the engine did not answer within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._result[0]


class Event:
    """Something that happens once, and its end; `wait` is that of `threading.Event`."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.error: OSError | None = None
        self.wait = self._ended.wait

    def run(self, work: Callable[[], None]) -> bool:
        """Does it; whether it worked. What went wrong is then `error`."""
        try:
            work()
        except OSError as error:
            self.error = error
        finally:
            self._ended.set()
        return self.error is None
