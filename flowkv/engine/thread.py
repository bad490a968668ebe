"""Who runs an engine: a thread of its own, stopped before the interpreter goes, or a caller."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Sequence as Items

from flowkv.engine.answer import Answer
from flowkv.engine.loop import Loop

_started: weakref.WeakKeyDictionary[Loop, threading.Thread] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_log = logging.getLogger("flowkv")


def start(loop: Loop) -> threading.Thread:
    """Runs a loop on a thread of its own.

    It ends once the loop's inbox is closed and all is answered. At the end of the process, what is
    under way is called off: a thread within a model must not outlive the interpreter.
    """
    thread = threading.Thread(target=_serve, args=(loop,), name="flowkv-engine", daemon=True)
    with _lock:
        if not _started:
            atexit.unregister(_stop)
            atexit.register(_stop)
        _started[loop] = thread
    thread.start()
    return thread


def _serve(loop: Loop) -> None:
    with loop.drive:
        loop.driver = threading.get_ident()
        try:
            while not loop.idle or loop.inbox.wait():
                loop.turn()
        except BaseException as error:
            _log.exception("an engine failed")
            loop.fail(error)
        finally:
            loop.driver = 0


def drive_until(loop: Loop, answers: Items[Answer]) -> None:
    """Runs turns on this thread, which holds `loop.drive`, until answers are made."""
    loop.driver = threading.get_ident()
    try:
        for answer in answers:
            while not answer.done():
                loop.turn()
    except Exception as error:
        loop.fail(error)
    except BaseException:  # by the user, anywhere in a turn
        loop.reset(answers)
        raise
    finally:
        loop.driver = 0


def _stop() -> None:
    mine = [(loop, thread) for loop, thread in _started.items() if loop.pid == os.getpid()]
    for loop, _ in mine:
        loop.inbox.close(now=True)
    for _, thread in mine:
        thread.join()
