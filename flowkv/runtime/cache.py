"""`KV`: the cache as users hold it: sequences, steps, known prompts, upkeep."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.clock import Clock
from flowkv.core.errors import ConfigError, MissingDependencyError
from flowkv.core.geometry import Geometry
from flowkv.core.keys import Namespace, Salt, as_tokens
from flowkv.policy.base import Policy
from flowkv.runtime import erasure
from flowkv.runtime.batch import Step
from flowkv.runtime.explain import Explanation, explain
from flowkv.runtime.opening import Opening, Tokens, pack, plain
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.sparsify import chosen, sparsify
from flowkv.runtime.statistics import statistics
from flowkv.tiers.base import Tier

cache_door: Callable[..., Any] | None = None
"""Makes the object behind `KV.cache`; put here by the package, since hooks lie above this floor."""


class KV(Opening):
    """A key/value cache: paged, shared, tiered and persistent. Thread-safe.

    Args:
        geometry: The model's layer groups; None if `flowkv.attach` is to learn it.
        namespace: Name of the model *and* its weights. Required with a disk or remote tier, unless
            the model is attached: equal namespaces share pages.
        config: TOML file with further fields; default `FLOWKV_CONFIG`.
        tiers: The stack, fastest first: places as text, and `Tier` objects below them. Replaces
            `gpu`, `host` and `disk`.
        policy: Name in the catalogue, or a callable that makes a `Policy` for each place.
        clock: Time for the policies.
        **fields: Further fields of `flowkv.core.config.Config`: gpu, host, disk, codec, ...

    Raises:
        ConfigError: A field is unknown, or the namespace is missing.
        StoreError: A directory cannot be used.
        CapacityError: The device pool is too small.
    """

    def __init__(
        self,
        geometry: Geometry | None = None,
        *,
        namespace: str | Namespace = "",
        config: str | os.PathLike[str] | None = None,
        tiers: Iterable[str | Tier] | None = None,
        policy: str | Callable[[], Policy] | None = None,
        clock: Clock | None = None,
        **fields: object,
    ) -> None:
        super().__init__(
            geometry,
            namespace=namespace,
            config=config,
            tiers=tiers,
            policy=policy,
            clock=clock,
            fields=fields,
        )

    # ---- steps

    def plan(self, seqs: Items[Sequence], counts: Items[int] | NDArray[np.int64]) -> Step:
        """A step over rows whose new token ids are told elsewhere (`Sequence.note`), or never.

        Args:
            seqs: The rows.
            counts: New tokens of each.
        """
        self._alive()
        planner = seqs[0].planner if seqs else self._bound()
        return Step(planner, seqs, np.asarray(counts, np.int64))

    def step(self, seqs: Items[Sequence], new_tokens: Items[Tokens]) -> Step:
        """A step of your own model: `with kv.step(seqs, tokens) as step: model(step.tokens, ...)`.

        Args:
            seqs: The rows.
            new_tokens: The new token ids of each row; where the prompt given to `open` is not
                computed yet, they must continue it.

        Raises:
            CapacityError: The pages do not fit.
            GeometryError: Not as many token lists as rows.
            StateError: A sequence is closed, suspended or in a step already.
            TokenError: The ids contradict what is known of the prompt.
        """
        given = [plain(ids) for ids in new_tokens]
        packed = pack(given)
        step = self.plan(seqs, [len(ids) for ids in given])
        step.give(packed)
        return step

    def prefill(self, seqs: Items[Sequence], *, chunk: int = 512) -> Iterator[Step]:
        """Steps that compute what is missing of the prompts: `for step in kv.prefill(seqs): ...`.

        Each step is entered while the loop body runs, and committed when the loop goes on. Leaving
        the loop early rolls the current step back.

        Args:
            seqs: Sequences whose prompts were given to `open`.
            chunk: Most tokens of a row in one step.

        Raises:
            CapacityError: The pages do not fit.
            ConfigError: `chunk` is no positive number.
        """
        if chunk < 1:
            raise ConfigError(f"chunk={chunk}", "Compute at least one token per row and step")
        while True:
            rows = [seq for seq in seqs if seq.position < len(seq.tokens)]
            if not rows:
                return
            parts = [seq.tokens[seq.position : seq.position + chunk].copy() for seq in rows]
            with self.step(rows, parts) as step:
                yield step

    def cache(self, *args: Any, tenant: str | None = None, **inputs: Any) -> Any:
        """A Hugging Face cache for one call: `generate(**inputs, past_key_values=kv.cache(...))`.

        Args:
            *args: `input_ids`, if not by name.
            tenant: Whose pages may be used and made.
            **inputs: What `generate` is given.
        """
        if cache_door is None:
            raise MissingDependencyError("KV.cache", "hf")
        return cache_door(self, *args, tenant=tenant, **inputs)

    # ---- known prompts

    @contextmanager
    def _probe(self, tokens: Tokens, tenant: str | None, salts: Items[Salt]) -> Iterator[Sequence]:
        with self.lock:
            planner = self._bound()
            planner.store.mover.drain()
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

        Beginnings that other prompts share stay. Open sequences keep their pages, and publish
        nothing more.

        Args:
            tokens: The prompt; None for everything of the tenant.
            tenant: Whose; default the cache's own.
            salts: What the prompt's K and V depend on beside the tokens.

        Returns:
            Blocks erased.
        """
        with self._probe(() if tokens is None else tokens, tenant, salts) as seq:
            store = seq.planner.store
            store.mover.flush(self.config.load_deadline_s)
            if tokens is None:
                erased = erasure.forget_tenant(store, seq.tenant)
            else:
                erased = erasure.forget_prompt(store, seq)
            for open_seq in self._open.values():
                gone = (b is not None and b.gone for group in open_seq.blocks for b in group)
                if any(gone) or (tokens is None and open_seq.tenant == seq.tenant):
                    open_seq.publishable = False
            return erased

    def invalidate(self) -> int:
        """Erases everything of this model on every tier, for instance after its weights changed.

        Open sequences keep their pages, and publish nothing more.

        Returns:
            Blocks erased.
        """
        with self.lock:
            store = self._bound().store
            store.mover.flush(self.config.load_deadline_s)
            for seq in self._open.values():
                seq.publishable = False
            return erasure.forget_namespace(store, self.namespace)

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

    # ---- upkeep

    def sparsify(
        self,
        seq: Sequence,
        keep: NDArray[np.integer] | Items[NDArray[np.integer]] | None = None,
        *,
        budget_tokens: int | None = None,
    ) -> int:
        """Takes tokens out of an open sequence; it goes on at its true positions.

        Its pages become private: nothing of it is published any more. Its `length` counts the
        tokens that are left, `Sequence.position` those that there were.

        Args:
            seq: A sequence of a model all of whose layers see the whole context.
            keep: `[L, Hk, n]`: the slots that stay, ascending, for each layer and KV head; one such
                array for each layer group, if there are several.
            budget_tokens: Instead of `keep`: how many stay, chosen by what the steps that were
                watched (`Step.watch`) looked at, see `policy.importance`.

        Returns:
            Tokens that it lost.

        Raises:
            CapacityError: The pages of what stays do not fit beside the old ones.
            ConfigError: Not exactly one of `keep` and `budget_tokens`, or too small a budget.
            GeometryError: `keep` does not fit, or a layer group has a window.
            StateError: The sequence is closed, suspended or in a step, or no step was watched.
        """
        with self.lock:
            self._alive()
            if (keep is None) == (budget_tokens is None):
                raise ConfigError("what to keep is unclear", "Pass either keep or budget_tokens")
            if budget_tokens is not None:
                keep = chosen(seq, budget_tokens)
            elif isinstance(keep, np.ndarray):
                keep = [keep]
            return sparsify(seq.planner, seq, keep or ())

    def defragment(self) -> int:
        """Empties sparse slabs by moving pages; returns the moves, 0 while a step is under way."""
        return self._bound().defragment()

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits until all that was published is written down; False if that took too long.

        Pages that are still to be encoded are written down afterwards.
        """
        with self.lock:
            return self.planner is None or self.planner.store.mover.flush(timeout_s)

    def stats(self) -> dict[str, Any]:
        """Plain numbers: tokens seen and reused, hit rate, pages, bytes and events by place."""
        with self.lock:
            return statistics(self)

    def close(self) -> None:
        """Detaches, writes down what is published, and releases everything. Safe to call again."""
        if os.getpid() != self._pid:
            return  # tiers and the answers they owe belong to the parent process
        self.detach()
        with self.lock:
            if self.closed:
                return
            with ExitStack() as last:  # what closing one of them raises does not keep the others
                for tier in self.planner.store.tiers if self.planner else self._tiers:
                    last.callback(tier.close)
                last.callback(setattr, self, "closed", True)
                last.callback(self.flush)  # what was encoded just now, too
                for seq in list(self._open.values()):
                    last.callback(self._close, seq)
                self.flush()

    def __enter__(self) -> KV:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "unbound" if self.planner is None else "open"
        return f"<flowkv.KV {state}: {self.tokens_reused} of {self.tokens_seen} tokens reused>"
