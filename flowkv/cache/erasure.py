"""Erases prompts, tenants and models from every tier, and proves it.

First what others wrote is learnt from the tiers' own lists, then all is erased, and then the tiers
are asked again. A tier that cannot prove it is named, after all others have erased.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.cache.index import Block
from flowkv.cache.sequence import Sequence
from flowkv.cache.store import PageStore
from flowkv.core.errors import StoreError
from flowkv.core.keys import ROOT
from flowkv.tiers.base import FrameInfo, Tier

_PAUSE_S = 0.1


class Realm(NamedTuple):
    """Whose frames are meant: those that carry what is said here.

    Attributes:
        tenant: Tenant salt; None for any.
        namespace: Namespace digest; None for any.
    """

    tenant: bytes | None
    namespace: bytes | None

    def holds(self, info: FrameInfo | Block) -> bool:
        """Whether a frame or block is meant."""
        tenant, namespace = self.tenant in (None, info.tenant), self.namespace
        return tenant and namespace in (None, info.namespace)

    def covers(self, realm: tuple[bytes, bytes, int]) -> bool:
        """Whether ghosts of a namespace, tenant and group are meant."""
        namespace, tenant, _ = realm
        return self.tenant in (None, tenant) and self.namespace in (None, namespace)


def forget_realm(store: PageStore, realm: Realm) -> int:
    """Erases all blocks of a tenant or a model, and proves it. Callers hold the KV lock.

    Returns:
        Blocks erased.

    Raises:
        StoreError: A tier cannot prove that it holds nothing of them any more.
    """
    try:
        unseen = _learn(store, realm)
        doomed = [block for block in store.index if realm.holds(block)]
        return _erase(store, doomed, realm.holds, unseen)
    finally:
        store.index.ghosts.bury_realm(realm.covers)


def forget_prompt(store: PageStore, seq: Sequence) -> int:
    """Erases what only a prompt, and what continues it, uses. Callers hold the KV lock.

    Pages that other prompts continue stay. Pages whose tokens this process does not know (after a
    restart) go with the last full page of the prompt, be it that they continue it otherwise.

    Args:
        store: Where the blocks are known.
        seq: A sequence of the prompt, freshly opened.

    Returns:
        Blocks erased.

    Raises:
        StoreError: A tier cannot prove that it holds nothing of them any more.
    """
    doomed: dict[int, Block] = {}
    shared = [0] * len(seq.blocks)
    try:
        unseen = _learn(store, Realm(seq.tenant, seq.namespace))
        shared = [_doom(store, seq, group, doomed) for group in range(len(seq.blocks))]
        return _erase(store, list(doomed.values()), lambda _: False, unseen)
    finally:
        keys = {block.key for block in doomed.values()}
        for group, pages in enumerate(shared):
            _bury(store, seq, group, pages, keys)


def _bury(store: PageStore, seq: Sequence, group: int, shared: int, keys: set[bytes]) -> None:
    """Drops what is left of a group's pages behind the shared ones, and of all that went on."""
    last = len(seq.tokens) // seq.chains[group].page_size
    if last:
        own = {seq.key(group, page) for page in range(min(shared, last - 1), last)}
        store.index.ghosts.bury(keys | own)
    else:  # what began with it is not known by its tokens any more: all beginnings go
        realm = seq.namespace, seq.tenant, group
        store.index.ghosts.bury_realm(lambda other: other == realm)


def _doom(store: PageStore, seq: Sequence, group: int, doomed: dict[int, Block]) -> int:
    """Adds a group's blocks; returns how many pages at the beginning stay, as others use them."""
    size, realm = seq.chains[group].page_size, (seq.namespace, seq.tenant, group)
    last = len(seq.tokens) // size
    for page in range(last, -1, -1):
        above, rest, others = seq.parent_key(group, page), seq.tokens[page * size :], False
        parts: dict[int, Block] = {}  # single layers of the page above, of an earlier version
        for branch in store.index.branches(above):
            head = branch[0]
            if (head.namespace, head.tenant, head.group) != realm or head.slot in doomed:
                continue
            if head.kind == "memo":
                parts |= {block.slot: block for block in branch}
                continue
            # Above the last page, states that end within the prompt are its own.
            if (page == last or head.kind == "state") and _continues(head, above, rest):
                doomed |= {block.slot: block for block in branch}
            else:
                others = True
        if others or page == 0:
            return page
        doomed |= parts
        own = store.index.find(above)
        if own is not None:
            doomed[own.slot] = own
    return 0


def _continues(head: Block, above: bytes, rest: NDArray[np.uint32]) -> bool:
    """Whether a branch below a key is that of the tokens that follow it."""
    if head.parent != above or head.tokens is None:
        return len(rest) == 0 or above != ROOT
    both = min(len(rest), len(head.tokens))
    return bool(np.array_equal(head.tokens[:both], rest[:both]))


def _learn(store: PageStore, realm: Realm) -> dict[int, str]:
    """Makes those frames known that others wrote, or that are only in a tier's own list.

    Returns:
        Numbers of tiers that cannot say what they hold, and why.
    """
    unseen = {}
    for number, tier in enumerate(store.tiers):
        if problem := _survey(tier):
            unseen[number] = problem
        store.learn(number, realm.holds)
    return unseen


def _survey(tier: Tier) -> str:
    """Has a tier look anew at what others wrote; why it cannot, "" if it has."""
    survey: Callable[[], None] | None = getattr(tier, "survey", None)
    try:
        if survey is not None:
            survey()
    except StoreError as error:
        return error.problem
    return ""


def _erase(
    store: PageStore,
    doomed: list[Block],
    meant: Callable[[FrameInfo], bool],
    unseen: dict[int, str],
) -> int:
    """Erases blocks from everywhere, then asks every tier whether that is so."""
    keys = {block.key for block in doomed}
    problems = [
        problem
        for number in range(len(store.tiers))
        if (problem := _erase_from(store, number, keys, meant) or unseen.get(number, ""))
    ]
    for block in doomed:
        store.strike(block)
        store.forget(block)
    if problems:
        raise StoreError(
            f"{len(doomed)} blocks are forgotten, but not proven to be erased: "
            + "; ".join(problems),
            "Mend or close those tiers, and forget again",
        )
    return len(doomed)


def _erase_from(
    store: PageStore, number: int, keys: set[bytes], meant: Callable[[FrameInfo], bool]
) -> str:
    """Erases frames of one tier; why it cannot be proven that none is left, "" if it was."""
    tier, gone = store.tiers[number], set(keys)
    if any((moving := store.mover.on_the_way(key)) and moving.tier == number for key in keys):
        return f"{tier.name} has not answered yet whether it stored some"
    for last in (False, False, True):
        if tier.writable:
            try:
                tier.erase(list(gone))
            except StoreError as error:
                if last or not store.mover.lanes[number].busy:
                    return f"{tier.name}: {error.problem}"
                store.drain(_PAUSE_S)  # some may just be read
                continue
        if problem := _survey(tier):
            return problem
        left = {entry.key for entry in tier.scan() if entry.key in keys or meant(entry.info)}
        if not left:
            return ""
        if not tier.writable:
            return f"{tier.name} holds {len(left)} of them and can only be read here"
        gone |= left
    return f"{tier.name} holds {len(left)} of them still, or again: others write to it"
