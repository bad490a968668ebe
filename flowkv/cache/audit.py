"""Audits: sampled restored pages are recomputed and compared (DESIGN D5).

Digests detect damage to a page after it was written. An audit detects a page that was wrong when it
was written: by a broken kernel or codec, by weights other than its key names, or under another
page's key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from flowkv import kernels
from flowkv.cache.block_table import Planner
from flowkv.cache.index import Block
from flowkv.cache.pool import Forms, PagePool
from flowkv.cache.restore import PrefixMatcher
from flowkv.cache.sequence import Sequence
from flowkv.cache.step import Step
from flowkv.cache.store import PageStore
from flowkv.core.errors import CapacityError, StateError
from flowkv.core.geometry import CODEC_SHIFT, COLD, FIDELITIES, SPECS, PageLayout, codec_of
from flowkv.kernels.loss import bounds, by_rotation
from flowkv.kernels.operands import Pages
from flowkv.kernels.reference import page_views
from flowkv.kvt.tier import CodecTier
from flowkv.observe.events import Audited, Quarantined
from flowkv.policy.pages import Verdict

# Distance of a page from the model's computation in its place, and the bound of that distance.
#
# A token's distance is the Euclidean norm of the difference of its keys (or values) of one head,
# over their own norm, or over the page's root mean square where that is larger. It has three
# causes: rounding, the loss of the page's own codec, and the loss of codecs in the pages before it,
# which the model reads (docs/explain/audit.md has the reasons and the measurements).

ROUNDING = {"float64": 1e-6, "float32": 1e-3, "float16": 0.03, "bfloat16": 0.1}
"""Distance that comes from another order of the same additions, by dtype of the page: the same
forward with other rows beside it, or in other chunks, rounds otherwise in every layer."""

COLD_DRIFT = 0.65
"""Distance that comes from pages in kvt before a token."""

_NOTHING = 1e-30


def compare(
    store: PageStore,
    group: int,
    page: int,
    computed: int,
    lossiest: str,
    near: torch.Tensor | None = None,
) -> Verdict:
    """Compare a restored page with a raw one that the model has just computed.

    Args:
        store: Store of both pages.
        group: Layer group of the pages.
        page: Id of the restored page.
        computed: Id of the computed page.
        lossiest: Codec of the lossiest page that either was computed from.
        near: The computed page as it comes back from the code of the restored one; None where that
            came from no such code.

    Returns:
        Error and bound where their ratio is greatest; the error is infinite if one of the pages
        holds NaN or infinity.
    """
    pool, forms, layers = store.pool(group), store.forms[group], store.geometry.groups[group].layers
    layout = forms.layout(page)
    rounding = ROUNDING[layout.dtype]
    stored = _raw(pool, forms, page)
    fresh = _raw(pool, forms, computed)
    if stored is None or fresh is None:
        return Verdict(math.inf, rounding)
    worst, ratio = Verdict(0.0, rounding), 0.0
    drift = COLD_DRIFT if lossiest == FIDELITIES[COLD] else SPECS[lossiest].drift
    for layer, number in enumerate(layers):
        # The drift comes from the pages before, by the lossiest codec among them and their own
        # past: this one was computed when they were raw, or otherwise encoded, and is recomputed as
        # they are now. K and V of the model's first layer depend on their own token only.
        allowed = rounding + (drift if number else 0.0)
        views = zip(_views(stored, forms.raw, layer), _views(fresh, forms.raw, layer), strict=True)
        (k, wanted_k), (v, wanted_v) = views
        lost = _lost(layout, wanted_k, wanted_v)
        if near is not None:
            pairs = zip(_views(near, forms.raw, layer), (wanted_k, wanted_v), strict=True)
            lost = tuple(_cold_loss(one, wanted) for one, wanted in pairs)
        parts = [(k, wanted_k, lost[0])]
        if not layout.latent:  # latent values are a part of the keys
            parts.append((v, wanted_v, lost[1]))
        for found in _distances(parts, allowed):
            if not math.isfinite(found.error):
                return Verdict(math.inf, found.bound)
            if found.error > ratio * found.bound:
                worst, ratio = found, found.error / found.bound
    return worst


def _distances(
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], allowed: float
) -> Iterator[Verdict]:
    """Yield the verdict of the worst token of each part: (restored, recomputed, codec's loss)."""
    for got, wanted, lost in parts:
        norm = wanted.norm(dim=-1)
        typical = norm.square().mean(-1, keepdim=True).sqrt()
        norm = torch.maximum(norm, typical).clamp_min(_NOTHING)
        error = (got - wanted).norm(dim=-1) / norm
        bound = lost / norm + allowed
        at = int((error / bound).argmax())  # a NaN, if there is one
        yield Verdict(float(error.view(-1)[at]), float(bound.view(-1)[at]))


def _cold_loss(near: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the loss that kvt may have: twice the greatest of a page, at most its tokens' size.

    No less than that of the same token.
    """
    own = (near - wanted).norm(dim=-1)
    most = own.amax(-1, keepdim=True) * 2  # the other was rounded apart
    size = wanted.norm(dim=-1).square().mean(-1, keepdim=True).sqrt()
    return torch.maximum(torch.minimum(most, size), own)


def _lost(layout: PageLayout, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the norm of the greatest loss by the page's codec, for each token of `[Hk, P, D]`."""
    if layout.codec == "raw":
        return k.new_zeros(k.shape[:-1]), v.new_zeros(v.shape[:-1])
    lost_k, lost_v = bounds(layout.codec, k, v)
    if layout.spec.rotates:  # its bound is one of a token, not of its elements
        return by_rotation(k), lost_v.norm(dim=-1)
    return lost_k.norm(dim=-1), lost_v.norm(dim=-1)


def _raw(pool: PagePool, forms: Forms, page: int) -> torch.Tensor | None:
    """Return a page's bytes in the raw layout; None if it cannot be decoded."""
    layout = forms.layout(page)
    held = pool.page_bytes(page, layout.page_bytes)
    if not page >> CODEC_SHIFT:
        return held
    # The pool may be full, so a tensor of its own takes the encoded page and then the decoded one.
    beside = held.new_empty(layout.page_bytes + forms.raw.page_bytes)
    beside[: layout.page_bytes] = held
    places = torch.tensor([0, layout.granules], dtype=torch.int32, device=held.device)
    status = kernels.transcode(beside, places[:1], places[1:], layout, forms.raw)
    return None if bool(status.any()) else beside[layout.page_bytes :]


def _views(page: torch.Tensor, raw: PageLayout, layer: int) -> Iterator[torch.Tensor]:
    """Yield K and V of one layer of a raw page, float64 `[Hk, P, D]`."""
    for view in page_views(Pages(page, raw, layer, ())):
        yield view[0].double()


REASON = "audit"
"""Reason in the `Quarantined` events of audits."""


class Audit:
    """The audit of one page number of a sequence, in all layer groups.

    Args:
        seq: The sequence.
        page: Number of the page.
        twin: A sequence with the same pages before this one, in which the page's tokens are still
            to be computed. Its own pages are never published.
        condemned: Called with the tier of a wrong page and the verdict, once it is forgotten.

    Attributes:
        page: Number of the page.
        twin: The second sequence.
        sound: False once a page differed from the model's computation.
    """

    def __init__(
        self, seq: Sequence, page: int, twin: Sequence, condemned: Callable[[str, Verdict], None]
    ) -> None:
        self._seq, self.page, self.twin, self._condemned = seq, page, twin, condemned
        self._planner, self.sound = Planner.of(seq), True

    def judge(self) -> None:
        """Compare the pages that `twin` computed with the restored ones; quarantine differing ones.

        A page that was forgotten, cut off or not computed meanwhile is counted as skipped.
        """
        planner, seq, twin = self._planner, self._seq, self.twin
        with planner.guard:
            computed = not (twin.closed or seq.closed)
            computed = computed and twin.length >= (self.page + 1) * planner.page_size
            for group, blocks in enumerate(seq.blocks):
                block = blocks[self.page] if computed and self.page < len(blocks) else None
                key, samples = seq.key(group, self.page), planner.store.samples
                if block is None or block.gone:
                    samples.skip(key)
                elif tier := samples.take(key):
                    self._compare(group, block, tier)

    def _compare(self, group: int, block: Block, tier: str) -> None:
        seq, number, planner = self._seq, self.page, self._planner
        page, computed = (
            int(planner.tables.pages[group][line.row, number]) for line in (seq, self.twin)
        )
        past = max(block.fidelity, self.twin.fidelity) if number else 0
        store, near = planner.store, None
        if block.fidelity == COLD:
            near = self._rounded(group, block.key, computed)
            if near is None:
                store.samples.skipped += 1
                return
        verdict = compare(store, group, page, computed, FIDELITIES[past], near)
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

    def _rounded(self, group: int, key: bytes, computed: int) -> torch.Tensor | None:
        """Return the computed page as it comes back from a coded one's code; None without."""
        store = self._planner.store
        fresh = _raw(store.pool(group), store.forms[group], computed)
        tier = next((one for one in store.stack.tiers if isinstance(one, CodecTier)), None)
        if fresh is None or tier is None:
            return None
        body = memoryview(bytearray(fresh.cpu().numpy()))
        near = tier.bases.rounded(key, body, self.page)
        return None if near is None else torch.frombuffer(near, dtype=torch.uint8).to(fresh.device)

    def _condemn(self, group: int, tier: str, verdict: Verdict) -> None:
        """Quarantine a page, and all pages that may have been computed from it."""
        seq, store = self._seq, self._planner.store
        key = seq.key(group, self.page)
        doomed = [*filter(None, (store.index.find(key),))]
        for g in range(len(seq.blocks)):  # a layer of one group reads those of all others
            for branch in store.index.branches(seq.key(g, self.page)):
                doomed += branch
        store.bus.emit(Quarantined(tier=tier, key=key, reason=REASON))
        store.tails.drop()
        store.stack.quarantine(doomed)
        store.forget(*doomed)
        self._condemned(tier, verdict)


def due(seq: Sequence) -> list[int]:
    """Return the numbers of a sequence's pages that wait for their audit, first to last."""
    planner = Planner.of(seq)
    with planner.guard:
        samples = planner.store.samples
        if not samples or seq.closed or seq.dropped:
            return []
        pages = min(seq.length, seq.known) // planner.page_size
        return [
            page
            for page in range(pages)
            if any(
                seq.blocks[g][page] is not None and samples.waiting(seq.key(g, page))
                for g in range(len(seq.blocks))
            )
        ]


class Auditor:
    """Audits of one cache.

    Args:
        restorer: Finds and attaches the pages before the audited one.
        empty: Makes an empty sequence of the same tenant and model as another one.
        step: See `KV.step`.
        condemned: Called with the tier of a wrong page and the verdict, once it is forgotten.
    """

    def __init__(
        self,
        restorer: PrefixMatcher,
        empty: Callable[[Sequence], Sequence],
        step: Callable[[Items[Sequence], Items[Any]], Step],
        condemned: Callable[[str, Verdict], None],
    ) -> None:
        self._restorer, self._planner = restorer, restorer.planner
        self._empty, self._step, self._condemned = empty, step, condemned

    @contextmanager
    def audit(self, seq: Sequence, page: int) -> Iterator[Audit | None]:
        """Open the audit of a page; the caller computes its tokens in `twin`, and calls `judge`.

        Yield None, and count the page as skipped, where they cannot be computed: a page before it
        is missing (outside a sliding window, say), the model keeps a recurrent state, or there is
        no room.
        """
        twin = self._twin(seq, page)
        if twin is None:
            with (planner := Planner.of(seq)).guard:
                for group in range(len(seq.blocks)):
                    planner.store.samples.skip(seq.key(group, page))
            yield None
            return
        try:
            yield Audit(seq, page, twin, self._condemned)
        finally:
            twin.close()

    def _twin(self, seq: Sequence, page: int) -> Sequence | None:
        """Return a sequence that ends where a page of another one begins; None if that fails."""
        planner, size = self._planner, self._planner.page_size
        with planner.guard:
            mine = Planner.of(seq) is planner and planner.publisher.allowed(seq)
            if not mine or seq.state is not None:
                return None
            try:
                twin = self._empty(seq)
            except CapacityError:
                return None
            try:
                twin.owner, twin.publishable = seq.owner, False
                twin.note(seq.tokens[: (page + 1) * size])
                tokens, _ = self._restorer.attach(twin, page)
                if tokens == page * size:
                    if planner.sealer:
                        planner.sealer.exempt(twin.row)
                    return twin
            except BaseException:
                twin.close()
                raise
            twin.close()
            return None

    def steps(self, seqs: Items[Sequence], *, whole: bool = False) -> Iterator[Step]:
        """Yield steps that recompute pages to audit, each entered while the loop body runs.

        A sequence with a wrong page is cut before it, as long as part of its prompt is still to be
        computed: the wrong page is then computed with that part.

        Args:
            seqs: Sequences in no step.
            whole: Whether to cut also a sequence that is computed exactly to its prompt's end.
        """
        for seq in seqs:
            size = Planner.of(seq).page_size
            for page in due(seq):
                if seq.length < (page + 1) * size:
                    break  # the sequence was cut
                with self.audit(seq, page) as case:
                    step = self._begin(case) if case is not None else None
                    if case is None or step is None:
                        continue
                    with step:
                        yield step
                    case.judge()
                if not case.sound:
                    _cut(seq, page, whole=whole)

    def _begin(self, case: Audit) -> Step | None:
        first = case.page * self._planner.page_size
        try:
            step = self._step([case.twin], [case.twin.tokens[first:].copy()])
        except CapacityError:
            case.judge()  # counts the page as skipped
            return None
        step.audits = True
        return step


def _cut(seq: Sequence, page: int, *, whole: bool) -> None:
    planner = Planner.of(seq)
    with planner.guard:
        if seq.closed or seq.position >= len(seq.tokens) + whole:
            return
        try:
            planner.shorten(seq, page)
        except StateError:  # the cut reaches behind a window
            planner.shorten(seq, 0)
        kept = (block for blocks in seq.blocks for block in blocks if block is not None)
        seq.publishable = not any(block.gone for block in kept)


# Explanations of a prompt's cached prefix, and of the reason why it ends there.


class Explanation(msgspec.Struct, frozen=True):
    """The result of `KV.explain`. `str()` of it is one readable line.

    Attributes:
        tokens: Length of the prompt.
        known: Length of its cached prefix.
        residency: Tokens of the cached prefix by the nearest place that holds them.
        reason: Reason why the next token is not cached.
        differs_at: First position where the nearest known prompt differs, if one was found.
        decoding: Use of CUDA graphs by decode steps, or the reason against it; "" without any.
    """

    tokens: int
    known: int
    residency: dict[str, int]
    reason: str
    differs_at: int | None = None
    decoding: str = ""

    def __str__(self) -> str:
        places = ", ".join(f"{n} on {place}" for place, n in self.residency.items())
        held = f" ({places})" if places else ""
        decoding = f"; {self.decoding}" if self.decoding else ""
        return f"{self.known} of {self.tokens} tokens are known{held}: {self.reason}{decoding}"


def explain(restorer: PrefixMatcher, seq: Sequence, limit: int) -> Explanation:
    """Explain the cached prefix of a fresh, empty sequence, attaching nothing.

    Callers hold the KV lock.
    """
    size, store, tokens = restorer.page_size, restorer.store, seq.tokens
    pages = restorer.match(seq, max(0, limit) // size)
    residency: dict[str, int] = {}
    for page_no in range(restorer.first(0, pages), pages):
        block = restorer.find(seq, 0, page_no)
        if block is not None:
            place = "device" if block.page >= 0 else store.stack.tiers[block.tier].name
            residency[place] = residency.get(place, 0) + size
    known = pages * size
    if restorer.resident(seq, pages) == pages and (
        tail := restorer.planner.tails.best_match(seq, pages, limit)
    ):
        known += tail.tokens
        residency["device"] = residency.get("device", 0) + tail.tokens
    if known == limit:
        return Explanation(len(tokens), known, residency, "the last one must run")
    reason, differs = _reason(restorer, seq, pages, limit)
    return Explanation(len(tokens), known, residency, reason, differs)


def _reason(
    restorer: PrefixMatcher, seq: Sequence, pages: int, limit: int
) -> tuple[str, int | None]:
    size, store, tokens = restorer.page_size, restorer.store, seq.tokens
    if (pages + 1) * size > limit:
        left = len(tokens) - pages * size
        return f"the last {left} tokens fill no page, and no page in memory has more of them", None
    lossy = store.index.find(seq.key(0, pages))
    if lossy is not None and lossy.somewhere and lossy.fidelity > store.stack.fidelity:
        codec = FIDELITIES[lossy.fidelity]
        return f"the page at token {pages * size} is stored, but {codec} is too lossy here", None
    if store.context.writes and store.context.writes.declined(store.index.slot(seq.key(0, pages))):
        how = f"admit={store.context.writes.rule!r} did not write it"
        return f"the page at token {pages * size} left memory, and {how}", None
    missing = _missing(restorer, seq, pages)
    if len(missing) < len(seq.blocks):
        groups = ", ".join(f"page {page} in layer group {g}" for g, page in missing.items())
        return f"known in some layer groups, but not {groups}", None
    at = pages * size
    for shared, block in store.index.beginnings.near(seq.place(pages), tokens[at : at + size]):
        if shared == size and block.key != seq.key(0, pages):
            known = "the same tokens are known beside another image, encoder input or encoding"
            return known, at
        if block.tokens is not None and shared < len(block.tokens):
            return f"token {at + shared} differs from the nearest known prompt", at + shared
    if pages == 0 and (others := _others(restorer, seq)):
        return f"no prompt of this tenant and model begins like this; {others}", None
    return f"nothing is known behind token {at}", None


def _missing(restorer: PrefixMatcher, seq: Sequence, pages: int) -> dict[int, int]:
    """Return the first missing page of each group that prevents another page of reuse."""
    missing: dict[int, int] = {}
    for g in range(len(seq.blocks)):
        for page in range(restorer.first(g, pages + 1), pages + 1):
            if restorer.find(seq, g, page) is None:
                missing[g] = page
                break
    return missing


def _others(restorer: PrefixMatcher, seq: Sequence) -> str:
    foreign = sum(block.namespace != seq.namespace for block in restorer.store.index)
    if not foreign:
        return ""
    return f"{foreign} blocks belong to other models, weights, adapters or page sizes"
