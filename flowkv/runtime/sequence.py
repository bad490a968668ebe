"""One open sequence: its tokens, its line in the block tables, and the blocks it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.core.keys import ROOT, KeyChain, Salt, as_tokens
from flowkv.policy.base import CUT_OFF, TOOL_USE, TURN_END, UNKNOWN_STOP
from flowkv.runtime.keepsake import Keepsake
from flowkv.runtime.retention import NO_CARE

if TYPE_CHECKING:
    from flowkv.policy.importance import Importance
    from flowkv.runtime.index import Block
    from flowkv.runtime.planner import Planner
    from flowkv.runtime.restoration import Restoration
    from flowkv.runtime.swap import Saved

STOPS = {"": UNKNOWN_STOP, "tool_use": TOOL_USE, "turn_end": TURN_END, "cut_off": CUT_OFF}
"""Why a sequence may have ended, see `Sequence.close`."""

State = Mapping[str, Any]
"""A snapshot of recurrent layers: named tensors, numbers, strings and tuples of them."""


class Sequence:
    """A row of a batch, as `KV.open` returns it. Close it when it is done.

    Attributes:
        row: Its line in the block tables.
        tenant: Tenant salt.
        owner: Name of the tenant, for those who count.
        namespace: Namespace digest that its keys belong to.
        salts: What K and V depend on beside the tokens.
        reused: Tokens that were known when it was opened.
        state: Snapshot restored with the prefix, for hybrid models; None otherwise.
        restoration: What is still on its way of a known prefix; None once that is over.
        closed: True after `close`.
        planner: What its pages belong to.
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
        planner: Planner,
    ) -> None:
        self.row, self.tenant, self.namespace = row, tenant, namespace
        self.salts, self.chains = list(salts), list(chains)
        self.state: State | None = None
        self.restoration: Restoration | None = None
        self.owner = ""
        # As policies know it: the number of its request, -1 without one, and what it asked for.
        self.request, self.arrived_ns, self.prompted, self.care = -1, 0, 0, NO_CARE
        self.stop = UNKNOWN_STOP
        self.reused, self.closed = 0, False
        self._close, self.planner = close, planner
        self._tokens, self._known = np.zeros(64, np.uint32), 0
        # Per group: the block of each page, None while the page is private to this sequence.
        self.blocks: list[list[Block | None]] = [[] for _ in chains]
        # Per group: pages before this one were dropped behind the window.
        self.first_page: list[int] = [0] * len(chains)
        # Per group: pages before this one are published, or never will be.
        self.published: list[int] = [0] * len(chains)
        # Per group: keys of the leading full pages, as far as they are computed.
        self._keys: list[list[bytes]] = [[] for _ in chains]
        self.suspended: Saved | None = None  # what brings its pages back
        self.publishable = True
        # Tokens that sparsification took out, and what steps saw of the others, by group.
        self.dropped = 0
        self.importance: dict[int, Importance] = {}

    @property
    def length(self) -> int:
        """Tokens whose K and V are in pages; 0 once it is closed."""
        return int(self.planner.tables.lengths[self.row])

    @property
    def position(self) -> int:
        """Position of its next token: `length`, and what sparsification took out."""
        return self.length + self.dropped

    @property
    def fidelity(self) -> int:
        """Index of the lossiest codec among the pages that it was built on (DESIGN D6)."""
        return int(self.planner.tables.fidelity[self.row])

    @fidelity.setter
    def fidelity(self, codec: int) -> None:
        self.planner.tables.fidelity[self.row] = codec

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """All token ids known so far, uint32; may be longer than `length`."""
        return self._tokens[: self._known]

    @property
    def known(self) -> int:
        """Number of token ids known so far."""
        return self._known

    def note(self, tokens: Items[int] | NDArray[np.generic]) -> None:
        """Appends token ids that follow the known ones.

        Raises:
            TokenError: Not a flat sequence of ids in [0, 2**32).
        """
        self.extend(as_tokens(tokens))

    def extend(self, fresh: NDArray[np.uint32]) -> None:
        """`note` for ids that are checked already."""
        need = self._known + len(fresh)
        if need > len(self._tokens):
            grown = np.zeros(max(need, 2 * len(self._tokens)), np.uint32)
            grown[: self._known] = self.tokens
            self._tokens = grown
        self._tokens[self._known : need] = fresh
        self._known = need

    def append(self, token: int) -> None:
        """`extend` for a single id."""
        if self._known == len(self._tokens):
            self.extend(np.array([token], np.uint32))
            return
        self._tokens[self._known] = token
        self._known += 1

    def forget_tokens(self, known: int) -> None:
        """Drops token ids from position `known` on."""
        self._known = min(self._known, known)
        for keys, chain in zip(self._keys, self.chains, strict=True):
            del keys[self._known // chain.page_size :]

    @property
    def forgotten(self) -> bool:
        """Whether anything that it holds, or waits for, was forgotten meanwhile."""
        held = any(block is not None and block.gone for blocks in self.blocks for block in blocks)
        # What was given up while it was suspended may have been erased since: nobody knows.
        saved = (page for pages in self.suspended or () for page in pages)
        aside = any(isinstance(page, Keepsake) and page.block.gone for page in saved)
        return held or aside or (self.restoration is not None and self.restoration.gone)

    def key(self, group: int, page: int) -> bytes:
        """Chain key of a full page whose tokens are known."""
        keys = self._keys[group]
        if page >= len(keys):
            chain, known = self.chains[group], (page + 1) * self.chains[group].page_size
            parent = keys[-1] if keys else ROOT
            keys += chain.pages(self._tokens[:known], self.salts, start=len(keys), parent=parent)
        return keys[page]

    def parent_key(self, group: int, page: int) -> bytes:
        """Chain key above a page."""
        return self.key(group, page - 1) if page else ROOT

    def copy_onto(self, other: Sequence) -> None:
        """Gives `other`, freshly opened, what this one knows about tokens and keys."""
        other.note(self.tokens)
        other._keys = [list(keys) for keys in self._keys]
        other.first_page, other.published = list(self.first_page), list(self.published)
        other.reused, other.state = self.reused, self.state
        other.fidelity, other.publishable = self.fidelity, self.publishable
        other.owner, other.care = self.owner, self.care
        other.dropped, other.importance = self.dropped, deepcopy(self.importance)

    def close(self, stop: str = "") -> None:
        """Releases its pages; published ones stay known. Safe to call again, and in a finalizer.

        Args:
            stop: Why it ended, for policies that learn: "tool_use", "turn_end" or "cut_off".

        Raises:
            ConfigError: There is no such reason.
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

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.length} tokens, {self.reused} reused"
        return f"<flowkv.Sequence row {self.row}: {state}>"
