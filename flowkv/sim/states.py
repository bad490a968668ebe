"""States of recurrent layers in a replay: blocks of another kind, each for a whole prefix.

A prefix of a hybrid model is of use up to its last block that has a state. The states are placed
and replaced by the same object as in the cache, `flowkv.policy.pages.StatePlacement`.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from flowkv.policy.base import Slots
from flowkv.policy.pages import SavedState, StatePlacement
from flowkv.sim.hardware import Shape
from flowkv.sim.trace import Trace


class ReplayedStates:
    """States of one place, which evicts the longest unused first where their room is limited.

    A state is known by the block that it follows, the state at the end of an answer by `~block`: it
    lies behind the last whole block of its request. It takes room and, as traces have no blocks of
    answers, is never hit.

    Args:
        trace: Trace to replay.
        placement: Rule of where they are saved.
        model: Shape of the model.
        room: Most bytes of states, as a share of the bytes of all blocks in the place if every
            layer of the model had attention; no limit if 0.

    Attributes:
        known: Leading resident blocks of all requests: the hits of a model with attention alone.
        stops: Forwards that end only for a state.
        peak: Most states at a time.
        peak_blocks: Most blocks in the place.
    """

    def __init__(
        self, trace: Trace, placement: StatePlacement, model: Shape, room: float = 0.0
    ) -> None:
        self.trace, self.placement, self.room = trace, placement, room
        self._state_tokens = model.state_bytes / model.token_bytes()
        self._cost_tokens = model.state_bytes / model.whole_token_bytes()
        self._here = OrderedDict[int, None]()  # the longest unused first
        self._saved = np.zeros(trace.unique, np.bool_)
        self._children = np.zeros(trace.unique, np.int64)
        sizes = np.diff(trace.offsets)
        ragged = (sizes > 0) & (trace.input_tokens < sizes * trace.block_tokens)
        self._above = trace.parents.copy()  # -1 also for blocks that are not whole
        self._above[trace.blocks[trace.offsets[1:][ragged] - 1]] = -1
        self.known = self.stops = self.peak = self.peak_blocks = 0

    def usable(self, r: int, chain: Slots, hits: int) -> int:
        """Return how many leading blocks of a request are of use, `hits` of which are resident."""
        self.known += hits
        found = np.flatnonzero(self._saved[chain[: min(hits, self._whole(r, chain))]])
        if not len(found):
            return 0
        self._here.move_to_end(int(chain[found[-1]]))
        return int(found[-1]) + 1

    def _whole(self, r: int, chain: Slots) -> int:
        """Return the whole blocks in front of the last token, which is always computed."""
        tokens = max(int(self.trace.input_tokens[r]) - 1, 0)
        return min(len(chain), tokens // self.trace.block_tokens)

    def count_children(self, slots: Slots) -> None:
        """Count whole blocks that became resident as children of their parents."""
        above = self._above[slots]
        np.add.at(self._children, above[above >= 0], 1)

    def drop_behind(self, slots: Slots) -> None:
        """Drop the states behind blocks that left, and count them no more."""
        above = self._above[slots]
        np.subtract.at(self._children, above[above >= 0], 1)
        for block in slots[self._saved[slots]].tolist():
            self._drop(block)
        for block in slots.tolist():
            self._here.pop(~block, None)

    def save_states(self, r: int, chain: Slots, used: int, known: int, held: int) -> None:
        """Save the states of a request, in place of those that they replace.

        Args:
            r: Request.
            chain: Its blocks.
            used: Leading blocks that were of use.
            known: Leading blocks that were resident.
            held: Blocks in the place.
        """
        size, placement, end = self.trace.block_tokens, self.placement, self._whole(r, chain)
        stops = placement.stops(used * size, min(known, end) * size, end * size, page=size)
        self.stops += len(stops)
        for stop in stops:
            block = int(chain[stop // size - 1])
            self._saved[block], self._here[block] = True, None
            self._here.move_to_end(block)
        if stops:
            marks = np.flatnonzero(self._saved[chain]).tolist()
            saved = [SavedState((m + 1) * size, int(self._children[chain[m]])) for m in marks]
            for tokens in placement.replaced(saved, state_tokens=self._state_tokens):
                self._drop(int(chain[tokens // size - 1]))
        if placement.config.ends and len(chain):
            for block in chain.tolist() if placement.config.replaces else ():
                self._here.pop(~block, None)
            whole = min(int(self.trace.input_tokens[r]) // size, len(chain))
            self._here[~int(chain[max(whole, 1) - 1])] = None
        while self.room and len(self._here) * self._cost_tokens > self.room * held * size:
            self._drop(next(iter(self._here)))
        self.peak, self.peak_blocks = max(self.peak, len(self._here)), max(self.peak_blocks, held)

    def figures(self) -> dict[str, str | float]:
        """Return the rule, the hits and the bytes of the states by name, for tables."""
        requests, blocks = max(len(self.trace), 1), max(len(self.trace.blocks), 1)
        tokens = max(self.peak_blocks * self.trace.block_tokens, 1)
        return {
            "states": self.placement.name,
            "attention_hit_ratio": self.known / blocks,
            "states_share": self.peak * self._cost_tokens / tokens,
            "stops_per_request": self.stops / requests,
        }

    def _drop(self, block: int) -> None:
        self._here.pop(block, None)
        if block >= 0:
            self._saved[block] = False
