"""The sequences of a batch, all at once."""

from __future__ import annotations

from typing import Any

from flowkv.runtime.cache import KV
from flowkv.runtime.sequence import Sequence


def close_all(seqs: list[Sequence], *_: Any) -> None:
    """Closes sequences; a finalizer of caches."""
    for seq in seqs:
        seq.close()
    seqs.clear()


def apart(kv: KV, seqs: list[Sequence]) -> None:
    """Gives every row a sequence of its own."""
    taken = set[int]()
    for row, seq in enumerate(seqs):
        if id(seq) in taken:
            seqs[row] = kv.fork(seq)
            with kv.lock:
                kv.tokens_seen += len(seq.tokens)
                kv.tokens_reused += seq.reused
        taken.add(id(seq))
