"""The next step of a pointer: from the front by computing, from the back by loading."""

from __future__ import annotations

from flowkv.policy.restore.state import Progress
from flowkv.policy.restore.words import Compute, Load, Request, Span, Suffix


def ahead(request: Request, first: int, chunk: int) -> int:
    """Where a chunk that begins at `first` ends: at the edge of a page, one page on at least."""
    stop = (first + chunk) // request.unit * request.unit
    return min(stop if stop > first else (first // request.unit + 1) * request.unit, request.tokens)


def behind(request: Request, stop: int, chunk: int) -> int:
    """Where a chunk that ends at `stop` begins: at the edge of a page, one page back at least."""
    first = -((chunk - stop) // request.unit) * request.unit
    return max(first if first < stop else (stop - 1) // request.unit * request.unit, 0)


def source_on(request: Request, tier: str) -> int | None:
    """The most precise source on a tier; None if there is none."""
    found = (i for i, source in enumerate(request.sources) if source.tier == tier)
    return next(found, None)


def compute_all(progress: Progress, chunk: int, limit: int | None = None) -> Compute | None:
    """The next chunk from the front, through all layers.

    Args:
        progress: Of the request.
        chunk: Tokens at most; a page at least.
        limit: Token to stop at; None for as far as nothing was begun.

    Returns:
        None if nothing is left there, or a compute is under way.
    """
    first, layers = progress.front[0], progress.request.layers
    level = [first] * layers
    stop = min(progress.back if limit is None else (limit, *progress.back))
    if first >= stop or not progress.request.computable:
        return None
    if progress.front != level or progress.computed != level:
        return None
    stop = min(stop, ahead(progress.request, first, chunk))
    return Compute(progress.request.number, Span(0, layers), Span(first, stop))


def compute_layers(progress: Progress, layers: Span, stop: int) -> Compute | None:
    """Layers that stand at the same token, on to `stop` or as far as dependencies let them.

    Args:
        progress: Of the request.
        layers: Which.
        stop: Token to stop at, if nothing else stops them before.

    Returns:
        None if they can do nothing now.
    """
    first, request = progress.front[layers.first], progress.request
    level = [first] * layers.size
    stop = min(stop, *progress.back[layers.first : layers.stop])
    if layers.first:  # the layer below must have computed these tokens: it hands them up
        stop = min(stop, progress.computed[layers.first - 1])
    if first >= stop or not request.computable:
        return None
    if progress.front[layers.first : layers.stop] != level:
        return None
    if progress.computed[layers.first : layers.stop] != level:
        return None
    return Compute(request.number, layers, Span(first, stop))


def load_back(
    progress: Progress, layers: Span, chunk: int, source: int, floor: int = 0
) -> Load | None:
    """The next chunk from the back, of layers that stand at the same token.

    Args:
        progress: Of the request.
        layers: Which.
        chunk: Tokens at most; a page at least.
        source: Index into `Request.sources`.
        floor: Token to stop at, if nothing else stops them before.

    Returns:
        None if nothing is left there that can be loaded.
    """
    stop, request = progress.back[layers.first], progress.request
    floor = max(floor, progress.lost, *progress.front[layers.first : layers.stop])
    if stop <= floor or progress.back[layers.first : layers.stop] != [stop] * layers.size:
        return None
    first = max(floor, behind(request, stop, chunk))
    return Load(request.number, layers, Span(first, stop), source)


def load_all(progress: Progress, chunk: int, source: int) -> Load | None:
    """The next chunk from the back, of all layers.

    Args:
        progress: Of the request.
        chunk: Tokens at most; a page at least.
        source: Index into `Request.sources`.

    Returns:
        None if nothing is left there that can be loaded.
    """
    return load_back(progress, Span(0, progress.request.layers), chunk, source)


def compute_lowest(progress: Progress) -> Compute | None:
    """All tokens of the lowest layer that is not there, as far as dependencies let it."""
    tokens, layers = progress.request.tokens, range(progress.request.layers)
    steps = (compute_layers(progress, Span(layer, layer + 1), tokens) for layer in layers)
    return next((op for op in steps if op is not None), None)


def load_layer(progress: Progress, source: int, upwards: bool) -> Load | None:
    """What is left of one layer.

    Args:
        progress: Of the request.
        source: Index into `Request.sources`.
        upwards: The lowest layer that has something left; otherwise the highest.
    """
    tokens, layers = progress.request.tokens, range(progress.request.layers)
    steps = (
        load_back(progress, Span(layer, layer + 1), tokens, source)
        for layer in (layers if upwards else reversed(layers))
    )
    return next((op for op in steps if op is not None), None)


def suffix_layer(progress: Progress, early: bool) -> Suffix | None:
    """The next layer of the suffix, if it is due.

    Args:
        progress: Of the request.
        early: As soon as its layer is there; otherwise once the whole prefix is there.
    """
    request, layer = progress.request, progress.suffix
    if not request.suffix or layer >= request.layers or progress.answered < layer:
        return None
    due = progress.there(layer) if early else progress.restored
    return Suffix(request.number, layer) if due else None


def must_compute(progress: Progress) -> int:
    """Token up to which nothing can be loaded: nowhere to load from, or a load failed."""
    return progress.lost if progress.request.sources else progress.request.tokens
