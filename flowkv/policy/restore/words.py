"""The words of a restore: what is asked for, and the three things that can be done about it.

A prefix of N tokens over L layers is a rectangle of *cells* (layer, token). Each cell is computed
or loaded, once. Causality gives both their direction: a layer's tokens are computed from the front,
and only where the layer below computed them too; so loads come from the back. Per layer there are
two pointers, and the layer is there when they have met. The suffix, which nobody has, is computed
layer by layer once the prefix of its layer is there.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Span(NamedTuple):
    """A half-open range: of layers, or of tokens."""

    first: int
    stop: int

    @property
    def size(self) -> int:
        """How many."""
        return self.stop - self.first


class Source(NamedTuple):
    """Somewhere all cells of a prefix can be loaded from.

    Attributes:
        tier: Its name; loads of one tier share a link.
        codec: How the pages lie there (`core.layout.CODECS`).
        cell_bytes: Bytes of one token of one layer.
    """

    tier: str
    codec: str
    cell_bytes: float


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt whose prefix lies somewhere.

    Attributes:
        number: Names it; unique among those that are restored together.
        tokens: N, tokens of the prefix; the cells are those of `[resident, tokens)`.
        suffix: S, tokens behind it, which must be computed. 0 leaves the suffix out.
        layers: L.
        resident: Leading tokens that are there already.
        unit: Tokens of a page. Spans of tokens begin and end at multiples of it, or at `tokens`.
        sources: Where it can be loaded from, most precise first; empty if it can only be computed.
        computable: Whether cells can be computed at all; False where nobody drives the model.
        whole: Computes are over all layers (an unmodified model cannot be stopped halfway).
        arrived_s: When it came.
    """

    number: int
    tokens: int
    suffix: int
    layers: int
    resident: int = 0
    unit: int = 64
    sources: tuple[Source, ...] = ()
    computable: bool = True
    whole: bool = False
    arrived_s: float = 0.0


class Compute(NamedTuple):
    """Compute these layers of these tokens.

    Attributes:
        request: Number of the request.
        layers: Which.
        tokens: Which; they begin where the layers' computed tokens end.
    """

    request: int
    layers: Span
    tokens: Span


class Load(NamedTuple):
    """Load these layers of these tokens.

    Attributes:
        request: Number of the request.
        layers: Which.
        tokens: Which; they end where the layers' loaded tokens begin.
        source: Index into `Request.sources`.
    """

    request: int
    layers: Span
    tokens: Span
    source: int = 0


class Suffix(NamedTuple):
    """Compute a layer of the suffix: all cells of the layer are there, and the layer below is done.

    Attributes:
        request: Number of the request.
        layer: Which.
    """

    request: int
    layer: int


Op = Compute | Load | Suffix
