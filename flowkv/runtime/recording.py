"""Writes the requests of a live cache as a trace, for the simulator. Salted ids only, no tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flowkv.core.errors import ConfigError
from flowkv.runtime.guard import Guard
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.visits import Visits
from flowkv.sim.recording import Writer


class Recording:
    """A trace that is being written, as `KV.record` returns it. Ends with `close`, or the cache.

    A request is written when its sequence is closed: its arrival, the whole pages of its prompt as
    hashes of their keys, lengths, tenant, conversation, and why it ended. What cannot be written
    ends the recording, with a warning, and nothing else.

    Args:
        path: A new file; an old one is replaced.
        visits: Knows the requests.
        guard: The KV lock.
        page_size: Tokens per page.
        warn: Told what went wrong.

    Raises:
        ConfigError: The file cannot be made.

    Attributes:
        requests: Requests written so far.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        visits: Visits,
        guard: Guard,
        *,
        page_size: int,
        warn: Callable[[str], None],
    ) -> None:
        self.path, self.requests = Path(path), 0
        self._visits, self._guard, self._warn = visits, guard, warn
        try:
            self._writer = Writer(self.path, block_tokens=page_size)
        except OSError as error:
            raise ConfigError(
                f"a trace cannot be written to {self.path} ({error.strerror or error})",
                "Name a file in a directory that can be written",
            ) from error
        with guard:
            visits.followers.append(self.note)

    def note(self, seq: Sequence, pages: int, arrived_ns: int) -> None:
        """A request ended; see `Visits.followers`."""
        keys = b"".join(seq.key(0, page)[:16] for page in range(pages))
        session = seq.care.session
        try:
            self._writer.request(
                arrived_ns,
                keys,
                input_tokens=seq.prompted,
                output_tokens=max(0, seq.known - seq.prompted),
                session=session.to_bytes(8, "little") if session >= 0 else b"",
                tenant=seq.tenant,
                stop=seq.stop,
            )
            self.requests += 1
        except OSError as error:
            self._leave()
            self._warn(f"The trace {self.path} ends here, as it cannot be written ({error}).")

    def close(self) -> None:
        """Writes what is left. Safe to call again."""
        with self._guard:
            self._leave()

    def _leave(self) -> None:
        if self.note in self._visits.followers:
            self._visits.followers.remove(self.note)
            try:
                self._writer.close()
            except OSError as error:
                self._warn(f"The end of the trace {self.path} was not written ({error}).")

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<flowkv.Recording: {self.requests} requests to {self.path}>"
