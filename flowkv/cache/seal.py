"""Pages behind a sequence: encoded and published once full, reused as tails while they are not.

The ladder (`policy.pages`) chooses the codec of a page. A page that several sequences share gets
the mildest codec that one of them still needs; a page that a step reads, or that a tier is storing,
waits. A page that could not be encoded stays due until the sequence fills its next page: then the
whole line is checked, which takes as long as encoding a few bytes. A page that its codec cannot
hold is not tried again.

Full pages have keys, and are found by them. The tokens that a prompt shares beyond its last full
page are found by comparison instead: in the open page of another sequence, in the page that a
closed one left unfilled (its *tail*), or at the beginning of a full page. For later processes tails
are stored as well, under keys of exactly their tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv import kernels
from flowkv.cache.index import Block, frame_infos, matching
from flowkv.cache.sequence import READY, STEPPING, Sequence, Tables
from flowkv.cache.store import PageStore
from flowkv.core.geometry import CODEC_SHIFT, CODECS
from flowkv.core.keys import ROOT, within
from flowkv.kernels.dispatch import NON_FINITE
from flowkv.kernels.operands import Later
from flowkv.observe.events import Encoded, Published

_MOST_PAGES = 64
"""Most pages encoded at once: their old places are room for the next ones."""


class Pending:
    """Queue of work that waits for device results about pages. Callers hold the KV lock.

    Work added in a step is done at the end of the next one, and not before, however fast the
    device is: so the encoded pages that a step reads depend on steps, not on time.

    Args:
        store: Holds the pages.

    Attributes:
        work: The queue: step, answer, pages and work of each entry; empty in most steps.
    """

    def __init__(self, store: PageStore) -> None:
        self._store, self._steps = store, 0
        self.work: deque[tuple[int, Later, Items[tuple[int, int]], Callable[[bool], None]]] = (
            deque()
        )

    def defer(
        self, answer: Later, pages: Items[tuple[int, int]], work: Callable[[bool], None]
    ) -> None:
        """Do work at once if its values are there and none is queued, else after the next step.

        Args:
            answer: The values that the work waits for.
            pages: (group, page) that neither move nor become free until then.
            work: Called with whether it was deferred.
        """
        if not self.work and answer.ready:
            work(False)
            return
        for group, page in pages:
            self._store.pool(group).lend(page)
        self.work.append((self._steps, answer, pages, work))

    def end_step(self) -> None:
        """Do the work that was added before the step that ends."""
        while self.work and self.work[0][0] < self._steps:
            self._do()
        self._steps += 1

    def run_all(self) -> bool:
        """Do all queued work, and any that it adds, also where some raises.

        Returns:
            Whether there was any.
        """
        settled = bool(self.work)
        try:
            while self.work:
                self._do()
        finally:
            if self.work:
                self.run_all()
        return settled

    def _do(self) -> None:
        self.work[0][1].result()
        _, _, pages, work = self.work.popleft()
        for group, page in pages:
            self._store.pool(group).give_back(page)
        work(True)


class Refusal(NamedTuple):
    """A page that a codec cannot hold.

    Attributes:
        layer: The model's layer.
        page: Number of the page in its sequence.
        codec: Index of the codec.
        status: Status from `kernels.transcode`.
    """

    layer: int
    page: int
    codec: int
    status: int


class _Due(NamedTuple):
    group: int
    page_no: int
    page: int
    codec: int
    rows: list[int]
    block: Block | None


class Sealer:
    """Encoder of sequences' full pages. Callers hold the KV lock.

    Args:
        store: Blocks, pools, and the ladder of each layer group.
        tables: Block tables of all sequences.
        pending: Queue in which encoded pages wait for their status.
        on_refusal: Called for each page that its codec cannot hold, after all changes of state.
    """

    def __init__(
        self,
        store: PageStore,
        tables: Tables,
        pending: Pending,
        on_refusal: Callable[[Refusal], None],
    ) -> None:
        self.store, self.tables, self._on_refusal = store, tables, on_refusal
        self._pending = pending
        self._refusals: list[Refusal] = []
        self._exempt: set[int] = set()  # lines that are not encoded
        self._stays: dict[int, set[tuple[int, int]]] = {}  # refused (group, page number) by line

    def rewind(self, row: int, pages: int) -> None:
        """Discard the recorded refusals of a line from page number `pages` on."""
        stays = {at for at in self._stays.pop(row, ()) if at[1] < pages}
        if stays:
            self._stays[row] = stays

    def fork_row(self, row: int, child: int) -> None:
        """Copy the recorded refusals of a line to a child that begins with its pages."""
        if row in self._stays:
            self._stays[child] = set(self._stays[row])

    def exempt(self, row: int) -> None:
        """Exempt a line from encoding until its sequence is retired."""
        self._exempt.add(row)

    def seal(self, seqs: Iterable[Sequence]) -> None:
        """Encode the due pages of these sequences, which are in no step any more."""
        ready = (seq for seq in seqs if self.tables.state[seq.row] == READY)
        self._encode(seq for seq in ready if seq.row not in self._exempt)

    def retire(self, seq: Sequence) -> None:
        """Encode the published pages that a sequence leaves in the index when it is closed."""
        self._exempt.discard(seq.row)
        self._stays.pop(seq.row, None)
        self._encode([seq], leaves=True)

    def _find(
        self, seq: Sequence, group: int, due: dict[tuple[int, int], _Due], *, leaves: bool
    ) -> None:
        """Add the due pages of a sequence, without those that must wait.

        Args:
            seq: The sequence.
            group: Layer group of the pages.
            due: Due pages by (group, page), extended here.
            leaves: Whether it is about to be closed: only its published pages count, and only
                other lines limit their codec.
        """
        row, length = seq.row, int(seq.lengths[group])
        ladder, line = self.store.forms[group].ladder, self.tables.pages[group][row]
        wanted = [(rung.codec, ladder.border(rung, length)) for rung in ladder.rungs]
        stays = self._stays.get(row, ())
        found: dict[int, int] = {}
        for codec, border in [(ladder.idle, len(seq.blocks[group]))] if leaves else wanted:
            part = line[:border]
            milder = (part >= 0) & (part >> CODEC_SHIFT < codec)
            for page_no in np.flatnonzero(milder).tolist():
                found.setdefault(page_no, codec)  # the furthest rung comes first
        for page_no, codec in found.items():
            page, block = int(line[page_no]), seq.blocks[group][page_no]
            kept = not leaves or (block is not None and not block.gone)
            refused = (group, page_no) in stays if block is None else not block.sealable
            if refused or not kept:
                continue
            rows = self._holders(group, page_no, page, row, block)
            foreign = block is None and self.store.pool(group).references(page) > len(rows)
            users = [other for other in rows if not leaves or other != row]
            if foreign or self._in_use(group, page, users):  # its publisher encodes a foreign page
                continue
            codec = self._mildest(group, page_no, users, codec)
            if codec > page >> CODEC_SHIFT:
                due[group, page] = _Due(group, page_no, page, codec, rows, block)

    def _holders(
        self, group: int, page_no: int, page: int, row: int, block: Block | None
    ) -> list[int]:
        """Return the lines with a page, published or private; its number is the same in each."""
        known = block is not None and not block.gone
        if self.store.pool(group).references(page) == 1 + known:
            return [row]
        column = self.tables.pages[group][:, page_no]
        return [int(row) for row in np.flatnonzero(column == page)]

    def _in_use(self, group: int, page: int, rows: list[int]) -> bool:
        """Return whether a step may be reading the page, or a transfer uses it."""
        stepping = any(self.tables.state[row] == STEPPING for row in rows)
        return stepping or page in self.store.pool(group).lent

    def _mildest(self, group: int, page_no: int, rows: list[int], codec: int) -> int:
        """Return the mildest of a codec and the codecs that these lines need."""
        ladder, tables = self.store.forms[group].ladder, self.tables
        lengths = (tables.lengths[rows] - tables.lost[group, rows]).tolist()
        return min([codec, *(ladder.codec(page_no, length) for length in lengths)])

    def _encode(self, seqs: Iterable[Sequence], *, leaves: bool = False) -> None:
        """Encode the due pages of sequences, as far as there is room for them; see `_find`."""
        due: dict[tuple[int, int], _Due] = {}
        work: dict[tuple[int, int, int], list[_Due]] = {}
        for seq in seqs:
            for group in range(len(seq.blocks)):
                self._find(seq, group, due, leaves=leaves)
        for item in due.values():
            key = item.group, item.page >> CODEC_SHIFT, item.codec
            work.setdefault(key, []).append(item)
        for (group, _, new), items in work.items():
            pages = 0
            while pages < len(items):
                part = items[pages : pages + _MOST_PAGES]
                targets = self.store.allocator.spare(group, len(part), new)
                if not targets:
                    break
                self._transcode(group, part[: len(targets)], targets)
                pages += len(targets)
        if work:
            self.tables.mark_changed()
        self._report()

    def _transcode(self, group: int, items: list[_Due], targets: list[int]) -> None:
        pool, forms = self.store.pool(group), self.store.forms[group]
        old, new = forms.layout(items[0].page), forms.layout(targets[0])
        with pool.encoding(targets):  # `_put` sees its end before any step reads the targets
            source, target = pool.granules([item.page for item in items]), pool.granules(targets)
            status = Later(kernels.transcode(pool.arena, source, target, old, new))
        pages = [(group, page) for page in (*(item.page for item in items), *targets)]
        self._pending.defer(status, pages, partial(self._put, items, targets, status))

    def _put(self, items: list[_Due], targets: list[int], status: Later, late: bool) -> None:
        """Adopt or refuse encoded pages; if `late`, lines may have changed since they were due."""
        group, (refused,) = items[0].group, status.result()
        pool, forms, encoded = self.store.pool(group), self.store.forms[group], 0
        old, new = forms.layout(items[0].page), forms.layout(targets[0])
        assert refused is not None
        for item, page, by_layer in zip(items, targets, refused.numpy(), strict=True):
            held = self._still_due(item) if late else item
            if held is None:
                pool.release(page)
            elif by_layer.any():
                pool.release(page)
                layer = int(np.flatnonzero(by_layer)[0])
                self._refuse(held, layer, int(by_layer[layer]))
            else:
                self._adopt(held, page)
                encoded += 1
        if encoded:
            event = Encoded(
                group=group,
                pages=encoded,
                source=old.codec,
                target=new.codec,
                n_bytes_before=encoded * old.page_bytes,
                n_bytes=encoded * new.page_bytes,
            )
            self.store.bus.emit(event)
        if late:
            self.tables.mark_changed()
            self._report()

    def _still_due(self, item: _Due) -> _Due | None:
        """Return an encoded page with the lines that have it now; None if the old one must stay.

        A page that changed meanwhile is tried again with the sequence's next page.
        """
        group, page, block = item.group, item.page, item.block
        if block is not None and (block.gone or block.page != page):
            return None
        rows = np.flatnonzero(self.tables.pages[group][:, item.page_no] == page).tolist()
        own = block is None and self.store.pool(group).references(page) == len(rows) > 0
        if not (own or block) or self._in_use(group, page, rows):
            return None
        milder = self._mildest(group, item.page_no, rows, item.codec) < item.codec
        return None if milder else item._replace(rows=rows)

    def _adopt(self, item: _Due, page: int) -> None:
        """Replace the old page by the encoded one in its block and in all lines that share it."""
        tables, block = self.tables, item.block
        if block is not None:
            self.store.change(block, page)
        self.store.pool(item.group).replace(item.page, page)
        tables.pages[item.group][item.rows, item.page_no] = page
        tables.fidelity[item.rows] = np.maximum(tables.fidelity[item.rows], item.codec)
        if block is not None:
            block.fidelity = max(block.fidelity, item.codec)
            if not item.page >> CODEC_SHIFT:
                self.store.writes.write_filled(block)

    def _refuse(self, item: _Due, layer: int, status: int) -> None:
        if item.block is not None:
            item.block.sealable = False
            self.store.writes.write_filled(item.block)  # the page is final as it is
        else:
            for row in item.rows:
                self._stays.setdefault(row, set()).add((item.group, item.page_no))
        layers = self.store.geometry.groups[item.group].layers
        self._refusals.append(Refusal(layers[layer], item.page_no, item.codec, status))

    def _report(self) -> None:
        refusals, self._refusals = self._refusals, []
        for refusal in refusals:
            self._on_refusal(refusal)


def describe(refusal: Refusal) -> str:
    """Return a refusal in words: page, layer and reason."""
    reason = "holds NaN or infinity"
    if refusal.status != NON_FINITE:
        reason = "holds numbers beyond the range of its scales"
    codec = CODECS[refusal.codec]
    return f"page {refusal.page} of layer {refusal.layer} {reason}, which {codec} cannot encode"


# Publication of full pages: checked, named by their chain key, and shared from then on.


_Full = tuple[Sequence, int, dict[int, int], int]


class _Check(NamedTuple):
    """Full pages that wait for the device's check for NaN and infinity.

    Attributes:
        seqs: The sequences that will publish the pages.
        exact: See `Publisher.publish`.
        pages: (group, page) of each.
        raw: The raw pages among them, by their group.
        sums: Sums of the raw pages' numbers, group after group.
    """

    seqs: list[Sequence]
    exact: bool
    pages: list[tuple[int, int]]
    raw: dict[int, list[int]]
    sums: Later


class Publisher:
    """Publisher of sequences' full pages. Callers hold the KV lock.

    Args:
        store: Store that the pages are published in.
        tables: Block tables of all sequences.
        allowed: Returns whether a sequence's pages may be published.
        pending: Queue in which full pages wait for the devices' checks.
        on_non_finite: Called with (group, page number) of a page that holds NaN or infinity.
        on_late: Called with sequences that published after the step that filled their pages.
    """

    def __init__(
        self,
        store: PageStore,
        tables: Tables,
        allowed: Callable[[Sequence], bool],
        pending: Pending,
        *,
        on_non_finite: Callable[[int, int], None],
        on_late: Callable[[list[Sequence]], None],
    ) -> None:
        self.store, self.tables, self.allowed = store, tables, allowed
        self.page_size = store.geometry.page_size
        self._on_non_finite = on_non_finite
        self._pending, self._on_late = pending, on_late
        self._checks: list[_Check] = []

    def publish(self, seqs: Iterable[Sequence], *, exact: bool = False) -> None:
        """Publish the sequences' full pages with known tokens in the index.

        Where the index has a page by now, it replaces the sequence's own.

        Args:
            seqs: The sequences.
            exact: Replace a page only by equal bytes: rounding may differ with the other rows of a
                step.
        """
        self.start_checks(seqs, exact=exact)
        self._pending.run_all()

    def start_checks(self, seqs: Iterable[Sequence], *, exact: bool = False) -> None:
        """Start the checks of full pages; publish at once if no device has to be read."""
        due = [each for seq in seqs for each in self._due(seq)]
        pages = [(g, page) for _, g, own, _ in due for page in own.values()]
        owners = {id(seq): seq for seq, *_ in due}
        raw: dict[int, list[int]] = {}
        for g, page in pages:
            if not page >> CODEC_SHIFT:
                raw.setdefault(g, []).append(page)
        check = _Check([*owners.values()], exact, pages, raw, self._ask(raw))
        self._checks.append(check)
        self._pending.defer(check.sums, pages, partial(self._publish_all, check, due))

    def refuse(self) -> None:
        """Make all sequences with pages under check unpublishable."""
        for check in self._checks:
            for seq in check.seqs:
                seq.publishable = False

    def checks(self, seq: Sequence) -> bool:
        """Return whether pages of a sequence are under check."""
        return any(seq is each for check in self._checks for each in check.seqs)

    def _publish_all(self, check: _Check, due: list[_Full], late: bool) -> None:
        self._checks = [other for other in self._checks if other is not check]
        sound, seqs = self._sound(check), check.seqs
        if late:
            seqs = [seq for seq in seqs if seq.row != self.tables.nowhere]
            due = [self._asked(each, sound) for seq in seqs for each in self._due(seq)]
        fresh: list[list[Block]] = [[] for _ in self.store.geometry.groups]
        try:
            for seq, g, own, full in due:
                if check.exact:
                    own = {n: page for n, page in own.items() if not self._differs(seq, g, n)}
                # The pages of a step that another thread runs meanwhile must stay.
                take = not late or self.tables.state[seq.row] != STEPPING
                self._publish_group(seq, g, own, full, fresh[g], sound, take=take)
        finally:
            for blocks in fresh:
                self.store.insert(blocks)
        if late:
            self._on_late(seqs)

    def _asked(self, due: _Full, sound: dict[tuple[int, int], bool]) -> _Full:
        """Cut the pages at the first one that was not checked; a later check covers the rest."""
        seq, g, own, full = due
        full = next((n for n, page in own.items() if (g, page) not in sound), full)
        return seq, g, {n: page for n, page in own.items() if n < full}, full

    def _due(self, seq: Sequence) -> list[_Full]:
        """Return, for each group, the sequence's own full pages by number, and where they end."""
        found, full = list[_Full](), min(seq.length, seq.known) // self.page_size
        for g, blocks in enumerate(seq.blocks):
            start = max(seq.published[g], seq.first_page[g])
            if start < full and self.allowed(seq):
                line = self.tables.pages[g][seq.row, start:full].tolist()
                own = {n: page for n, page in enumerate(line, start) if blocks[n] is None}
                found.append((seq, g, own, full))
        return found

    def _publish_group(
        self,
        seq: Sequence,
        g: int,
        own: Mapping[int, int],
        full: int,
        fresh: list[Block],
        sound: Mapping[tuple[int, int], bool],
        *,
        take: bool,
    ) -> None:
        store, size, keys = self.store, self.page_size, seq.keys(g, full)
        first, fidelity, made = min(own, default=full), seq.fidelity, dict[Block, int]()
        tokens = seq.tokens[first * size : full * size].copy()
        try:
            for page_no, page in own.items():
                if not seq.publishable:
                    break
                block, codec = store.index.find(keys[page_no]), page >> CODEC_SHIFT
                if block is not None and block.page >= 0:
                    if take:
                        seq.fidelity = fidelity = max(fidelity, block.fidelity)
                        self._take(seq, g, page_no, block)
                    else:  # taken with the sequence's next page
                        full = min(full, page_no)
                    continue
                if not sound[g, page]:
                    seq.publishable = False
                    self._on_non_finite(g, page_no)
                    break
                store.stack.supersede(block)
                above = keys[page_no - 1] if page_no else ROOT
                block = store.index.get_or_create(keys[page_no], above, g)
                block.tenant, block.namespace = seq.tenant, seq.namespace
                block.depth, block.placed, at = page_no, seq.in_place, page_no * size
                own_tokens = tokens[at - first * size :][:size]
                if not g:
                    store.tails.outgrow(block.place, own_tokens)
                store.index.set_tokens(block, own_tokens)
                block.fidelity = max(fidelity, codec)
                if seq.care.lease or seq.care.retain:
                    block.lease = seq.care.lease_for(at, at + size)
                made[block], seq.blocks[g][page_no] = page, block
        finally:  # if one raises, the pages before it are published whole
            store.publish_held(g, made)
            fresh += made
        encoded = [block for block, page in made.items() if page >> CODEC_SHIFT]
        # Raw pages with a codec ahead of them are written once they are encoded.
        store.writes.write_filled(*(encoded if store.forms[g].ladder.rungs else made))
        if not seq.publishable:
            return
        seq.published[g] = full
        if made:
            event = Published(group=g, pages=len(made), tokens=len(made) * size, tenant=seq.owner)
            store.bus.emit(event)

    def _take(self, seq: Sequence, group: int, page_no: int, block: Block) -> None:
        """Replace a sequence's own page by the published one."""
        line = self.tables.pages[group][seq.row]
        self.store.hold(block)
        self.store.pool(group).release(int(line[page_no]))
        line[page_no], seq.blocks[group][page_no] = block.page, block
        self.tables.mark_changed()

    def _differs(self, seq: Sequence, group: int, page_no: int) -> bool:
        """Return whether a published page has other bytes than the sequence's own page."""
        block = self.store.index.find(seq.key(group, page_no))
        page = int(self.tables.pages[group][seq.row, page_no])
        if block is None or block.page < 0:
            return False
        pool, n_bytes = self.store.pool(group), self.store.forms[group].layout(page).page_bytes
        if block.page >> CODEC_SHIFT != page >> CODEC_SHIFT:
            return True
        mine, theirs = (pool.page_bytes(one, n_bytes) for one in (page, block.page))
        return not torch.equal(mine, theirs)

    def _ask(self, pages: dict[int, list[int]]) -> Later:
        """Start summing the numbers of raw pages on their devices; zero the padding of stripes."""
        return Later(
            *(
                torch.cat([numbers.sum((1, 2)) for numbers in self._numbers(g, raw, blank=True)])
                for g, raw in pages.items()
            )
        )

    def _sound(self, check: _Check) -> dict[tuple[int, int], bool]:
        """Return for each (group, page) whether it holds finite numbers only.

        Encoded pages were finite when they were encoded.
        """
        sound = dict.fromkeys(check.pages, True)
        for (g, raw), sums in zip(check.raw.items(), check.sums.result(), strict=True):
            assert sums is not None
            for page, finite in zip(raw, sums.isfinite().tolist(), strict=True):
                # A finite sum proves all summands finite, at memory speed; others are checked anew.
                sound[g, page] = finite or bool(self._numbers(g, [page])[0].isfinite().all())
        return sound

    def _numbers(self, group: int, pages: list[int], *, blank: bool = False) -> list[torch.Tensor]:
        """Return the numbers of raw pages: `[pages, layers, elements]` for each adjacent run.

        Args:
            group: Layer group of the pages.
            pages: Ids of raw pages.
            blank: Whether to zero the padding between their stripes.
        """
        layout, pool, parts = self.store.forms[group].raw, self.store.pool(group), []
        step, stripe = layout.granules, layout.stripe_bytes
        ends = [i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + step]
        for first, stop in zip([0, *ends], [*ends, len(pages)], strict=True):
            part = pool.page_bytes(pages[first], (stop - first) * layout.page_bytes)
            part = part.view(stop - first, layout.layers, layout.stripe_stride_bytes)
            if blank and stripe < layout.stripe_stride_bytes:
                # Padding still holds old bytes of the page, of another group or tenant.
                part[..., stripe:].zero_()
            parts.append(part[..., :stripe].view(getattr(torch, layout.dtype)))
        return parts


