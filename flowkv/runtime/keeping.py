"""What a cache knows: looked up, brought near, protected, erased, carried away in files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from flowkv.core.errors import ConfigError
from flowkv.core.keys import Salt, as_tokens
from flowkv.runtime import erasure, export
from flowkv.runtime.bundles import Bundles
from flowkv.runtime.explain import Explanation, explain
from flowkv.runtime.export import Exported, Loaded
from flowkv.runtime.opening import Opening, Tokens, plain
from flowkv.runtime.prefetch import Prefetch
from flowkv.runtime.queue import Queued
from flowkv.runtime.retention import eta_ns, session_number
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.stack import make_envelope


class Keeping(Opening):
    """Known prompts and what becomes of them."""

    @contextmanager
    def _probe(self, tokens: Tokens, tenant: str | None, salts: Items[Salt]) -> Iterator[Sequence]:
        with self.lock:
            planner = self._bound()
            planner.store.drain()
            self._look_ahead(planner)
            seq = self._lineless(planner, tenant, salts)
            seq.note(as_tokens(plain(tokens)))
            yield seq

    def explain(
        self, tokens: Tokens, *, tenant: str | None = None, salts: Items[Salt] = ()
    ) -> Explanation:
        """How much of a prompt is known now, and what prevents more."""
        with self._probe(tokens, tenant, salts) as seq:
            return explain(self.restorer, seq, len(seq.tokens) - 1)

    def warm(self, tokens: Tokens, *, tenant: str | None = None, salts: Items[Salt] = ()) -> int:
        """Brings a known prompt onto its device ahead of its use; returns its tokens there.

        Raises:
            CapacityError: Too many sequences are open.
        """
        with self.lock:
            seq = self._sequence(self._bound(), tenant, salts)
            try:
                seq.note(as_tokens(plain(tokens)))
                return self.restorer.restore(seq, len(seq.tokens))
            finally:
                self._close(seq)

    def prefetch(
        self, tokens: Tokens, *, tenant: str | None = None, salts: Items[Salt] = ()
    ) -> Prefetch:
        """Starts to bring a known prompt onto its device, as far as idle pages make room for it.

        Returns at once; `cancel` what is returned if the prompt is not going to be used.
        """
        with self._probe(tokens, tenant, salts) as seq:
            prefetch = Prefetch(seq.planner.store, self.lock)
            prefetch.start(self.restorer.absent(seq))
            return prefetch

    def enqueue(
        self,
        tokens: Tokens,
        *,
        tenant: str | None = None,
        salts: Items[Salt] = (),
        prefetch: bool = True,
    ) -> Queued:
        """Says that a prompt waits to be served: what is known of it stays, and comes nearer.

        `open` of the same prompt serves the request that has waited longest.

        Args:
            tokens: The prompt.
            tenant: Whose; default the cache's own.
            salts: What the prompt's K and V depend on beside the tokens.
            prefetch: Start to bring it onto its device, as `prefetch` does.

        Returns:
            The request, which can be cancelled.
        """
        with self._probe(tokens, tenant, salts) as seq:
            queued = self.queue.add(seq)
            if prefetch:
                queued.prefetch = self._nearer(seq, queued)
            return queued

    def _nearer(self, seq: Sequence, queued: Queued) -> Prefetch:
        absent, foresight = self.restorer.absent(seq), seq.planner.foresight
        if foresight is not None:
            return foresight.enqueue(queued.request, self.visits.chains(seq))
        prefetch = Prefetch(seq.planner.store, self.lock)
        prefetch.start(absent)
        return prefetch

    def hint(
        self,
        what: Tokens | str | int,
        eta_s: float,
        *,
        sigma: float = 0.5,
        tenant: str | None = None,
        salts: Items[Salt] = (),
    ) -> int:
        """Says when a prompt, or a conversation, is expected to be used next.

        It holds until the prompt's last known page is used. A wrong hint costs hits, never
        answers. "This conversation is over" (`flowkv.NEVER`) is worth saying.

        Args:
            what: A prompt, or the `session` of a conversation that was opened with it.
            eta_s: Seconds from now, `flowkv.SOON` or `flowkv.NEVER`.
            sigma: How far off it may be: standard deviation of the logarithm, 0.5 for "within a
                factor of about two".
            tenant: Whose; default the cache's own.
            salts: What the prompt's K and V depend on beside the tokens.

        Returns:
            Tokens that the hint is about; 0 if nothing of it is known any more.

        Raises:
            ConfigError: `eta_s` or `sigma` is negative, or no number.
        """
        eta = eta_ns(eta_s)
        if not 0 <= sigma < float("inf"):
            raise ConfigError(f"sigma={sigma}", "Use 0 or more; 0.5 is a factor of about two")
        with self._probe(() if isinstance(what, str | int) else what, tenant, salts) as seq:
            if isinstance(what, str | int):
                chains = self.visits.session(session_number(what, seq.tenant))
            else:
                chains = self.visits.chains(seq)
            return self.visits.hint(chains, eta, sigma) * self.page_size

    def pin(
        self,
        tokens: Tokens,
        *,
        tenant: str | None = None,
        salts: Items[Salt] = (),
        pinned: bool = True,
    ) -> int:
        """Protects a prompt's known pages from eviction, or no longer; returns their tokens."""
        with self._probe(tokens, tenant, salts) as seq:
            blocks = self.restorer.known(seq)
            for block in blocks:
                seq.planner.store.pin(block, pinned)
            return sum(block.group == 0 for block in blocks) * self.page_size

    def forget(
        self,
        tokens: Tokens | None = None,
        *,
        tenant: str | None = None,
        salts: Items[Salt] = (),
    ) -> int:
        """Erases a prompt and all that continues it from every tier, or a whole tenant.

        Requests that wait for what nobody knows then (`enqueue`) are called off. Every tier
        overwrites or removes the bytes, also those that other processes wrote, and is
        then asked whether anything is left. Beginnings that other prompts share stay. Open
        sequences keep their pages, and publish nothing more.

        Args:
            tokens: The prompt; None for everything of the tenant.
            tenant: Whose; default the cache's own.
            salts: What the prompt's K and V depend on beside the tokens.

        Returns:
            Blocks erased.

        Raises:
            StoreError: A tier, which the message names, could not prove that nothing is left. All
                others have erased by then, and the cache knows none of the blocks any more.
        """
        with self._probe(() if tokens is None else tokens, tenant, salts) as seq, self._purged():
            store = seq.planner.store
            store.flush(self.config.load_deadline_s)
            if tokens is None:
                return self._forget_realm(erasure.Realm(seq.tenant, None))
            try:
                return erasure.forget_prompt(store, seq)
            finally:
                for open_seq in self._open.values():
                    open_seq.publishable &= not open_seq.forgotten

    def invalidate(self) -> int:
        """Erases everything of this model on every tier, for instance after its weights changed.

        Open sequences keep their pages, and publish nothing more.

        Returns:
            Blocks erased.

        Raises:
            StoreError: See `forget`.
        """
        with self.lock:
            self._bound().store.flush(self.config.load_deadline_s)
            for seq in self._open.values():
                seq.publishable = False
            with self._purged():
                return self._forget_realm(erasure.Realm(None, self.namespace))

    @contextmanager
    def _purged(self) -> Iterator[None]:
        """Afterwards nothing names what was erased within, whatever was raised."""
        try:
            yield
        finally:
            self.visits.purge()
            self.queue.purge(self._bound().store.index.slot)

    def _forget_realm(self, realm: erasure.Realm) -> int:
        for seq in self._open.values():
            seq.publishable &= seq.tenant != realm.tenant
        return erasure.forget_realm(self._bound().store, realm)

    def save_state(self, seq: Sequence, values: dict[str, Any]) -> bool:
        """Keeps the state of recurrent layers after exactly `seq.length` tokens.

        Args:
            seq: The sequence; its tokens must be known.
            values: Named tensors, numbers, text and lists of them.

        Returns:
            Whether it is kept.
        """
        with self.lock:
            return self._may_publish(seq) and self.snapshots.save(seq, values)

    # ---- tensors beside the pages

    def keep(
        self, name: str, tensors: Mapping[str, torch.Tensor], *, tenant: str | None = None
    ) -> bool:
        """Keeps named tensors, weights for instance, on the tier that lasts longest.

        Tensors kept before under this name are replaced. They are copied part by part; what is
        not written yet when this returns is written in the background.

        Args:
            name: What they are fetched by.
            tensors: On any device.
            tenant: Whose; default the cache's own.

        Returns:
            Whether there was room for all of them.

        Raises:
            StoreError: A tensor has a dtype or layout that cannot be kept, or a name is no text.
        """
        return self._bundles(tenant).keep(name, tensors)

    def fetch(
        self, name: str, only: Iterable[str] | None = None, *, tenant: str | None = None
    ) -> dict[str, torch.Tensor] | None:
        """Fetches tensors that `keep` kept, verified, onto the CPU; None if they cannot be had.

        Args:
            name: What they were kept by.
            only: Names of some; only the stripes that hold them are read.
            tenant: Whose; default the cache's own.

        Raises:
            StoreError: There is no tensor of one of these names.
        """
        return self._bundles(tenant).fetch(name, only)

    def _bundles(self, tenant: str | None) -> Bundles:
        with self._probe((), tenant, ()) as seq:
            return Bundles(seq.planner.store, self.lock, seq.namespace, seq.tenant)

    # ---- files

    def export(
        self,
        path: str | os.PathLike[str],
        tokens: Tokens | Iterable[Tokens] | None = None,
        *,
        tenant: str | None = None,
        salts: Items[Salt] = (),
    ) -> Exported:
        """Writes what is known of prompts to one file, for `load` in another process.

        Pages are written as they are, of whatever codec, with the states of recurrent layers.
        Frames are checked, encrypted and compressed as on a disk tier. The file appears whole or
        not at all. Other threads go on meanwhile.

        Args:
            path: The file.
            tokens: A prompt, or several; None for everything of the tenant.
            tenant: Whose; default the cache's own.
            salts: What the prompts' K and V depend on beside the tokens.

        Raises:
            StoreError: The file cannot be written.
        """
        self._prove()
        store, blocks = self._bound().store, dict[int, Any]()
        if tokens is None:
            with self._probe((), tenant, salts) as seq:
                mine = erasure.Realm(seq.tenant, seq.namespace)
                blocks = {id(b): b for b in store.index if mine.holds(b)}
        for prompt in () if tokens is None else _prompts(tokens):
            with self._probe(prompt, tenant, salts) as seq:
                known = [*self.restorer.known(seq), *self.snapshots.known(seq)]
                blocks |= {id(block): block for block in known}
        envelope = make_envelope(self.config)
        return export.write(store, self.lock, path, envelope, blocks.values())

    def load(self, path: str | os.PathLike[str]) -> Loaded:
        """Makes known what `export` wrote, on the device while pages are free, else on the tiers.

        Every frame is checked; what is damaged, or of another model, geometry or codec, is refused
        and counted. Frames that are only checked (`integrity="xxh3"`) are as trustworthy as whoever
        wrote the file; encrypted ones (`"aead"`) come from somebody who has the secret.

        Raises:
            StoreError: It cannot be read, or was never such a file.
        """
        store, envelope = self._bound().store, make_envelope(self.config)
        return export.read(store, self.lock, path, envelope, self.namespace)


def _prompts(tokens: Tokens | Iterable[Tokens]) -> list[Tokens]:
    """One prompt, or several."""
    given = plain(tokens) if isinstance(tokens, torch.Tensor) else tokens
    if isinstance(given, np.ndarray):
        return list(given) if given.ndim == 2 else [given]
    listed = list(given)
    single = not listed or isinstance(listed[0], (int, np.integer))
    return [listed] if single else listed
