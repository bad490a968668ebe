"""Prompts whose prefix is on its way: their fronts are computed meanwhile, the rest behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

from flowkv.runtime.batch import Step
from flowkv.runtime.restoration import Late, Restoration, choose
from flowkv.runtime.sequence import Sequence

if TYPE_CHECKING:
    from flowkv.runtime.cache import KV


def fronts(kv: KV, seqs: Items[Sequence], chunk: int) -> Iterator[Step | Sequence]:
    """Steps over fronts, and each sequence whose front is done, once: settled, in their order.

    Each step is entered while it is out.
    """
    waiting = [seq for seq in seqs if seq.restoration is not None]
    while waiting:
        found = choose([one for seq in waiting if (one := seq.restoration) is not None], chunk)
        mine = found[0].seq if found is not None else waiting[0]
        if found is not None and found[1]:
            part = mine.tokens[mine.length : mine.length + found[1]].copy()
            with kv.step([mine], [part]) as step:
                yield step
            continue
        waiting = [seq for seq in waiting if seq is not mine]
        if mine.restoration is not None:
            mine.restoration.settle()
        yield mine


def prefill(kv: KV, seqs: Items[Sequence], chunk: int) -> Iterator[Step]:
    """The part of `KV.prefill` for sequences that are being restored: computes all of them."""
    for out in fronts(kv, seqs, chunk):
        if isinstance(out, Step):
            yield out
            continue
        if (restoration := out.restoration) is not None:
            end(kv, restoration, ok=restoration.complete())
        yield from kv.prefill([out], chunk=chunk)


def restore(kv: KV, seqs: Items[Sequence], forward: Callable[[Step], Any], chunk: int) -> list[Any]:
    """See `KV.restore`."""
    outputs: dict[int, Any] = {}
    for out in fronts(kv, seqs, chunk):
        if isinstance(out, Step):
            forward(out)
        elif (restoration := out.restoration) is not None:
            outputs[id(out)] = behind(kv, out, forward, restoration, chunk)
    for seq in seqs:
        for step in kv.prefill([seq], chunk=chunk):
            outputs[id(seq)] = forward(step)
    return [outputs.get(id(seq)) for seq in seqs]


def behind(
    kv: KV, seq: Sequence, forward: Callable[[Step], Any], restoration: Restoration, chunk: int
) -> Any:
    """Runs what follows a settled prefix behind it; None if there was nothing, or it was late."""
    output, ok = None, False
    rest = seq.tokens[seq.position : seq.position + chunk].copy()
    try:
        if len(rest):
            with kv.step([seq], [rest]) as step:
                output = forward(step)
            ok = True
        else:
            ok = restoration.complete()
    except Late:
        output = None
    finally:
        end(kv, restoration, ok=ok)
    return output


def end(kv: KV, restoration: Restoration, *, ok: bool) -> None:
    """Ends a restore; what came needed no computing. Of one that is not settled, nothing did."""
    with kv.lock:
        settled = restoration.settled
        restoration.finish(ok=ok)
        came = max(0, restoration.tokens - restoration.front) if settled else 0
        restoration.seq.reused += came
        kv.tokens_reused += came
