"""Erases prompts: their own pages, and everything that continues them."""

from __future__ import annotations

import numpy as np

from flowkv.core.keys import ROOT
from flowkv.runtime.index import Block
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.store import Store


def forget_tenant(store: Store, tenant: bytes) -> int:
    """Erases all blocks of a tenant, of every model; returns how many. Callers hold the KV lock."""
    return _erase(store, [block for block in store.index if block.tenant == tenant])


def forget_namespace(store: Store, namespace: bytes) -> int:
    """Erases all blocks of a model; returns how many. Callers hold the KV lock."""
    return _erase(store, [block for block in store.index if block.namespace == namespace])


def forget_prompt(store: Store, seq: Sequence) -> int:
    """Erases what only a prompt, and what continues it, uses. Callers hold the KV lock.

    Pages that other prompts continue stay. Pages whose tokens this process does not know (after a
    restart) go with the last full page of the prompt, be it that they continue it otherwise.

    Args:
        store: Where the blocks are known.
        seq: A sequence of the prompt, freshly opened.

    Returns:
        Blocks erased.
    """
    doomed: dict[int, Block] = {}
    for group in range(len(seq.blocks)):
        _doom(store, seq, group, doomed)
    return _erase(store, list(doomed.values()))


def _doom(store: Store, seq: Sequence, group: int, doomed: dict[int, Block]) -> None:
    index, size = store.index, seq.chains[group].page_size
    last = len(seq.tokens) // size
    for page in range(last, -1, -1):
        above, rest = seq.parent_key(group, page), seq.tokens[page * size :]
        others = False
        for block in index.children(above):
            if block.slot in doomed:
                continue
            if (page == last or block.kind == "state") and _continues(block, seq, group, rest):
                doomed |= {b.slot: b for b in (block, *index.below(block.key))}
            else:
                others |= _related(block, seq, group)
        if others or page == 0:
            return
        own = index.find(above)
        if own is not None:
            doomed[own.slot] = own


def _related(block: Block, seq: Sequence, group: int) -> bool:
    return (block.namespace, block.tenant, block.group) == (seq.namespace, seq.tenant, group)


def _continues(block: Block, seq: Sequence, group: int, rest: np.ndarray) -> bool:
    if not _related(block, seq, group):
        return False
    if block.tokens is None:
        return len(rest) == 0 or block.parent != ROOT
    both = min(len(rest), len(block.tokens))
    return bool(np.array_equal(block.tokens[:both], rest[:both]))


def _erase(store: Store, doomed: list[Block]) -> int:
    for block in doomed:
        store.forget(block)
    return len(doomed)
