"""Proven erasure of prompts, tenants and models from every tier.

First the frames of other writers are listed from the tiers, then all blocks are erased, and then
the tiers are listed again. A tier without proof is named in the error, after all others have
erased. Meanwhile no other cache stores on a tier that has an erasure log, and the erasure is
recorded in the log before it ends: caches that share the tier drop the blocks before they open
the next prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.cache.index import Block
from flowkv.cache.sequence import Sequence
from flowkv.cache.store import PageStore
from flowkv.core.errors import StoreError
from flowkv.core.keys import ROOT
from flowkv.observe.events import Forgotten
from flowkv.tiers.base import FrameInfo, Tier
from flowkv.tiers.erasure_log import MOST_KEYS, Erased, new_entry, realm_name

_ERASING_S = 0.1


class Realm(NamedTuple):
    """A selection of frames and blocks by tenant and namespace.

    Attributes:
        tenant: Tenant salt; None for any.
        namespace: Namespace digest; None for any.
    """

    tenant: bytes | None
    namespace: bytes | None

    def holds(self, info: FrameInfo | Block) -> bool:
        """Return whether a frame or block belongs to the realm."""
        return self.covers((info.namespace, info.tenant, 0))

    def covers(self, realm: tuple[bytes, bytes, int]) -> bool:
        """Return whether ghosts of a (namespace, tenant, group) belong to the realm."""
        namespace, tenant, _ = realm
        return self.tenant in (None, tenant) and self.namespace in (None, namespace)


def forget_realm(store: PageStore, realm: Realm) -> int:
    """Erase all blocks of a tenant or a model, and prove it. Callers hold the KV lock.

    Returns:
        Number of erased blocks.

    Raises:
        StoreError: A tier cannot prove that it holds none of them any more.
    """
    store.tails.drop()
    store.stack.drop_bases(lambda tenant, namespace: realm.covers((namespace, tenant, 0)))
    names = _Names(realms=[realm_name(*realm)])
    try:
        with _alone(store, realm) as problems:
            doomed = [block for block in store.index if realm.holds(block)]
            return _erase(store, doomed, realm, names, problems, realm.holds)
    finally:
        store.index.ghosts.bury_realm(realm.covers)


def forget_prompt(store: PageStore, seq: Sequence) -> int:
    """Erase a prompt's blocks and all that continue it. Callers hold the KV lock.

    Pages that other prompts continue stay. Pages below the last full page of the prompt with tokens
    that are unknown in this process (after a restart) are erased, even if they continue it
    differently: for a prompt of less than a page, all pages of its tenant with unknown tokens.

    Args:
        store: Store of the blocks.
        seq: A sequence of the prompt, freshly opened.

    Returns:
        Number of erased blocks.

    Raises:
        StoreError: A tier cannot prove that it holds none of them any more.
    """
    doomed: dict[int, Block] = {}
    shared, realm = [0] * len(seq.blocks), Realm(seq.tenant, seq.namespace)
    store.tails.drop()
    try:
        with _alone(store, realm) as problems:
            shared = [_doom(store, seq, group, doomed) for group in range(len(seq.blocks))]
            names = _names(seq, shared)
            return _erase(store, list(doomed.values()), realm, names, problems)
    finally:
        keys = {block.key for block in doomed.values()}
        for group, pages in enumerate(shared):
            _bury(store, seq, group, pages, keys)


def _bury(store: PageStore, seq: Sequence, group: int, shared: int, keys: set[bytes]) -> None:
    """Drop the ghosts of a group's pages behind the shared ones, and of all their continuations."""
    last = len(seq.tokens) // seq.chains[group].page_size
    if last:
        own = {seq.key(group, page) for page in range(min(shared, last - 1), last)}
        store.index.ghosts.bury(keys | own)
    else:  # ghosts have no tokens to compare with a prompt of less than a page: all of them go
        realm = seq.namespace, seq.tenant, group
        store.index.ghosts.bury_realm(lambda other: other == realm)


def _doom(store: PageStore, seq: Sequence, group: int, doomed: dict[int, Block]) -> int:
    """Add a group's blocks to `doomed`; return the number of first pages that other prompts use."""
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
    """Return whether a branch below a key may continue it with the tokens `rest`."""
    if head.parent != above or head.tokens is None:
        return len(rest) == 0 or above != ROOT or head.kind == "page"
    both = min(len(rest), len(head.tokens))
    return bool(np.array_equal(head.tokens[:both], rest[:both]))


def _learn(store: PageStore, realm: Realm) -> dict[int, str]:
    """Publish blocks for all frames of a realm that the tiers list.

    Returns:
        Reasons of the tiers that cannot list their frames, by number.
    """
    unseen = {}
    for number, tier in enumerate(store.stack.tiers):
        if problem := _survey(tier):
            unseen[number] = problem
        store.stack.listing.list_unknown(number, realm.holds)
    return unseen


def _survey(tier: Tier) -> str:
    """Refresh a tier's list of frames; return the reason of a failure, or ""."""
    survey: Callable[[], object] = getattr(tier, "survey", int)
    try:
        survey()
    except StoreError as error:
        return error.problem
    return ""


class _Names(NamedTuple):
    """Keys and realms that an erasure log records for other caches, see `ErasureLog.publish`."""

    keys: Iterable[bytes] = ()
    below: Iterable[bytes] = ()
    realms: Iterable[bytes] = ()


