"""Pages whose weights are not proven yet: known in the process, kept out of all other places.

Writes to weights that PyTorch does not count are found by reading the weights again. A page is
proven once such a reading, begun after the page became known, has found all weights unchanged.
"""

from __future__ import annotations

from flowkv.runtime.index import Block


class Provisional:
    """Blocks that no lasting or shared tier may be given yet. Callers hold the KV lock.

    Attributes:
        active: Blocks that become known from now on have to be proven.
    """

    def __init__(self) -> None:
        self.active = False
        self._fresh: dict[Block, None] = {}
        self._waiting: dict[Block, None] = {}

    def __len__(self) -> int:
        return len(self._fresh) + len(self._waiting)

    def __contains__(self, block: Block) -> bool:
        return block in self._fresh or block in self._waiting

    def add(self, block: Block) -> None:
        """A block became known."""
        if self.active:
            self._waiting.pop(block, None)
            self._fresh[block] = None

    def discard(self, block: Block) -> None:
        """A block is known no more."""
        self._fresh.pop(block, None)
        self._waiting.pop(block, None)

    def begin(self) -> None:
        """A reading of all weights begins: what is known by now waits for its end."""
        self._waiting |= self._fresh
        self._fresh = {}

    def confirm(self) -> list[Block]:
        """The reading has ended, and nothing had changed; returns what is proven by it."""
        proven, self._waiting = list(self._waiting), {}
        return proven

    def reject(self) -> list[Block]:
        """Weights had changed: returns what may have been computed by others than it is named."""
        rejected = [*self._waiting, *self._fresh]
        self._waiting, self._fresh = {}, {}
        return rejected
