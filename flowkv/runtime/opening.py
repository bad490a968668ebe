"""The sequences of a cache: opened with what is known of them, forked, cut, set aside, closed."""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.errors import TokenError
from flowkv.core.keys import KeyChain, Salt, as_tokens, tenant_salt
from flowkv.policy.base import NEVER_NS
from flowkv.policy.config import Lease
from flowkv.runtime import swap
from flowkv.runtime.binding import Binding
from flowkv.runtime.outset import begin, begin_whole
from flowkv.runtime.planner import Planner
from flowkv.runtime.retention import Retain, make_care
from flowkv.runtime.sequence import Sequence

Tokens = Items[int] | NDArray[np.generic] | torch.Tensor


class Opening(Binding):
    """Opens and closes sequences.

    Attributes:
        tokens_seen: Tokens of all prompts opened.
        tokens_reused: Those of them that needed no computing.
        seen_most: What the first of them had reached before it was last corrected downwards.
        reused_most: The same of the second.
    """

    tokens_seen = tokens_reused = 0
    seen_most = reused_most = 0

    def open(  # noqa: PLR0913 - what may be said of a request belongs to one call
        self,
        tokens: Tokens,
        *,
        tenant: str | None = None,
        salts: Items[Salt] = (),
        limit: int | None = None,
        reuse: bool = True,
        state: bool = False,
        session: str | int | None = None,
        lease: str | Lease = "",
        retain: Items[Retain] = (),
        request: int = -1,
        wait: bool = True,
        computable: bool = True,
    ) -> Sequence:
        """Starts a sequence with its known prefix in place, or on its way.

        Args:
            tokens: The prompt.
            tenant: Whose pages may be used and made; default the cache's own tenant.
            salts: What K and V depend on beside the tokens, such as images.
            limit: Most tokens to reuse; default all but the last, which must run to give logits.
            reuse: False computes everything anew; pages are published all the same.
            state: The model has recurrent layers: reuse only where a state was saved.
            session: Name or number of the conversation, which `hint` may name then. It helps
                policies that learn when conversations go on.
            lease: How long its pages stay, as a lease class of the policy ("turn_end",
                "tool_wait", "one_shot", ...) or a `flowkv.policy.Lease`.
            retain: Spans of tokens that are kept more, or less, than others.
            request: `Sequence.request` of a sequence that was opened in vain for the same request.
            wait: False returns at once, with what is on the device; `Sequence.restoration` brings
                the rest, which `restore` and `prefill` see to, and which may be computed in part
                while it is loaded. None of it, where nothing is to be loaded. With `state`, all of
                it is loaded; if some does not come, `length` is 0 and `state` None afterwards.
            computable: With `wait=False`: whether you can compute part of the prefix.

        Returns:
            A sequence whose `length` tokens need no computing.

        Raises:
            TokenError: Not a flat sequence of ids in [0, 2**32).
            CapacityError: Too many sequences are open.
            ConfigError: The policy knows no such lease class, or a span holds no token.
        """
        ids = as_tokens(plain(tokens))
        with self.lock:
            planner = self._bound()
            planner.store.drain()
            seq = self._sequence(planner, tenant, salts)
            try:
                seq.note(ids)
                seq.prompted, seq.care = len(ids), make_care(session, lease, retain, seq.tenant)
                self.visits.check(seq)
                most = len(ids) - 1 if limit is None else min(limit, len(ids))
                with planner.store.moment():
                    self._begin(seq, request)
                    if reuse and most > 0:
                        if wait:
                            source = self.snapshots if state else self.restorer
                            seq.reused = source.restore(seq, most)
                        elif state:
                            attach = partial(begin_whole, self.restores, self.restorer, seq)
                            seq.reused = self.snapshots.begin(seq, most, attach)
                        else:
                            begin(self.restores, self.restorer, seq, most, computable=computable)
                            seq.reused = seq.length
            except BaseException:
                self.visits.abort(seq.request)
                seq.request = -1
                self._close(seq)
                raise
            self.tokens_seen += len(ids)
            self.tokens_reused += seq.reused
            return seq

    def _begin(self, seq: Sequence, request: int) -> None:
        """Tells policies of a request, unless it is one that they know already."""
        if request >= 0:
            seq.request = request
            return
        self.visits.begin(seq, self.queue.take(seq))

    def _sequence(self, planner: Planner, tenant: str | None, salts: Items[Salt]) -> Sequence:
        """A sequence with a line of its own."""
        seq = self._lineless(planner, tenant, salts)
        seq.row = planner.tables.open_row()
        self._open[id(seq)] = seq
        return seq

    def _lineless(self, planner: Planner, tenant: str | None, salts: Items[Salt]) -> Sequence:
        """A sequence that can look things up, and hold nothing."""
        name = self.config.tenant if tenant is None else tenant
        salt = tenant_salt(name, self.config.secret_bytes)
        groups = range(len(planner.geometry.groups))
        seq = Sequence(
            planner.tables.nowhere,
            [KeyChain(self.namespace, salt, g, planner.page_size) for g in groups],
            tenant=salt,
            namespace=self.namespace,
            salts=salts,
            close=self._end,
            planner=planner,
        )
        seq.owner = name
        return seq

    def _end(self, seq: Sequence) -> None:
        # Possibly in a finalizer, in the middle of anything: it may have to wait (see Guard).
        self.lock.defer(lambda: self._close(seq))

    def _close(self, seq: Sequence) -> None:
        if self.inherited:
            seq.closed = True  # its pages are the parent's
        if not seq.closed:
            if seq.restoration is not None:
                seq.restoration.abandon()
            seq.closed = True
            swap.discard(seq.planner, seq)
            del self._open[id(seq)]
            if seq.planner is self.planner:
                self.visits.end(seq)
            seq.planner.release(seq)
            if self.config.quotas:
                seq.planner.store.shed()
            self._look_ahead(seq.planner)

    def _look_ahead(self, planner: Planner) -> None:
        if planner.foresight is not None and planner.foresight.due_ns < NEVER_NS:
            planner.foresight.edge()

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence with the same past; pages are shared until one of them writes.

        Raises:
            CapacityError: Too many sequences are open.
            StateError: The sequence is closed, suspended or in a step.
        """
        with self.lock:
            self._alive()
            child = self._sequence(seq.planner, None, seq.salts)
            child.tenant, child.namespace, child.chains = seq.tenant, seq.namespace, seq.chains
            try:
                seq.planner.fork(seq, child)
            except BaseException:
                self._close(child)
                raise
            return child

    def truncate(self, seq: Sequence, length: int) -> None:
        """Drops the tokens of a sequence from position `length` on."""
        seq.planner.truncate(seq, length)

    def suspend(self, seq: Sequence) -> int:
        """Gives a sequence's pages up for others until `resume` brings them back, bit for bit.

        What only it knows moves to host memory now, pages that are known once they leave the
        device. Returns the bytes of host memory that this takes at most.
        """
        with self.lock:
            return swap.suspend(seq.planner, seq)

    def resume(self, seq: Sequence) -> None:
        """Brings a suspended sequence back, bit for bit.

        Raises:
            CapacityError: It does not fit now; it stays suspended.
        """
        with self.lock:
            swap.resume(seq.planner, seq)
            # Shared again with whoever has the same by now, and known again.
            seq.planner.publish(seq, exact=True)


def plain(tokens: Tokens) -> Items[int] | NDArray[np.generic]:
    """Token ids as something that is no tensor."""
    if not isinstance(tokens, torch.Tensor):
        return tokens
    try:
        return tokens.detach().cpu().numpy()
    except (NotImplementedError, RuntimeError, TypeError) as error:  # on meta, sparse, bfloat16
        raise TokenError(
            f"token ids are a tensor of {tokens.dtype} on {tokens.device}, which numpy cannot have",
            "Pass a dense tensor of integers, or a list of ids",
        ) from error


def pack(rows: Items[Items[int] | NDArray[np.generic]]) -> NDArray[np.uint32]:
    """Token ids of all rows, one after the other; one check for all is what makes it cheap.

    Raises:
        TokenError: A row is not a flat sequence of ids in [0, 2**32).
    """
    if all(isinstance(row, (list, tuple, range)) for row in rows):
        return as_tokens(list(chain.from_iterable(rows)))
    return np.concatenate([as_tokens(row) for row in rows])
