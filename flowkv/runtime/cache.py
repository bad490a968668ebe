"""`KV`: the cache as users hold it: sequences, steps, known prompts, upkeep."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.clock import Clock
from flowkv.core.errors import ConfigError, MissingDependencyError, StateError
from flowkv.core.geometry import Geometry
from flowkv.core.keys import Namespace, Shard
from flowkv.observe.account import Account
from flowkv.policy.base import Policy
from flowkv.policy.config import Lease
from flowkv.runtime import audit, front
from flowkv.runtime.arrival import take_over
from flowkv.runtime.batch import Step
from flowkv.runtime.handover import Sender
from flowkv.runtime.keeping import Keeping
from flowkv.runtime.levels import source
from flowkv.runtime.opening import Tokens, pack, plain
from flowkv.runtime.retention import Retain
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.sparsify import chosen, sparsify
from flowkv.runtime.statistics import statistics
from flowkv.tiers.base import Tier

cache_door: Callable[..., Any] | None = None
"""Makes the object behind `KV.cache`; put here by the package, since hooks lie above this floor."""


class KV(Keeping):
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
        shard: Which rank of a tensor-parallel model this is. The geometry is that of the whole
            model then, of which the cache holds the rank's heads, and lasting and shared tiers are
            read whatever the number of ranks that wrote them; `Shard()` reads them in one piece.
        **fields: Further fields of `flowkv.core.config.Config`: gpu, host, disk, codec, ...

    Raises:
        ConfigError: A field is unknown, or the namespace is missing.
        GeometryError: The heads cannot be divided evenly among the ranks.
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
        shard: Shard | None = None,
        **fields: object,
    ) -> None:
        super().__init__(
            geometry,
            namespace=namespace,
            config=config,
            tiers=tiers,
            policy=policy,
            clock=clock,
            shard=shard,
            fields=fields,
        )
        self._levels, self._accounts = source(self), list[Account]()
        self.metrics.source(self._levels)

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
        the loop early rolls the current step back. With `audit=` some steps recompute restored
        pages first (`Step.audits`); what is wrong is computed anew with the rest.

        Of sequences that were opened with `wait=False`, part is computed while the rest is loaded;
        what follows that is computed once all of it is there. `restore` also overlaps the two.

        Args:
            seqs: Sequences whose prompts were given to `open`.
            chunk: Most tokens of a row in one step.

        Raises:
            CapacityError: The pages do not fit.
            ConfigError: `chunk` is no positive number.
        """
        if chunk < 1:
            raise ConfigError(f"chunk={chunk}", "Compute at least one token per row and step")
        if not all(isinstance(seq, Sequence) for seq in seqs):
            raise StateError("some of these are no sequences", "Pass what kv.open(...) returned")
        yield from front.prefill(self, seqs, chunk)
        yield from audit.steps(self, [seq for seq in seqs if seq.position < len(seq.tokens)])
        while True:
            rows = [seq for seq in seqs if seq.position < len(seq.tokens)]
            if not rows:
                return
            parts = [seq.tokens[seq.position : seq.position + chunk].copy() for seq in rows]
            with self.step(rows, parts) as step:
                yield step

    def restore(
        self, seqs: Items[Sequence], forward: Callable[[Step], Any], *, chunk: int = 512
    ) -> list[Any]:
        """Finishes the prefill of prompts opened with `wait=False`, in the least time it can take.

        Part of each prefix is computed from the front while the rest of it is loaded from the back.
        What follows the prefix is computed behind the loads: each layer of that forward waits for
        that layer of the pages. What does not come in time is computed here, in further forwards.

        Args:
            seqs: Sequences in no step.
            forward: Called with each step, over one of the sequences, inside of which your model
                runs; it may be called again for tokens whose first forward was given up.
            chunk: Most tokens in one step.

        Returns:
            For each sequence, what `forward` returned for the end of its prompt; None if nothing
            was left to compute.

        Raises:
            CapacityError: The pages do not fit.
            ConfigError: `chunk` is no positive number.
        """
        if chunk < 1:
            raise ConfigError(f"chunk={chunk}", "Compute at least one token per step")
        outputs = front.restore(self, seqs, forward, chunk)
        return audit.mend(self, seqs, forward, outputs, chunk)

    def audit(self, seq: Sequence, forward: Callable[[Step], Any]) -> int:
        """Recomputes those restored pages of a sequence that `audit=` samples, and compares.

        What differs by more than its codec and the model's rounding explain is forgotten on every
        tier, with all that continues it, and told by a warning and events (`Audited`,
        `Quarantined`). As long as part of the prompt is to be computed, the sequence then ends
        before it, and `prefill` computes it anew; `prefill` audits by itself.

        Args:
            seq: A sequence in no step.
            forward: Called with each step, inside of which your model runs over one page.

        Returns:
            Pages that were wrong.
        """
        return audit.run(self, seq, forward)

    def hand_over(self) -> Sender:
        """Sends pages to other processes while they are computed, layer by layer.

        `with kv.hand_over() as sender: ...` around the prefill, in the process that computes;
        `take_over` in the one that goes on. Both name the same tier and namespace.

        Raises:
            StateError: No tier of the stack can be read by others, or another sender is active.
        """
        self._prove()
        return Sender(self)

    def take_over(
        self,
        seq: Sequence,
        forward: Callable[[Step], Any],
        *,
        patience_s: float | None = None,
        chunk: int = 512,
    ) -> Any:
        """Finishes the prefill of a prompt that another process computes, as its layers arrive.

        The forward over what follows the last full page starts at once; each layer of it waits for
        that layer of the pages. What does not come in time is computed here, in further forwards.

        Args:
            seq: As `open` returned it.
            forward: Called with each step, inside of which your model runs; it may be called again
                for tokens whose first forward was given up.
            patience_s: Longest wait for a layer while nothing arrives; default `load_deadline_s`.
            chunk: Most tokens in one step, where they are computed here.

        Returns:
            What the last call of `forward` returned; None if nothing was left to compute.

        Raises:
            CapacityError: The pages do not fit.
        """
        patience_s = self.config.load_deadline_s if patience_s is None else patience_s
        return take_over(self, seq, forward, patience_s=patience_s, chunk=chunk)

    def cache(
        self,
        *args: Any,
        tenant: str | None = None,
        session: str | int | None = None,
        lease: str | Lease = "",
        retain: Items[Retain] = (),
        **inputs: Any,
    ) -> Any:
        """A Hugging Face cache for one call: `generate(**inputs, past_key_values=kv.cache(...))`.

        Args:
            *args: `input_ids`, if not by name.
            tenant: Whose pages may be used and made.
            session: See `open`; that of all rows.
            lease: See `open`.
            retain: See `open`; positions count each row's own tokens, without padding.
            **inputs: What `generate` is given.
        """
        if cache_door is None:
            raise MissingDependencyError("KV.cache", "hf")
        care = {"session": session, "lease": lease, "retain": retain}
        said = {name: value for name, value in care.items() if value not in (None, "", ())}
        return cache_door(self, *args, tenant=tenant, care=said, **inputs)

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
        if self.inherited:
            return False  # it is the parent that writes
        self._prove()
        return self._flush(timeout_s)

    def _flush(self, timeout_s: float = 60.0) -> bool:
        with self.lock:
            return self.planner is None or self.planner.store.flush(timeout_s)

    def stats(self) -> dict[str, Any]:
        """Plain numbers: tokens seen and reused, hit rate, pages, bytes and events by place."""
        with self.lock:
            return statistics(self)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "How it was served",
        tenants: bool = False,
    ) -> Account:
        """Collects how requests are served, and writes it up: `with kv.report("x.html"): ...`.

        Latencies, requests over time, memory by place, and what was found where, of whatever uses
        this cache meanwhile, engines above all; as one HTML file that loads nothing from elsewhere.

        Args:
            path: The HTML file; an old one is replaced.
            title: Its heading.
            tenants: Whether tenants are named in it.

        Returns:
            The account, which writes when its block ends, or with its `close`. It has the numbers,
            too: `summary()`.

        Raises:
            ConfigError: The file cannot be made.
            StateError: The cache is closed.
        """
        self._alive()
        account = Account(path, self.bus, self._levels, title=title, tenants=tenants)
        self._accounts = [*(other for other in self._accounts if not other.closed), account]
        return account

    def close(self) -> None:
        """Detaches, writes down what is published, and releases everything. Safe to call again."""
        if not self.inherited:
            self._prove()
            while self._closings:
                self._closings.pop()()
        self.detach()
        if self.inherited:
            return  # tiers and the answers they owe belong to the parent process
        with self.lock:
            if self.closed:
                return
            if self.planner is not None and self.planner.sender is not None:
                self.planner.sender.close()
            with ExitStack() as last:  # what closing one of them raises does not keep the others
                for trace in self._traces:
                    last.callback(trace.close)
                for tier in self.planner.store.tiers if self.planner else self._tiers:
                    last.callback(tier.close)
                last.callback(setattr, self, "closed", True)
                if self.planner:
                    last.callback(self.planner.store.mover.cancel)
                last.callback(self._save_learned)
                for recording in self._recordings:
                    last.callback(recording.close)
                last.callback(self._flush)  # what was encoded just now, too
                for seq in list(self._open.values()):
                    last.callback(self._close, seq)
                for account in self._accounts:
                    last.callback(account.close)
                self._flush()

    def __enter__(self) -> KV:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "unbound" if self.planner is None else "open"
        return f"<flowkv.KV {state}: {self.tokens_reused} of {self.tokens_seen} tokens reused>"
