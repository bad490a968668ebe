"""What steps and moves of a virtual engine take."""

from __future__ import annotations

import msgspec


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of everything, linear in what is done.

    Attributes:
        step_s: A step over nothing: reading the weights, launching, bookkeeping.
        token_s: Each token of it.
        context_s: Each token that one of its rows attends to.
        out_s: Moving a page to host memory.
        back_s: Moving a page to the device.
        load_s: Loading a token of a known prefix, while steps go on.
    """

    step_s: float = 0.010
    token_s: float = 0.0002
    context_s: float = 2e-7
    out_s: float = 0.0005
    back_s: float = 0.0005
    load_s: float = 0.00002

    def of_step(self, tokens: int, context: int) -> float:
        """A step over so many tokens, whose rows have so many before them together."""
        return self.step_s + self.token_s * tokens + self.context_s * context
