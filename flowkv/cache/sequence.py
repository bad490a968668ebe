"""Open sequences: tokens, blocks, options of requests, block tables, and the KV lock."""

from __future__ import annotations

import _thread
import hashlib
import math
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache.index import Block, Saved, SwappedCopy
from flowkv.core import interrupts
from flowkv.core.errors import CapacityError, ConfigError
from flowkv.core.keys import ROOT, KeyChain, Salt, as_tokens
from flowkv.kernels.operands import GPUS, sent
from flowkv.policy.base import (
    CUT_OFF,
    NEVER_NS,
    TOOL_USE,
    TURN_END,
    UNKNOWN_STOP,
    Lease,
    Retain,
    lease_of,
)
from flowkv.policy.pages import Importance

# Options of a request: its conversation, and the retention of its pages.

NEVER = math.inf
"""Value of `eta_s` for prompts that will not be used again."""

SOON = 0.0
"""Value of `eta_s` for prompts that will be used at once."""

_SESSION_BITS = 62


class Care(NamedTuple):
    """Retention of the pages of a request.

    Attributes:
        session: Number of its conversation, -1 if unknown; see `session_number`.
        lease: Lease class, or a lease, of all pages; "" for the place's default.
        retain: Spans with a retention of their own.
    """

    session: int = -1
    lease: str | Lease = ""
    retain: tuple[Retain, ...] = ()

    def lease_for(self, start: int, stop: int) -> str | Lease:
        """Return the lease of a page that holds the tokens from `start` to `stop`."""
        return lease_of(self.retain, start, stop) or self.lease


NO_CARE = Care()


def make_care(
    session: str | int | None, lease: str | Lease, retain: Items[Retain], salt: bytes
) -> Care:
    """Return the `Care` of a request from its options.

    Raises:
        ConfigError: An element of `retain` is no `Retain`.
    """
    odd = [span for span in retain if not isinstance(span, Retain)]
    if odd:
        raise ConfigError(f"retain holds {odd[0]!r}", "Give flowkv.Retain(start, stop, ...) spans")
    number = -1 if session is None else session_number(session, salt)
    return Care(number, lease, tuple(retain)) if number >= 0 or lease or retain else NO_CARE


def session_number(session: str | int, salt: bytes) -> int:
    """Return the 62-bit number of a conversation: a keyed hash that does not reveal its name.

    Args:
        session: Name or number of the conversation.
        salt: Tenant salt; conversations of different tenants get different numbers.
    """
    name = f"{type(session).__name__}:{session}".encode()
    digest = hashlib.blake2b(name, key=salt[:64], digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SESSION_BITS)


def eta_ns(eta_s: float) -> int:
    """Convert `eta_s` into nanoseconds.

    Raises:
        ConfigError: `eta_s` is negative, or no number.
    """
    if not eta_s >= 0:
        raise ConfigError(f"eta_s={eta_s}", "Give seconds from now, flowkv.SOON or flowkv.NEVER")
    return NEVER_NS if eta_s * 1e9 >= NEVER_NS else round(eta_s * 1e9)


STOPS = {"": UNKNOWN_STOP, "tool_use": TOOL_USE, "turn_end": TURN_END, "cut_off": CUT_OFF}
"""Why a sequence may have ended, see `Sequence.close`."""

State = Mapping[str, Any]
"""A snapshot of recurrent layers: named tensors, numbers, strings and tuples of them."""


class Arriving(Protocol):
    """Restore of a cached prefix, as the modules below `flowkv.cache.restore` use it."""

    @property
    def settled(self) -> bool:
        """Return whether the front is done."""

    @property
    def gone(self) -> bool:
        """Return whether one of its pages was forgotten meanwhile."""

    @property
    def lacks(self) -> bool:
        """Return whether pages in the sequence's row are not loaded yet."""

    @property
    def tokens(self) -> int:
        """Current end of the prefix, in tokens."""

    @property
    def front(self) -> int:
        """Tokens that were resident or computed when the front was done."""

    def bind(self, seq: Sequence) -> None:
        """Refer to the sequence again, in its finalizer."""

    def computed(
        self, first: int, stop: int, started_s: float, host_s: float
    ) -> Callable[[float], None]:
        """Emit the span of computed tokens `[first, stop)`; return a call that learns its time."""

    def settle(self) -> int:
        """End the front; return the sequence's length afterwards."""

    def wait(self, layer: int) -> None:
        """Block until a layer of all pages is loaded and verified."""

    def cancel(self) -> None:
        """Cancel the restore; a settled one keeps its leading complete pages."""

    def abandon(self) -> None:
        """Cancel the restore of a sequence that is about to be closed."""


