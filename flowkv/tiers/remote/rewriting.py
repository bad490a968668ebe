"""Erasure from the files of a Redis server: what was unlinked is there until they are rewritten."""

from __future__ import annotations

import time
from typing import Protocol

from flowkv.tiers.remote.resp import Reply

_PAUSE_S = 0.02


class Ask(Protocol):
    """Sends one request to one server."""

    def __call__(self, *words: bytes) -> Reply:
        """Its reply; an `OSError` if it fails or is an error."""
        ...


def rewrite(ask: Ask, end_s: float) -> None:
    """Has a server write its append-only file and its dump anew, those that it keeps.

    A rewriting that is under way may have begun before the deletion: it is waited for, not counted.

    Args:
        ask: Reaches the server.
        end_s: When to give up (`time.monotonic`).

    Raises:
        OSError: The server does not let us, failed, or took longer.
    """
    state = _idle(ask, end_s)
    if state.get("aof_enabled") == "1":
        ask(b"BGREWRITEAOF")
        if _idle(ask, end_s).get("aof_last_bgrewrite_status") != "ok":
            raise OSError("the server could not rewrite its append-only file")
    if _dumps(ask, state):
        ask(b"BGSAVE")
        if _idle(ask, end_s).get("rdb_last_bgsave_status") != "ok":
            raise OSError("the server could not write a new dump")


def _dumps(ask: Ask, state: dict[str, str]) -> bool:
    """Whether a server saves dumps by itself, did so since it was started, or came from one."""
    loaded = state.get("rdb_last_load_keys_loaded", "0")  # says Redis 7 and later
    if state.get("rdb_last_bgsave_time_sec", "-1") != "-1" or loaded != "0":
        return True
    match ask(b"CONFIG", b"GET", b"save"):
        case [_, bytes(points)]:
            return bool(points.strip())
    return False


def _idle(ask: Ask, end_s: float) -> dict[str, str]:
    """What the server says about its files, once it writes none in the background."""
    while True:
        reply = ask(b"INFO", b"persistence")
        lines = (reply if isinstance(reply, bytes) else b"").decode("ascii", "replace").split()
        state = dict(line.split(":", 1) for line in lines if ":" in line)
        busy = ("aof_rewrite_in_progress", "aof_rewrite_scheduled", "rdb_bgsave_in_progress")
        if "aof_enabled" not in state:
            raise OSError("the server does not say what it keeps in files")
        if all(state.get(name, "0") == "0" for name in busy):
            return state
        if time.monotonic() + _PAUSE_S > end_s:
            raise TimeoutError("the server is still rewriting its files")
        time.sleep(_PAUSE_S)
