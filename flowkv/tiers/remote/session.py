"""A client of Mooncake Store and the memory registered with it: they live and die together."""

from __future__ import annotations

import errno
import threading
import time
from typing import Any

from flowkv.tiers.io.staging import Arena, Slot


class Session:
    """One client of the store, and the memory that is registered with it.

    Args:
        client: Set up.
        n_bytes: Size of the memory.

    Attributes:
        users: Calls under way; the session is not closed before they have returned.

    Raises:
        ConnectionError: The memory could not be registered.
    """

    def __init__(self, client: Any, n_bytes: int) -> None:
        self.client, self.arena, self.users = client, Arena(n_bytes), 0
        self._settled = threading.Condition()
        self._retired: list[Slot] = []
        if code := client.register_buffer(self.arena.address, self.arena.n_bytes):
            raise ConnectionError(f"the memory could not be registered (code {code})")

    def take(self, n_bytes: int, timeout_s: float) -> Slot:
        """A slot of the registered memory, when there is room for it.

        Raises:
            PermissionError: So much will never fit.
            TimeoutError: There was no room in time.
        """
        if n_bytes > self.arena.n_bytes:
            raise PermissionError(errno.EFBIG, "the frame is larger than the registered memory")
        end_s = time.monotonic() + timeout_s
        with self._settled:
            while (slot := self.arena.take(n_bytes)) is None:
                if not self._settled.wait(max(0.0, end_s - time.monotonic())):
                    raise TimeoutError("the registered memory is in use; raise buffer= in the URI")
        return slot

    def settle(self, slot: Slot, ended: bool) -> None:
        """Frees a slot, or retires it: bytes may still be moving."""
        with self._settled:
            if ended:
                self.arena.give_back(slot)
            else:
                self.arena.retire(slot)
                self._retired.append(slot)
            self._settled.notify_all()

    def close(self) -> None:
        """Tears the client down: after that nothing moves any more, and all memory is free."""
        self.client.close()
        self.client = None
        for slot in self._retired:
            self.arena.revive(slot)
        self.arena.close()