_WORTH = 4
"""Tails of fewer tokens than one part in 4 of a page are not stored."""


class SharedTokens(NamedTuple):
    """A page in memory that begins with the next tokens of a prompt.

    Attributes:
        tokens: Number of equal tokens.
        fidelity: Index of the lossiest codec in their lineage.
        pages: Id of the page in each group.
        finite: Whether raw pages are known to hold finite numbers only, as full ones are.
    """

    tokens: int
    fidelity: int
    pages: list[int]
    finite: bool = False


class Tails:
    """Partly filled pages, found and kept for reuse. Callers hold the KV lock.

    Args:
        store: Pages and blocks.
        tables: Block tables of all sequences.
        sequences: All open sequences.
        allowed: Returns whether a sequence's pages may be published.
        vouched: Returns whether the model that computed a sequence is still as it was named.
    """

    def __init__(
        self,
        store: PageStore,
        tables: Tables,
        sequences: Mapping[int, Sequence],
        allowed: Callable[[Sequence], bool],
        vouched: Callable[[Sequence], bool],
    ) -> None:
        self.store, self.tables, self.page_size = store, tables, store.geometry.page_size
        self._sequences, self.allowed, self.vouched = sequences, allowed, vouched

    def best_match(self, seq: Sequence, page_no: int, stop: int) -> SharedTokens | None:
        """Return the page with most of a prompt's tokens `[page_no * P, stop)`, or None.

        Fewer tokens than a page (P) are compared.
        """
        first = page_no * self.page_size
        wanted = seq.tokens[first : max(first, min(stop, first + self.page_size - 1))]
        found = self._open(seq, page_no, len(wanted))
        best = max(found, key=lambda one: one.tokens, default=SharedTokens(0, 0, []))
        for tokens, block in self.store.index.beginnings.near(seq.place(page_no), wanted):
            if tokens <= best.tokens:
                break
            if held := self._held(seq, page_no, block):
                tail = self.store.tails.get(block)
                pages = [one.page for one in held] if tail is None else tail
                fidelity = max(one.fidelity for one in held)
                return SharedTokens(tokens, fidelity, pages, finite=tail is None)
        return best if best.tokens else None

    def _held(self, seq: Sequence, page_no: int, block: Block) -> list[Block]:
        """Return a tail, or the pages with a block's tokens in all groups.

        Return [] if the block does not continue this prompt, or a group has no page on its device.
        """
        # An equal key proves that the block depends on the same inputs, images for instance.
        keys = [_key(seq, g, page_no, block.tokens) for g in range(len(seq.chains))]  # type: ignore[arg-type]
        if block.key != keys[0] or block in self.store.tails:
            return [block] if block.key == keys[0] else []
        waiting = self.store.samples.waiting  # unaudited pages are not copied into others
        found = (self.store.find(key) for key in keys if not waiting(key))
        blocks = [one for one in found if one is not None and one.page >= 0]
        return blocks if len(blocks) == len(keys) else []

    def _open(self, seq: Sequence, page_no: int, most: int) -> Iterator[SharedTokens]:
        """Yield the open pages of other sequences that begin with the prompt's next tokens."""
        first = page_no * self.page_size
        for other in self._sequences.values():
            end = min(other.length, other.known, first + most)
            if other is seq or end <= first or other.length // self.page_size != page_no:
                continue
            alike = other.place(page_no) == seq.place(page_no)
            if not alike or not (pages := self._own(other, page_no)):
                continue
            tokens = matching(other.tokens[first:end], seq.tokens[first:])
            differing = {*within(seq.salts, first, tokens)} ^ {*within(other.salts, first, tokens)}
            if differing:  # a run of one token type is compared as a whole: back to its start
                differs = min(salt.position for salt in differing)
                runs = within(seq.salts, first, differs)
                tokens = max((salt.position for salt in runs), default=differs)
            yield SharedTokens(tokens, other.fidelity, pages)

    def _own(self, seq: Sequence, page_no: int) -> list[int]:
        """Return a sequence's own open page in each group, behind known pages; [] if private."""
        late = self._end_ns(seq) <= self.store.context.now_ns()
        if late or not self.allowed(seq) or seq.restoration is not None:
            return []
        if self._hidden(seq, page_no) or any(blocks[page_no] is not None for blocks in seq.blocks):
            return []
        pages = [int(table[seq.row, page_no]) for table in self.tables.pages]
        return pages if min(pages) >= 0 else []

    def _hidden(self, seq: Sequence, page_no: int) -> bool:
        """Return whether a sequence lacks a page, or the page above it is not published."""
        for blocks in seq.blocks:
            above = blocks[page_no - 1] if 0 < page_no < len(blocks) else None
            if len(blocks) <= page_no or (page_no > 0 and (above is None or above.gone)):
                return True
        return False

    def _end_ns(self, seq: Sequence) -> float:
        """Return the end of the lease of a sequence's unfilled page, if its last use is now."""
        lease, now_ns = self.store.lease(seq.care.lease), self.store.context.now_ns()
        return min(now_ns + lease.lease_s * 1e9, seq.arrived_ns + lease.max_age_s * 1e9)

    def keep(self, seq: Sequence) -> None:
        """Keep the page that a sequence leaves unfilled, unless another page has its tokens."""
        end, store = min(seq.length, seq.known), self.store
        page_no, count = divmod(end, self.page_size)
        pages = self._own(seq, page_no) if count else []
        forked = (p >> CODEC_SHIFT or store.pool(g).references(p) > 1 for g, p in enumerate(pages))
        if not pages or any(forked):
            return
        found = self.best_match(seq, page_no, end)
        if found is None or found.tokens < count:
            tokens = seq.tokens[page_no * self.page_size : end].copy()
            key, above = _key(seq, 0, page_no, tokens), seq.parent_key(0, page_no)
            tail = Block(-1, key, above, 0, "tail", fidelity=seq.fidelity, tokens=tokens)
            tail.tenant, tail.namespace = seq.tenant, seq.namespace
            store.tails.keep(tail, pages, self._end_ns(seq))

    def sums(self, group: int, page: int, count: int) -> torch.Tensor:
        """Return the sum of K and V of a raw page's first tokens: finite if all elements are."""
        keys, values = self.store.views(group, page, count)
        return keys.sum(dtype=torch.float64) + values.sum(dtype=torch.float64)

    # ---- for later processes

    def save(self, seq: Sequence) -> None:
        """Store the tail of a sequence, and that of its prompt without the last token.

        The last token is always computed again when the same prompt comes back.
        """
        store, end = self.store, min(seq.length, seq.known)
        number = store.stack.admission.writes_to()
        # On a GPU a forward over a few tokens takes as long as over one: a tail saves no time.
        elsewhere = any(pool.device.type != "cpu" for pool in store.pools.values())
        if number < 0 or elsewhere or not self.allowed(seq):
            return
        for stop in {end, seq.prompted - 1}:
            page_no, count = divmod(stop, self.page_size)
            known = (page_no + 1) * self.page_size <= seq.prompted  # within a page of the prompt
            # The frame of a tail takes as many bytes as that of a full page.
            few = count < max(1, self.page_size // _WORTH)
            if stop > end or few or known or self._hidden(seq, page_no):
                continue
            above = seq.blocks[0][page_no - 1] if page_no else None
            admission = store.stack.admission
            worth = admission.writes_all
            if above is not None:
                worth = bool(admission.worth_storing(admission.at_once([above]), number))
            if worth:
                for g in range(len(seq.blocks)):
                    self._save(seq, g, page_no, count, number)

    def _save(self, seq: Sequence, group: int, page_no: int, count: int, number: int) -> None:
        store, first = self.store, page_no * self.page_size
        page, layout = int(self.tables.pages[group][seq.row, page_no]), store.forms[group].raw
        tokens, above = seq.tokens[first : first + count].copy(), seq.parent_key(group, page_no)
        key = _key(seq, group, page_no, tokens)
        known = store.index.find(key)
        if page < 0 or page >> CODEC_SHIFT or (known and known.fidelity <= store.stack.fidelity):
            return
        store.stack.supersede(known)
        body = torch.zeros(layout.page_bytes, dtype=torch.uint8, device="cpu")
        old, new = store.views(group, page, count), store.forms[group].views(body, count)
        for source, target in zip(old, new, strict=True):
            target.copy_(source)
        block = store.index.get_or_create(key, above, group, "state")
        block.tokens, block.tail, block.n_bytes = tokens, count, len(body)
        block.tenant, block.namespace, block.fidelity = seq.tenant, seq.namespace, seq.fidelity
        form = store.forms[group].fingerprints[0], count, layout.stripe_stride_bytes
        info = frame_infos([block], *form)[0]
        store.writes.store_tail(block, number, info, body.numpy().data)

    def stored(self, seq: Sequence, page_no: int, stop: int) -> list[Block]:
        """Return the blocks, by group, of the longest stored tail of a prompt.

        The tail covers tokens from `page_no * P` on, up to `stop`; [] if there is none.
        """
        first = page_no * self.page_size
        above = seq.parent_key(0, page_no)
        for count in self.store.index.tails(above, stop - first) if self.store.stack.tiers else ():
            tokens, groups = seq.tokens[first : first + count], range(len(seq.chains))
            found = [self.store.find(_key(seq, g, page_no, tokens)) for g in groups]
            blocks = [block for block in found if block is not None and block.tail == count]
            if len(blocks) == len(found):
                return blocks
        return []


def _key(seq: Sequence, group: int, page: int, tokens: NDArray[np.uint32]) -> bytes:
    """Return the chain key of the first tokens of a page."""
    chain = seq.chains[group]
    salts = within(seq.salts, page * chain.page_size, len(tokens))
    return chain.page(seq.parent_key(group, page), tokens, salts)
