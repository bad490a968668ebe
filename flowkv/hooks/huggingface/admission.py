"""Opens one sequence per row of a batch so that all rows begin at the same column."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from flowkv.core.errors import StateError
from flowkv.hooks.huggingface.fill import Fill
from flowkv.hooks.huggingface.inputs import Prompt
from flowkv.hooks.huggingface.sequences import close_all
from flowkv.hooks.huggingface.states import readable
from flowkv.runtime.cache import KV
from flowkv.runtime.sequence import Sequence

_ROUNDS = 3
NOTHING: Mapping[str, Any] = MappingProxyType({})
"""A request says nothing about how its pages should be kept."""


class Admitted(NamedTuple):
    """Rows with their known prefixes in place, or on their way.

    Attributes:
        seqs: One per row; rows of one prompt may share theirs while it is on its way.
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
        wait: Everything is there when the rows are; otherwise `restoring` sees to the rest.
        computable: What is on its way can be computed as well.
    """

    most: int
    tenant: str | None = None
    stateful: bool = False
    fill: Fill | None = None
    care: Mapping[str, Any] = NOTHING
    wait: bool = True
    computable: bool = True


def admit(kv: KV, prompts: Items[Prompt], wish: Wish) -> Admitted:
    """Opens the rows. One past length serves the whole batch: the shortest known one, in columns.

    Raises:
        CapacityError: Too many sequences are open.
    """
    most, pads = wish.most, [prompt.pad for prompt in prompts]
    requests = [-1] * len(pads)
    if wish.stateful and any(pads):
        most = 0  # states of padded rows depend on the padding of their batch
    limit = most
    for _ in range(_ROUNDS):
        seqs = _open(kv, prompts, requests, (most, limit), wish)
        if not any(map(reach, seqs)):
            return Admitted(seqs, 0, None)
        base = min(pad + reach(seq) for pad, seq in zip(pads, seqs, strict=True))
        cut = base if wish.fill is None else wish.fill.cut(base, pads)
        if cut == base and _align(kv, prompts, seqs, base, wish):
            states = [seq.state for seq in seqs if seq.state is not None]
            if not wish.stateful:
                return Admitted(seqs, base, None)
            if len(states) == len(seqs) and all(map(readable, states)):
                return Admitted(seqs, base, states)
            base = cut = 0
        if cut == base and not wish.wait and not wish.stateful:
            limit = base  # some are on their way that nobody needs
        else:
            most = limit = cut if cut < base or wish.stateful else 0
        requests = discard(kv, seqs)
    return Admitted(_open(kv, prompts, requests, (0, 0), wish), 0, None)


def _open(
    kv: KV, prompts: Items[Prompt], requests: Items[int], most: tuple[int, int], wish: Wish
) -> list[Sequence]:
    seqs: list[Sequence] = []
    slack = 0 if wish.stateful else kv.page_size - 1  # a row is cut within a page, if need be
    most_columns, limit = most
    try:
        for row, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            tokens = min(most_columns, limit + slack) - prompt.pad
            seq = _shared(prompts, seqs, row)
            if seq is None:
                seq = kv.open(
                    prompt.tokens,
                    tenant=wish.tenant,
                    salts=prompt.salts,
                    limit=max(tokens, 0),
                    reuse=tokens > 0,
                    state=wish.stateful,
                    request=request,
                    wait=wish.wait,
                    computable=wish.computable,
                    **wish.care,
                )
            seqs.append(seq)
            limit = min(limit, prompt.pad + reach(seq))
    except BaseException:
        close_all(seqs)
        raise
    return seqs


def _shared(prompts: Items[Prompt], seqs: Items[Sequence], row: int) -> Sequence | None:
    """The sequence of an earlier row of the same prompt, of which something is on its way."""
    prompt = prompts[row]
    for earlier, seq in zip(prompts, seqs, strict=False):
        alike = earlier.pad == prompt.pad and earlier.salts == prompt.salts
        alike = alike and np.array_equal(earlier.tokens, prompt.tokens)
        if alike and seq.restoration is not None:
            return seq
    return None


def reach(seq: Sequence) -> int:
    """Where the known prefix of a sequence ends, once what is on its way is there."""
    coming = 0 if seq.restoration is None else seq.restoration.tokens
    return max(seq.length, coming)  # a saved state reaches further than its whole pages


def _align(kv: KV, prompts: Items[Prompt], seqs: list[Sequence], base: int, wish: Wish) -> bool:
    """Cuts every row to column `base`; False if a sliding window or a state does not allow it.

    What is on its way is not cut: it may end within a page of the others.
    """
    for prompt, seq in zip(prompts, seqs, strict=True):
        length, end = max(base - prompt.pad, 0), reach(seq)
        if end > length and wish.stateful:
            return False
        if seq.restoration is not None:
            if end - length >= kv.page_size:
                return False
        elif end > length:
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
    requests = []
    for seq in seqs:
        requests.append(seq.request)
        seq.request = -1  # it goes on in another sequence
    own = list(dict.fromkeys(seqs))
    uncount(kv, sum(len(seq.tokens) for seq in own), sum(seq.reused for seq in own))
    close_all(own)
    seqs.clear()
    return requests


def abort(kv: KV, requests: Items[int]) -> None:
    """Tells policies that requests do not go on."""
    with kv.lock:
        for request in requests:
            kv.visits.abort(request)


def uncount(kv: KV, seen: int, reused: int) -> None:
    """Takes tokens out of the statistics that were counted for the same request before."""
    with kv.lock:
        kv.seen_most = max(kv.seen_most, kv.tokens_seen)
        kv.reused_most = max(kv.reused_most, kv.tokens_reused)
        kv.tokens_seen -= seen
        kv.tokens_reused -= reused
