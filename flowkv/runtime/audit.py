"""Audits: sampled pages that were restored are computed once more, and compared (DESIGN D5).

Digests find what happened to a page after it was written. An audit finds what they cannot: a page
that was wrong when it was written, by a broken kernel or codec, by weights that were not what they
were called, or under another page's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flowkv.core.errors import CapacityError, StateError
from flowkv.core.layout import CODECS, codec_of
from flowkv.observe.events import Audited, Quarantined
from flowkv.runtime.batch import Step
from flowkv.runtime.comparison import compare
from flowkv.runtime.index import Block
from flowkv.runtime.samples import Verdict
from flowkv.runtime.sequence import Sequence

if TYPE_CHECKING:
    from flowkv.runtime.cache import KV

REASON = "audit"
"""What `Quarantined` events of audits say."""


class Audit:
    """The audit of one page number of a sequence, in all layer groups.

    Attributes:
        page: The number.
        twin: A sequence with the same pages before it, and the page's tokens still to be computed
            in it. Its own pages are never published.
        sound: False once a page was found that is not what the model computes.
    """

    def __init__(self, kv: KV, seq: Sequence, page: int, twin: Sequence) -> None:
        self._kv, self._seq, self.page, self.twin = kv, seq, page, twin
        self.sound = True

    def judge(self) -> None:
        """Compares what `twin` has computed with what was restored, and quarantines what differs.

        Nothing is said of a page that was given up, cut off or not computed meanwhile.
        """
        with self._kv.lock:
            seq, twin, size = self._seq, self.twin, self._kv.page_size
            if twin.closed or seq.closed or twin.length < (self.page + 1) * size:
                _skip(self._kv, seq, self.page)
            else:
                for group in range(len(seq.blocks)):
                    self._judge(group)

    def _judge(self, group: int) -> None:
        seq, number, samples = self._seq, self.page, self._seq.planner.store.samples
        key = seq.key(group, number)
        block = seq.blocks[group][number] if number < len(seq.blocks[group]) else None
        if block is None or block.gone:
            samples.skip(key)
        elif tier := samples.take(key):
            self._compare(group, block, tier)

    def _compare(self, group: int, block: Block, tier: str) -> None:
        seq, number, planner = self._seq, self.page, self._seq.planner
        page, computed = (
            int(planner.tables.pages[group][line.row, number]) for line in (seq, self.twin)
        )
        past = max(block.fidelity, self.twin.fidelity) if number else 0
        store = planner.store
        verdict = compare(
            store.pool(group),
            store.forms[group],
            page,
            computed,
            lossiest=CODECS[past],
            layers=planner.geometry.groups[group].layers,
        )
        store.samples.judged(verdict)
        told = Audited(
            tier=tier,
            group=group,
            page=number,
            codec=codec_of(page),
            error=verdict.error,
            bound=verdict.bound,
        )
        store.bus.emit(told)
        if not verdict.sound:
            self.sound = False
            self._condemn(group, tier, verdict)

    def _condemn(self, group: int, tier: str, verdict: Verdict) -> None:
        """Forgets a page on every tier, and all that may have been computed from it."""
        kv, seq, store = self._kv, self._seq, self._seq.planner.store
        key = seq.key(group, self.page)
        doomed = [store.index.find(key)]
        for g in range(len(seq.blocks)):  # a layer of one group reads those of all others
            for branch in store.index.branches(seq.key(g, self.page)):
                doomed += branch
        store.bus.emit(Quarantined(tier=tier, key=key, reason=REASON))
        for block in doomed:
            if block is not None:
                store.condemn(block)
        kv.visits.purge()
        kv.queue.purge(store.index.slot)
        for other in kv._open.values():
            other.publishable &= not other.forgotten
        kv.warn(
            "audit",
            f"A page restored from {tier} is not what the model computes: it is "
            f"{verdict.error:.3g} of its size away, and {verdict.bound:.3g} is allowed. It was "
            "forgotten, and all that continues it. Run `flowkv scrub` on the store, and check the "
            "namespace, if you gave one: it must change with the weights.",
        )


def due(kv: KV, seq: Sequence) -> list[int]:
    """Numbers of the pages of a sequence that are to be audited, first to last."""
    with kv.lock:
        samples = seq.planner.store.samples
        if not samples or seq.closed:
            return []
        pages = min(seq.length, seq.known) // kv.page_size
        return [
            page
            for page in range(pages)
            if any(
                seq.blocks[g][page] is not None and samples.waiting(seq.key(g, page))
                for g in range(len(seq.blocks))
            )
        ]


@contextmanager
def audit(kv: KV, seq: Sequence, page: int) -> Iterator[Audit | None]:
    """One audit: within, the page's tokens are to be computed in `twin`, then `judge` be called.

    None where they cannot: the pages before are not all there (those of a sliding window, say),
    the model keeps a recurrent state, or there is no room. That is counted.
    """
    twin = _twin(kv, seq, page)
    if twin is None:
        _skip(kv, seq, page)
        yield None
        return
    try:
        yield Audit(kv, seq, page, twin)
    finally:
        twin.close()


def _skip(kv: KV, seq: Sequence, page: int) -> None:
    with kv.lock:
        for group in range(len(seq.blocks)):
            seq.planner.store.samples.skip(seq.key(group, page))


def _twin(kv: KV, seq: Sequence, page: int) -> Sequence | None:
    """A sequence that ends where a page of another one begins."""
    with kv.lock:
        planner, size = seq.planner, kv.page_size
        if planner is not kv.planner or not kv._may_publish(seq) or seq.state is not None:
            return None
        try:
            twin = kv._sequence(planner, None, seq.salts)
        except CapacityError:
            return None
        try:
            twin.tenant, twin.namespace, twin.chains = seq.tenant, seq.namespace, seq.chains
            twin.owner, twin.publishable = seq.owner, False
            twin.note(seq.tokens[: (page + 1) * size])
            tokens, _ = kv.restorer.attach(twin, page)
            if tokens == page * size:
                if planner.sealer:
                    planner.sealer.exempt(twin.row)
                return twin
        except BaseException:
            twin.close()
            raise
        twin.close()
        return None


def steps(kv: KV, seqs: Items[Sequence], *, whole: bool = False) -> Iterator[Step]:
    """Steps that recompute what is to be audited, each entered while the loop body runs.

    A sequence that a wrong page was found in ends before it afterwards, as long as part of its
    prompt is still to be computed: what is wrong is computed with it then.

    Args:
        kv: The cache.
        seqs: Sequences in no step.
        whole: Cut those too whose prompt is computed to its end, and nothing behind it.
    """
    for seq in seqs:
        for page in due(kv, seq):
            if seq.length < (page + 1) * kv.page_size:
                break  # it was cut
            with audit(kv, seq, page) as case:
                step = _step(kv, case) if case is not None else None
                if case is None or step is None:
                    continue
                with step:
                    yield step
                case.judge()
            if not case.sound:
                _cut(kv, seq, page, whole=whole)


def _step(kv: KV, case: Audit) -> Step | None:
    first = case.page * kv.page_size
    try:
        step = kv.step([case.twin], [case.twin.tokens[first:].copy()])
    except CapacityError:
        case.judge()  # which counts it as skipped
        return None
    step.audits = True
    return step


def _cut(kv: KV, seq: Sequence, page: int, *, whole: bool) -> None:
    with kv.lock:
        if seq.closed or seq.position >= len(seq.tokens) + whole:
            return
        try:
            seq.planner.shorten(seq, page)
        except StateError:  # it reaches behind a window
            seq.planner.shorten(seq, 0)
        kept = (block for blocks in seq.blocks for block in blocks if block is not None)
        seq.publishable = not any(block.gone for block in kept)


def run(kv: KV, seq: Sequence, forward: Callable[[Step], Any]) -> int:
    """See `KV.audit`."""
    samples = seq.planner.store.samples
    before = samples.mismatches
    for step in steps(kv, [seq]):
        forward(step)
    return samples.mismatches - before


def mend(
    kv: KV,
    seqs: Items[Sequence],
    forward: Callable[[Step], Any],
    outputs: list[Any],
    chunk: int,
) -> list[Any]:
    """Audits prompts that were just restored to their end, and computes anew what was wrong.

    Args:
        kv: The cache.
        seqs: Their sequences.
        forward: Called with each step.
        outputs: What `forward` returned for the end of each prompt.
        chunk: Most tokens in one step.

    Returns:
        The outputs, those of prompts that were wrong replaced.
    """
    for row, seq in enumerate(seqs):
        for step in steps(kv, [seq], whole=True):
            forward(step)
        if not seq.closed:
            for step in kv.prefill([seq], chunk=chunk):
                outputs[row] = forward(step)
    return outputs
