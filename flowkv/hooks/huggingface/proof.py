"""Proves pages by reading weights again: a little in every call, more while nothing runs.

A page may leave the process once a reading of all weights, begun after the page became known, has
found them as they were named. A reading that finds another content takes back what is not proven.
"""

from __future__ import annotations

import threading
import time
import weakref

from flowkv.hooks.huggingface.identity import SMALL_BYTES, Identity
from flowkv.runtime.cache import KV

_IDLE_S = 0.05
"""So long nothing has run when a model counts as idle."""
_PART_S = 0.002


class Proof:
    """Reads the weights of one model for one cache.

    Args:
        kv: Where the pages are.
        identity: Whose weights.
        lock: Held while the identity is looked at or changed; taken before the cache's.
    """

    def __init__(self, kv: KV, identity: Identity, lock: threading.RLock) -> None:
        self._kv, self._identity, self._lock = kv, identity, lock
        self._began_s = self._ended_s = time.monotonic()
        self._running = False
        self._thread: threading.Thread | None = None

    # ---- calls

    def enter(self) -> None:
        """A forward begins."""
        self._running = True

    def leave(self) -> None:
        """A forward is over."""
        self._running = False
        self._ended_s = time.monotonic()

    def read(self) -> bool:
        """Reads on, at the start of a call; False if weights are not what they were."""
        identity = self._identity
        if identity.n_bytes <= SMALL_BYTES:
            return identity.same_content()
        now_s = time.monotonic()
        seconds, self._began_s = self._ended_s - self._began_s, now_s
        return self._roll(seconds)

    def _roll(self, seconds: float) -> bool:
        weights = self._identity.weights
        if not weights.rolling:
            with self._kv.lock:
                if (planner := self._kv.planner) is not None:
                    planner.store.provisional.begin()
        passes = weights.passes
        if not self._identity.roll(max(seconds, 0.0)):
            return False
        if weights.passes > passes and not self._identity.unnamed:
            with self._kv.lock:
                if (planner := self._kv.planner) is not None and not self._kv.closed:
                    planner.store.confirm()
        return True

    # ---- what is proven

    def watch(self) -> None:
        """From now on pages are proven or not as the identity, which is new, asks for."""
        with self._kv.lock:
            if (planner := self._kv.planner) is not None:
                identity = self._identity
                proves = identity.n_bytes > SMALL_BYTES or bool(identity.unnamed)
                planner.store.provisional.active = proves

    def reject(self) -> None:
        """Weights changed: forgets what may have been computed by others than it is named after."""
        with self._kv.lock:
            if (planner := self._kv.planner) is not None:
                planner.store.reject()

    def finish(self) -> None:
        """Reads all weights from the beginning, so that all that is known by now is proven."""
        with self._lock:
            planner = self._kv.planner
            if planner is None or not planner.store.provisional or self._identity.unnamed:
                return
            self._identity.weights.restart()
            passes = self._identity.weights.passes
            while self._identity.weights.passes == passes:
                if not self._roll(1e9):
                    self.reject()
                    return

    def rest(self) -> None:
        """A call may be over: reads on in the background while nothing else runs."""
        planner = self._kv.planner
        if planner is None or not planner.store.provisional or self._identity.unnamed:
            return
        if not any(map(planner.store.outlives, range(len(planner.store.tiers)))):
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_read_on, args=(weakref.ref(self),), name="flowkv-weights", daemon=True
            )
            self._thread.start()

    def step(self) -> bool:
        """Reads a part if the model is idle; whether there is more to prove."""
        planner = self._kv.planner
        if planner is None or self._kv.closed or not planner.store.provisional:
            return False
        if self._running or time.monotonic() - self._ended_s < _IDLE_S:
            return True
        if self._lock.acquire(blocking=False):
            try:
                if self._identity.unnamed or self._identity.n_bytes <= SMALL_BYTES:
                    return False
                if not self._roll(0.0):
                    self.reject()
                    self._identity.weights.restart()
            finally:
                self._lock.release()
        return True


def _read_on(held: weakref.ref[Proof]) -> None:
    while (proof := held()) is not None and proof.step():
        del proof  # nobody is kept alive by being watched
        time.sleep(_PART_S)