def _names(seq: Sequence, shared: list[int]) -> _Names:
    """Return the names of an erased prompt, given the number of pages that stay in each group."""
    keys, below = list[bytes](), list[bytes]()
    whole = _Names(realms=[realm_name(seq.tenant, seq.namespace)])
    for group, stay in enumerate(shared):
        last = len(seq.tokens) // seq.chains[group].page_size
        if not last:  # no key names a prompt of less than a page: other caches drop its realm
            return whole
        keys += (seq.key(group, page) for page in range(stay, last))
        below += [seq.key(group, last - 1)] if stay == last else []
    return _Names(keys, below) if len(keys) + len(below) <= MOST_KEYS else whole


@contextmanager
def _alone(store: PageStore, realm: Realm) -> Iterator[dict[int, str]]:
    """Keep other caches from storing meanwhile, and learn of a realm's frames; yield failures.

    They are reasons by tier number.
    """
    with store.stack.erasure_logs.erasing() as failed:
        told = {n: f"{store.stack.tiers[n].name}: {e.problem}" for n, e in failed.items()}
        yield _learn(store, realm) | told


def _erase(
    store: PageStore,
    doomed: list[Block],
    realm: Realm,
    names: _Names,
    problems: dict[int, str],
    meant: Callable[[FrameInfo], bool] = lambda _: False,
) -> int:
    """Erase blocks everywhere, check every tier's list, and record the erasure for other caches."""
    keys = {block.key for block in doomed}
    for block in doomed:
        store.stack.unlist_all(block)
    store.forget(*doomed)
    for number, lane in enumerate(store.stack.mover.lanes):
        problem = _erase_from(store, number, keys, meant)
        # Any store of the realm that was forgotten in flight may be one of the prompt's pages.
        if not problem and any(map(realm.holds, lane.stale.values())):
            problem = f"{lane.tier.name} has not answered yet whether it stored some"
        if problem:
            problems[number] = problem
    for number, log in store.stack.erasure_logs.items():
        try:
            if log.alone:
                log.publish(new_entry(*names, proven=number not in problems))
        except StoreError as error:
            problems.setdefault(number, f"{store.stack.tiers[number].name}: {error.problem}")
    if problems:
        raise StoreError(
            f"{len(doomed)} blocks are forgotten, but not proven to be erased: "
            + "; ".join(problems[number] for number in sorted(problems)),
            "Mend or close those tiers, and forget again",
        )
    return len(doomed)


def _erase_from(
    store: PageStore, number: int, keys: set[bytes], meant: Callable[[FrameInfo], bool]
) -> str:
    """Erase frames of one tier; return the reason why that is not proven, "" if it is."""
    tier, gone = store.stack.tiers[number], set(keys)
    for last in (False, False, True):
        if tier.writable:
            try:
                tier.erase(list(gone))
            except StoreError as error:
                if last or not store.stack.mover.lanes[number].busy:
                    return f"{tier.name}: {error.problem}"
                store.writes.drain(_ERASING_S)  # a frame may be being read
                continue
        if problem := _survey(tier):
            return problem
        left = {entry.key for entry in tier.scan() if entry.key in keys or meant(entry.info)}
        if not left and (tier.writable or number not in store.stack.erasure_logs):
            return ""
        if not tier.writable:  # its writer may be storing some now, and will read the log
            count = len(left) or "perhaps some"
            return f"{tier.name} holds {count} of them and can only be read here"
        gone |= left
    return f"{tier.name} holds {len(left)} of them still, or again: others write to it"


# Erasures by other caches: dropped from everywhere here before anything else is looked up.


def hear(store: PageStore, seqs: Iterable[Sequence]) -> int:
    """Drop the blocks that other caches erased since the last call. Callers hold the KV lock.

    Args:
        store: Store of the blocks.
        seqs: The open sequences: those with erased pages keep them, and publish nothing more.

    Returns:
        Number of dropped blocks.
    """
    dropped = 0
    for number, erased in store.stack.erasure_logs.all_news():
        dropped += _drop(store, number, erased)
        for seq in seqs:
            seq.publishable &= not (seq.forgotten or _hit(seq, erased))
    return dropped


def _drop(store: PageStore, number: int, erased: Erased) -> int:
    """Drop the blocks that a tier's log names as erased; return their number."""
    store.tails.drop()
    covers, index = lru_cache(erased.covers), store.index
    doomed = {b: None for b in index if erased.has(b.key) or covers(b.tenant, b.namespace)}
    doomed |= dict.fromkeys(index.below(erased.ends))
    whole = covers if erased.realms or erased.everything else None
    store.stack.lose(list(doomed), number if erased.proven else -1, whole)
    store.forget(*doomed)
    index.ghosts.bury({block.key for block in doomed})
    index.ghosts.bury_realm(lambda realm: covers(realm[1], realm[0]))
    store.bus.emit(Forgotten(tier=store.stack.tiers[number].name, blocks=len(doomed)))
    return len(doomed)


def _hit(seq: Sequence, erased: Erased) -> bool:
    """Return whether an erasure covers a sequence's realm, one of its pages, or a key above it."""
    if erased.covers(seq.tenant, seq.namespace):
        return True
    for group, chain in enumerate(seq.chains):
        for page in range(seq.known // chain.page_size):
            key, end = seq.key(group, page), (page + 1) * chain.page_size
            if erased.has(key) or (erased.ends(key) and seq.known > end):
                return True
    return False
