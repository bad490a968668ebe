"""Erases prompts: their own pages, and everything that continues them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
    size, realm = seq.chains[group].page_size, (seq.namespace, seq.tenant, group)
    last = len(seq.tokens) // size
    for page in range(last, -1, -1):
        above, rest, others = seq.parent_key(group, page), seq.tokens[page * size :], False
        for branch in store.index.branches(above):
            head = branch[0]
            if (head.namespace, head.tenant, head.group) != realm or head.slot in doomed:
                continue
            # Above the last page, states that end within the prompt are its own.
            if (page == last or head.kind == "state") and _continues(head, above, rest):
                doomed |= {block.slot: block for block in branch}
            else:
                others = True
        if others or page == 0:
            return
        own = store.index.find(above)
        if own is not None:
            doomed[own.slot] = own


def _continues(head: Block, above: bytes, rest: NDArray[np.uint32]) -> bool:
    """Whether a branch below a key is that of the tokens that follow it."""
    if head.parent != above or head.tokens is None:
        return len(rest) == 0 or above != ROOT
    both = min(len(rest), len(head.tokens))
    return bool(np.array_equal(head.tokens[:both], rest[:both]))


def _erase(store: Store, doomed: list[Block]) -> int:
    for block in doomed:
        store.forget(block)
    return len(doomed)