class Planning(Protocol):
    """Planner of a sequence, as the modules below `flowkv.cache.block_table` use it."""

    tables: Tables

    def put(self, seq: Sequence, group: int, page_no: int, page: int) -> None:
        """Put a page at `page_no` into a sequence's row, behind its other pages; -1 is a hole."""


class Sequence:
    """Open sequence, a row of a batch, as `KV.open` returns it. Close it when it is done.

    Attributes:
        row: Its row in the block tables.
        tenant: Tenant salt.
        owner: Name of the tenant, for metrics.
        namespace: Namespace digest of its keys.
        salts: Inputs beside the tokens that K and V depend on.
        reused: Tokens that were cached when it was opened.
        state: Snapshot restored with the prefix, for hybrid models; None otherwise.
        placed: Tokens of the last state before the end of its prompt; 0 for none.
        stops: Lengths at which its prompt's computation stops for a state, ascending.
        restoration: Restore of the cached prefix while it loads, else None. Other modules get it
            from `RestoreJob.of`.
        vouched: Length up to which the model was known to be as named when it had computed that.
        in_place: Whether the number of a page says the positions of its tokens.
        closed: True after `close`.
        planner: Owner of its pages. Other modules get it from `Planner.of`.
    """

    def __init__(
        self,
        row: int,
        chains: Items[KeyChain],
        *,
        tenant: bytes,
        namespace: bytes,
        salts: Items[Salt],
        close: Callable[[Sequence], None],
        planner: Planning,
    ) -> None:
        self.row, self.tenant, self.namespace = row, tenant, namespace
        self.salts, self.chains = list(salts), list(chains)
        self.state: State | None = None
        self.restoration: Arriving | None = None
        self.owner = ""
        # For policies: the number of its request, -1 without one, and the options of the request.
        self.request, self.arrived_ns, self.prompted, self.care = -1, 0, 0, NO_CARE
        self.stop = UNKNOWN_STOP
        self.reused = self.placed = 0
        self.stops: list[int] = []
        self._close, self.planner = close, planner
        self._tokens, self._known = np.zeros(64, np.uint32), 0
        # Per group: the block of each page, None while the page is private to this sequence.
        self.blocks: list[list[Block | None]] = [[] for _ in chains]
        # Per group: pages before this one were dropped behind the window.
        self.first_page: list[int] = [0] * len(chains)
        # Per group: pages before this one are published, or never will be.
        self.published: list[int] = [0] * len(chains)
        # Per group: keys of the leading full pages that are computed so far.
        self._keys: list[list[bytes]] = [[] for _ in chains]
        self.suspended: Saved | None = None  # saved pages while it is suspended
        self.publishable, self.vouched, self.in_place = True, 0, True
        self.away = 0  # pages on a tier below the device, which attention reads there
        # Attention mass of its pages in watched steps, by group.
        self.importance: dict[int, Importance] = {}
        self.closed = False

    @property
    def length(self) -> int:
        """Number of tokens in pages, of the group with most; 0 once the sequence is closed."""
        tables, row = self.planner.tables, self.row
        lost: list[int] = tables.lost[:, row].tolist()
        return int(tables.lengths[row]) - min(lost)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens in pages of each layer group, int64 `[groups]`."""
        tables = self.planner.tables
        lengths: NDArray[np.int64] = tables.lengths[self.row] - tables.lost[:, self.row]
        return lengths

    @property
    def position(self) -> int:
        """Position of the next token: tokens in pages plus those that sparsification removed."""
        return int(self.planner.tables.lengths[self.row])

    @property
    def dropped(self) -> int:
        """Number of tokens that sparsification removed, of the group that lost most."""
        return int(self.planner.tables.lost[:, self.row].max())

    @property
    def fidelity(self) -> int:
        """Index of the lossiest codec among the pages that K and V depend on (DESIGN D6)."""
        return int(self.planner.tables.fidelity[self.row])

    @fidelity.setter
    def fidelity(self, codec: int) -> None:
        self.planner.tables.fidelity[self.row] = codec

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """Known token ids, uint32; there may be more of them than `length`."""
        return self._tokens[: self._known]

    @property
    def known(self) -> int:
        """Number of token ids known so far."""
        return self._known

    def until_stop(self) -> int:
        """Return the tokens up to the next of `stops`; the largest number if there is none."""
        length = self.length if self.stops else 0
        return next((stop - length for stop in self.stops if stop > length), sys.maxsize)

    def note(self, tokens: Items[int] | NDArray[np.generic]) -> None:
        """Append token ids that follow the known ones.

        Raises:
            TokenError: `tokens` is not a flat sequence of ids in [0, 2**32).
        """
        self.extend(as_tokens(tokens))

    def extend(self, fresh: NDArray[np.uint32]) -> None:
        """Append token ids that are checked already, see `note`."""
        need = self._known + len(fresh)
        if need > len(self._tokens):
            grown = np.zeros(max(need, 2 * len(self._tokens)), np.uint32)
            grown[: self._known] = self.tokens
            self._tokens = grown
        self._tokens[self._known : need] = fresh
        self._known = need

    def forget_tokens(self, known: int) -> None:
        """Drop token ids from position `known` on."""
        self._known = min(self._known, known)
        for keys, chain in zip(self._keys, self.chains, strict=True):
            del keys[self._known // chain.page_size :]

    def replace_salts(self, salts: Items[Salt]) -> None:
        """Replace the salts; those of published pages must stay."""
        changed = [salt.position for salt in {*salts} ^ {*self.salts}]
        self.salts = sorted(salts, key=lambda salt: (salt.position, salt.digest))
        for keys, chain in zip(self._keys, self.chains, strict=True):
            del keys[min(changed, default=self._known) // chain.page_size :]

    @property
    def forgotten(self) -> bool:
        """Return whether a page that the sequence holds, or waits for, was forgotten meanwhile."""
        held = any(block is not None and block.gone for blocks in self.blocks for block in blocks)
        # Pages that a suspended sequence gave up may have been erased since.
        saved = (page for pages in self.suspended or () for page in pages)
        aside = any(isinstance(page, SwappedCopy) and page.block.gone for page in saved)
        return held or aside or (self.restoration is not None and self.restoration.gone)

    def key(self, group: int, page: int) -> bytes:
        """Return the chain key of a full page with known tokens."""
        return self.keys(group, page + 1)[page]

    def keys(self, group: int, pages: int) -> list[bytes]:
        """Return the chain keys of the first `pages` pages or more; their tokens must be known."""
        keys = self._keys[group]
        if pages > len(keys):
            chain, known = self.chains[group], pages * self.chains[group].page_size
            parent = keys[-1] if keys else ROOT
            keys += chain.keys(self._tokens[:known], self.salts, start=len(keys), parent=parent)
        return keys

    def parent_key(self, group: int, page: int) -> bytes:
        """Return the chain key of the page before a page; `ROOT` for the first one."""
        return self.key(group, page - 1) if page else ROOT

    def place(self, page: int) -> bytes:
        """Return the parent that a page is placed below, see `Block.place`."""
        return self.key(0, page - 1) if page else self.namespace + self.tenant

    def copy_onto(self, other: Sequence) -> None:
        """Copy tokens, keys, options and statistics to `other`, a freshly opened sequence."""
        other.note(self.tokens)
        other._keys = [list(keys) for keys in self._keys]
        other.first_page, other.published = list(self.first_page), list(self.published)
        other.reused, other.state = self.reused, self.state
        other.fidelity, other.publishable = self.fidelity, self.publishable
        other.vouched = self.vouched
        other.owner, other.care = self.owner, self.care
        other.importance = deepcopy(self.importance)

    def close(self, stop: str = "") -> None:
        """Release all pages; published ones stay cached. Idempotent, and safe in a finalizer.

        Args:
            stop: Why it ended, for policies that learn: "tool_use", "turn_end" or "cut_off".

        Raises:
            ConfigError: `stop` is none of these.
        """
        if stop not in STOPS:
            raise ConfigError(f"stop={stop!r}", f"Use one of {', '.join(filter(None, STOPS))}")
        if stop:
            self.stop = STOPS[stop]
        self._close(self)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @interrupts.unbroken
    def __del__(self) -> None:
        """Close a sequence that was dropped open, for instance by an interrupt."""
        if getattr(self, "closed", True) or sys.is_finalizing():  # no `closed`: never initialized
            return
        if self.row != self.planner.tables.nowhere:
            self.publishable = False  # a dropped sequence is not found when publishing is forbidden
            if self.restoration is not None:
                self.restoration.bind(self)
            self._close(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.length} tokens, {self.reused} reused"
        return f"<flowkv.Sequence row {self.row}: {state}>"


# Block tables and lengths of all open sequences, one row a sequence, ready for the kernels.
#
# The tables are arrays over all rows, so that planning a step costs a few vector operations, for
# any batch and any context length.

CLOSED, READY, STEPPING, SUSPENDED = range(4)
"""State of a row's sequence."""


