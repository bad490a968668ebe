"""Opens one sequence per row of a batch so that all rows begin at the same column."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType
from typing import Any, NamedTuple

from flowkv.core.errors import StateError
from flowkv.hooks.huggingface.fill import Fill
from flowkv.hooks.huggingface.inputs import Prompt
from flowkv.hooks.huggingface.rows import close_all
from flowkv.hooks.huggingface.states import readable
from flowkv.runtime.cache import KV
from flowkv.runtime.sequence import Sequence

_ROUNDS = 3
NOTHING: Mapping[str, Any] = MappingProxyType({})
"""A request says nothing about how its pages should be kept."""


class Admitted(NamedTuple):
    """Rows with their known prefixes in place.

    Attributes:
        seqs: One per row.
        base: Columns that need no computing, the same for all rows.
        states: One per row, for recurrent layers; None without.
    """

    seqs: list[Sequence]
    base: int
    states: list[Mapping[str, Any]] | None


class Wish(NamedTuple):
    """What may be reused.

    Attributes:
        most: Most columns.
        tenant: Whose pages; None for the cache's own tenant.
        stateful: Recurrent layers: only where all rows have a state.
        fill: What fills placeholders, which cannot be cut anywhere.
        care: `session`, `lease` and `retain` for `KV.open`, as far as they are said.
    """

    most: int
    tenant: str | None = None
    stateful: bool = False
    fill: Fill | None = None
    care: Mapping[str, Any] = NOTHING


def admit(kv: KV, prompts: Items[Prompt], wish: Wish) -> Admitted:
    """Opens the rows. One past length serves the whole batch: the shortest known one, in columns.

    Raises:
        CapacityError: Too many sequences are open.
    """
    most, pads = wish.most, [prompt.pad for prompt in prompts]
    requests = [-1] * len(pads)
    if wish.stateful and any(pads):
        most = 0  # states of padded rows depend on the padding of their batch
    for _ in range(_ROUNDS):
        seqs = _open(kv, prompts, requests, most, wish)
        if not any(seq.length for seq in seqs):
            return Admitted(seqs, 0, None)
        base = min(pad + seq.length for pad, seq in zip(pads, seqs, strict=True))
        cut = base if wish.fill is None else wish.fill.cut(base, pads)
        if cut == base and _align(kv, prompts, seqs, base, wish):
            states = [seq.state for seq in seqs if seq.state is not None]
            if not wish.stateful:
                return Admitted(seqs, base, None)
            if len(states) == len(seqs) and all(map(readable, states)):
                return Admitted(seqs, base, states)
            base = cut = 0
        most = cut if cut < base or wish.stateful else 0
        requests = discard(kv, seqs)
    return Admitted(_open(kv, prompts, requests, 0, wish), 0, None)


def _open(
    kv: KV, prompts: Items[Prompt], requests: Items[int], most: int, wish: Wish
) -> list[Sequence]:
    seqs: list[Sequence] = []
    slack = 0 if wish.stateful else kv.page_size - 1  # a row is cut within a page, if need be
    limit = most
    try:
        for prompt, request in zip(prompts, requests, strict=True):
            tokens = min(most, limit + slack) - prompt.pad
            seq = kv.open(
                prompt.tokens,
                tenant=wish.tenant,
                salts=prompt.salts,
                limit=max(tokens, 0),
                reuse=tokens > 0,
                state=wish.stateful,
                request=request,
                **wish.care,
            )
            seqs.append(seq)
            limit = min(limit, prompt.pad + seq.length)
    except BaseException:
        close_all(seqs)
        raise
    return seqs


def _align(kv: KV, prompts: Items[Prompt], seqs: list[Sequence], base: int, wish: Wish) -> bool:
    """Cuts every row to column `base`; False if a sliding window or a state does not allow it."""
    for prompt, seq in zip(prompts, seqs, strict=True):
        length = max(base - prompt.pad, 0)
        if seq.length > length:
            if wish.stateful:
                return False
            try:
                kv.truncate(seq, length)
            except StateError:
                return False
            seq.note(prompt.tokens[length:])
            uncount(kv, 0, seq.reused - length)
            seq.reused = length
    return True


def discard(kv: KV, seqs: list[Sequence]) -> list[int]:
    """Closes sequences that were opened in vain, which do not count; returns their requests."""
    requests = [seq.request for seq in seqs]
    for seq in seqs:
        seq.request = -1  # it goes on in another sequence
    uncount(kv, sum(len(seq.tokens) for seq in seqs), sum(seq.reused for seq in seqs))
    close_all(seqs)
    return requests


def abort(kv: KV, requests: Items[int]) -> None:
    """Tells policies that requests do not go on."""
    with kv.lock:
        for request in requests:
            kv.visits.abort(request)


def uncount(kv: KV, seen: int, reused: int) -> None:
    """Takes tokens out of the statistics that were counted for the same request before."""
    with kv.lock:
        kv.tokens_seen -= seen
        kv.tokens_reused -= reused