class Tables:
    """Block tables of all open sequences. Callers hold the KV lock.

    Attributes:
        pages: Per group int32 `[rows, pages]`: granule of each page, -1 where there is none.
        lengths: int64 `[rows + 1]`: tokens whose K and V were written.
        lost: int64 `[groups, rows + 1]`: written tokens that sparsification removed from a group.
        state: uint8 `[rows + 1]`: `CLOSED`, `READY`, `STEPPING` or `SUSPENDED`.
        fidelity: uint8 `[rows + 1]`: index of the lossiest codec that a row depends on.
        shared: bool `[rows]`: the page that the next token is written to may be shared.
        nowhere: The row of closed sequences and of lookups: always empty and closed.
        version: Number of changes to `pages` so far.

    Args:
        devices: Device of each group.
        max_rows: Most sequences open at once.
        max_pages: Pages per row to begin with; rows grow.
    """

    def __init__(self, devices: list[torch.device], max_rows: int, max_pages: int = 64) -> None:
        self.devices, self.max_rows, self.nowhere = devices, max_rows, max_rows
        self.pages: list[NDArray[np.int32]] = []
        self._device_tables: dict[int, tuple[object, torch.Tensor]] = {}
        self.version = 0
        self._former: list[list[weakref.ref[NDArray[np.int32]]]] = []
        self.lengths = np.zeros(max_rows + 1, np.int64)
        self.lost = np.zeros((len(devices), max_rows + 1), np.int64)
        self.state = np.full(max_rows + 1, CLOSED, np.uint8)
        self.fidelity = np.zeros(max_rows + 1, np.uint8)
        self.shared = np.zeros(max_rows, np.bool_)
        self._free = list(range(max_rows - 1, -1, -1))
        self._resize(max_pages)

    def open_row(self) -> int:
        """Take a free row and return its number.

        Raises:
            CapacityError: All rows are taken.
        """
        if not self._free:
            raise CapacityError(
                f"{self.max_rows} sequences are open", "Close some, or raise max_rows"
            )
        row = self._free.pop()
        self.state[row] = READY
        return row

    def close_row(self, row: int) -> None:
        """Empty a row and mark it free."""
        for table in self.pages:
            table[row] = -1
        self.lengths[row], self.lost[:, row], self.state[row] = 0, 0, CLOSED
        self.shared[row], self.fidelity[row] = False, 0
        self.mark_changed()
        self._free.append(row)

    def reserve(self, pages: int) -> None:
        """Grow every row to at least `pages` pages."""
        have = self.pages[0].shape[1]
        if pages > have:
            self._resize(max(pages, 2 * have))

    def replace(self, group: int, row: int, page_no: int, page: int) -> None:
        """Replace a page in a row, also for steps under way on a CPU."""
        self.pages[group][row, page_no] = page
        for former in self._former:  # arrays of steps that began before the rows grew
            table = former[group]()
            if table is not None and page_no < table.shape[1]:
                table[row, page_no] = page
        self.mark_changed()

    def mark_changed(self) -> None:
        """Record that `pages` changed; device copies follow at the next `table`."""
        self.version += 1

    def table(self, group: int) -> torch.Tensor:
        """Return the group's block table on its device, int32 `[rows, pages]`.

        It is copied on the stream that reads it, and so anew for another stream.
        """
        device = self.devices[group]
        at = self.version, torch.cuda.current_stream(device) if device.type in GPUS else None
        if self._device_tables.get(group, (None,))[0] != at:
            self._device_tables[group] = at, sent(torch.from_numpy(self.pages[group]), device)
        return self._device_tables[group][1]

    def _resize(self, pages: int) -> None:
        # The arrays are new: steps of other threads may still read the old ones, which stay valid.
        old, self.pages = self.pages, []
        if old:
            alive = (tables for tables in self._former if any(ref() is not None for ref in tables))
            self._former = [*alive, [weakref.ref(table) for table in old]]
        for g in range(len(self.devices)):
            table = np.full((self.max_rows, pages), -1, np.int32)
            if old:
                table[:, : old[g].shape[1]] = old[g]
            self.pages.append(table)
        self.mark_changed()


# The one lock of a `KV`, with a queue for work that may arrive while the lock is already held.

FORK_WAIT_S = 1.0
"""Longest wait of a fork for changes under way."""


def extend_each(seqs: Items[Sequence], known: Items[int], tokens: Items[int]) -> bool:
    """Append a single id to each sequence, if its number of known ids is the expected one.

    Args:
        seqs: Different sequences, such as the rows of a decode step.
        known: Expected number of known ids of each.
        tokens: One for each, checked already.

    Returns:
        False if a sequence has more or fewer ids; nothing is changed then.
    """
    if [seq._known for seq in seqs] != known:
        return False
    for seq, place, token in zip(seqs, known, tokens, strict=True):
        ids = seq._tokens
        if place == len(ids):
            seq.extend(np.array([token], np.uint32))
        else:
            ids[place] = token
            seq._known = place + 1
    return True


class Guard(_thread.RLock):  # type: ignore[misc]
    """Re-entrant lock with a queue of work that finalizers defer until no change is under way.

    Take it by `with` only, which enters and leaves it in C, so that no interrupt comes in between.
    Signals wait while the main thread holds it (`flowkv.core.interrupts`).

    A finalizer can run at any allocation, also in the middle of a change by its own thread. It must
    neither change anything then nor wait for another thread, so it defers.

    A fork waits until no thread is in the middle of a change, so that the child's copy of the
    guarded state is consistent.

    Attributes:
        deferred: The queue; empty most of the time, and then there is nothing to run.
        inherited: This process was forked since.
        torn: This process was forked in the middle of a change: the guarded state is inconsistent.
    """

    def __init__(self) -> None:
        self.deferred: deque[Callable[[], None]] = deque()
        self.inherited = self.torn = self._held = False
        interrupts.watch(self)
        _guards.add(weakref.ref(self, _guards.discard))

    def defer(self, work: Callable[[], None]) -> None:
        """Run `work` now if the lock is free, else in a later `run_deferred`."""
        self.deferred.append(work)
        self.run_deferred()

    @interrupts.unbroken
    def run_deferred(self) -> None:
        """Run deferred work, unless a thread is in the middle of a change."""
        if not self.deferred or self._is_owned() or not self.acquire(blocking=False):  # type: ignore[attr-defined]
            return
        try:
            while self.deferred:
                self.deferred.popleft()()
        finally:
            self.release()

    @contextmanager
    @interrupts.unbroken
    def within(self, seconds: float) -> Iterator[bool]:
        """Hold the lock if it comes free within `seconds`; yield whether it is held."""
        held = self.acquire(timeout=min(max(seconds, 0.0), _thread.TIMEOUT_MAX))
        try:
            yield held
        finally:
            if held:
                self.release()

    # ---- around a fork

    def _hold(self, wait_s: float) -> None:
        self._held = self.acquire(timeout=max(wait_s, 0.0))

    def _let_go(self) -> None:
        if self._held:
            self._held = False
            self.release()

    def _inherit(self) -> None:
        """Reset the lock after a fork, in the child: the thread that held it does not exist here.

        Deferred work is dropped: it belongs to the parent.
        """
        self.deferred.clear()
        self.inherited = True
        if self._held:
            self._let_go()
        else:
            self._at_fork_reinit()  # type: ignore[attr-defined]
            self.torn = True


_guards: set[weakref.ref[Guard]] = set()


def _each(call: Callable[[Guard], object]) -> None:
    for guard in [guard for known in list(_guards) if (guard := known()) is not None]:
        call(guard)


def _hold_all() -> None:
    end = time.monotonic() + FORK_WAIT_S
    _each(lambda guard: guard._hold(end - time.monotonic()))


os.register_at_fork(
    before=_hold_all,
    after_in_parent=partial(_each, Guard._let_go),
    after_in_child=partial(_each, Guard._inherit),
)
