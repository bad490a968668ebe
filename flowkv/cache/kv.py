"""`KV`: the cache as users hold it: sequences, steps, known prompts, upkeep."""

from __future__ import annotations

import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache import above, erasure, export, swap
from flowkv.cache import stack as learned
from flowkv.cache.audit import Auditor, Explanation, explain
from flowkv.cache.block_table import Planner
from flowkv.cache.export import Bundles, Exported, Loaded
from flowkv.cache.load import PageLoader
from flowkv.cache.requests import (
    Prefetch,
    PrefetchManager,
    Queue,
    Recording,
    RequestTracker,
    WaitingRequest,
)
from flowkv.cache.restore import Late, PrefixMatcher, RestoreJob, RestoreScheduler, choose
from flowkv.cache.seal import Refusal, Tails, describe
from flowkv.cache.sequence import Guard, Sequence, Tables, eta_ns, make_care, session_number
from flowkv.cache.stack import Ending, link_pools, make_way, open_pools, store_levels, store_report
from flowkv.cache.step import Step, chosen, sparsify
from flowkv.cache.store import PageStore
from flowkv.cache.swap import Snapshots
from flowkv.compiled.compiling import SystemClock, now_s
from flowkv.core import interrupts
from flowkv.core.clock import Clock
from flowkv.core.config import PLACE_KINDS, format_size, load_config
from flowkv.core.errors import ConfigError, NonFiniteError, StateError, TokenError
from flowkv.core.geometry import Geometry
from flowkv.core.keys import KeyChain, Namespace, Salt, as_tokens, tenant_salt
from flowkv.kvt.tier import CodecTier, PageBases, coded_forms
from flowkv.observe.events import Bus, EngineStep, RestoreSpan, StepPlanned, Warned
from flowkv.observe.metrics import Level, Metrics, Tenancy
from flowkv.observe.timeline import OpenReport, TraceFile
from flowkv.policy import CATALOGUE, make_policy
from flowkv.policy.base import Lease, Policy, Retain, configure
from flowkv.policy.pages import Verdict
from flowkv.policy.prefetch import PrefetchConfig
from flowkv.policy.restore import LoadGate
from flowkv.residency.places import PolicyPlace, make_envelope, open_tiers, policy_of
from flowkv.tiers.base import Tier


def _maker(policy: object) -> Callable[[], Policy] | None:
    """Return a factory of policies, one per place; None if the configuration names the policy.

    Raises:
        ConfigError: `policy` is neither a name nor callable, or is one object for all places.
    """
    if policy is None or isinstance(policy, str):
        return None
    if isinstance(policy, Policy) and not isinstance(policy, type):
        kind = type(policy).__name__
        raise ConfigError(
            f"policy={kind}(...) is one policy, and each place needs its own",
            f"Pass the class or a callable that makes one: policy=lambda: {kind}(...)",
        )
    if not callable(policy):
        raise ConfigError(
            f"policy={policy!r} makes no policies",
            f"Pass a name ({', '.join(CATALOGUE)}), a class, or a callable that makes one; options"
            " of places go into policy_options",
        )

    def make() -> Policy:
        made = policy()
        if isinstance(made, type) or not isinstance(made, Policy):
            raise ConfigError(
                f"policy={policy!r} made {made!r}, which is no policy",
                "Have it return a fresh object that implements flowkv.policy.Policy",
            )
        return made

    return make


def _on_cpu(geometry: Geometry) -> bool:
    return all(torch.device(group.device).type != "cuda" for group in geometry.groups)


# Token ids as callers pass them, and as the cache uses them.

Tokens = Items[int] | NDArray[np.generic] | torch.Tensor


def plain(tokens: Tokens) -> Items[int] | NDArray[np.generic]:
    """Convert token ids in a tensor into a numpy array; return other containers unchanged."""
    if not isinstance(tokens, torch.Tensor):
        return tokens
    try:
        return tokens.detach().cpu().numpy()
    except (NotImplementedError, RuntimeError, TypeError) as error:  # on meta, sparse, bfloat16
        raise TokenError(
            f"token ids are a tensor of {tokens.dtype} on {tokens.device}, without a numpy form",
            "Pass a dense tensor of integers, or a list of ids",
        ) from error


def pack(rows: Items[Items[int] | NDArray[np.generic]]) -> NDArray[np.uint32]:
    """Concatenate the token ids of all rows; lists are checked together, which is cheap.

    Raises:
        TokenError: A row is not a flat sequence of ids in [0, 2**32).
    """
    if all(isinstance(row, (list, tuple, range)) for row in rows):
        return as_tokens(list(chain.from_iterable(rows)))
    return np.concatenate([as_tokens(row) for row in rows])


def _prompts(tokens: Tokens | Iterable[Tokens]) -> list[Tokens]:
    """Return a list of prompts from one prompt or several."""
    given = plain(tokens) if isinstance(tokens, torch.Tensor) else tokens
    if isinstance(given, np.ndarray):
        return list(given) if given.ndim == 2 else [given]
    listed = list(given)
    single = not listed or isinstance(listed[0], (int, np.integer))
    return [listed] if single else listed


# Prefill of prompts with a prefix that is being loaded: the front of the prefix is computed
# meanwhile, and the rest of the prompt behind the loads.


def fronts(kv: KV, seqs: Items[Sequence], chunk: int) -> Iterator[Step | Sequence]:
    """Yield steps that compute fronts, and each sequence once, settled, when its front is done.

    Each yielded step is entered until the generator resumes.
    """
    waiting = [seq for seq in seqs if seq.restoration is not None]
    while waiting:
        found = choose([one for seq in waiting if (one := RestoreJob.of(seq)) is not None], chunk)
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


def behind(
    kv: KV, seq: Sequence, forward: Callable[[Step], Any], restoration: RestoreJob, chunk: int
) -> Any:
    """Run the forward over the tokens behind a settled prefix, while the prefix still loads.

    Returns:
        The output of `forward`; None if no token was left, or a layer did not load in time.
    """
    output, ok = None, False
    rest = seq.tokens[seq.position : seq.position + chunk].copy()
    try:
        if not len(rest):
            ok = restoration.complete()
        else:
            with kv.step([seq], [rest]) as step:
                output = forward(step)
            ok = True
    except Late:
        output = None
    finally:
        restoration.finish(ok=ok)
    return output


def count_tokens(kv: KV, seen: int, reused: int) -> None:
    """Add to the statistics of prompt tokens, or subtract what was counted twice for a request."""
    with kv.lock:
        kv.seen_most = max(kv.seen_most, kv.tokens_seen)
        kv.reused_most = max(kv.reused_most, kv.tokens_reused)
        kv.tokens_seen += seen
        kv.tokens_reused += reused


def levels(kv: KV) -> Iterator[Level]:
    """Yield levels and counts of a cache without taking its lock; none if it is closed.

    See `flowkv.cache.stack.store_levels`.
    """
    if kv.closed:
        return
    # Tokens of a sequence opened in vain are subtracted again, and a count must not fall: it stays
    # at its former maximum until it grows beyond it. The present value is read before the maximum,
    # so that no correction slips between the two reads.
    yield Level("tokens_seen_total", max(kv.tokens_seen, kv.seen_most))
    yield Level("tokens_reused_total", max(kv.tokens_reused, kv.reused_most))
    yield Level("open_sequences", len(kv._open))
    if kv.planner is not None:
        yield from store_levels(kv.planner.store)


def source(kv: KV) -> Callable[[], list[Level]]:
    """Return a function that reads `levels` of a cache and does not keep the cache alive."""
    ref = weakref.ref(kv)
    return lambda: list(levels(there)) if (there := ref()) is not None else []


def _run_all(callbacks: list[Callable[[], None]]) -> None:
    """Run callbacks from the last on and remove each; an interrupted callback stays listed."""
    while callbacks:
        try:
            callbacks[-1]()
        except Exception:
            callbacks.pop()
            raise
        callbacks.pop()


_POLL_S = 0.002  # between two lookups of pages that another process computes


def _no_cache() -> None:
    """Stand for a `KV` in copies and pickles of objects that refer to one: a cache stays put."""


_PARTS = "devices", "tiers", "policies", "prefetch", "audit", "overflow"
BLENDED = "documents", "taken_tokens", "computed_tokens", "declined"
"""Counts of `stats()["blend"]`; documents and spans count alike."""


class _NoCacheError(ConfigError, AttributeError):
    """Error for a KV that is passed as the cache of one call."""


class KV:
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

    bus: Bus
    """Event bus of the cache."""
    metrics: Metrics
    """Counters of the events on the bus."""

    # Tokens of all opened prompts, and how many of them needed no computing; then the value of
    # both before it was last corrected downwards.
    tokens_seen = tokens_reused = 0
    seen_most = reused_most = 0

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
        stack = list(tiers) if tiers is not None else None
        if stack is not None:
            places = tuple(tier for tier in stack if isinstance(tier, str))
            fields["tiers"] = tiers if isinstance(tiers, str) else places
        if isinstance(policy, str):
            fields["policy"] = policy
        if isinstance(namespace, str) and namespace:
            fields["namespace"] = namespace  # for `attach`, which asks the configuration
        self.config = load_config(config, **fields)
        self._secret = self.config.secret_bytes
        self._given = [tier for tier in stack or () if not isinstance(tier, str)]
        self._make_policy = _maker(policy)
        self._check_policies()
        self.clock, self.bus = clock or SystemClock(), Bus()
        self.metrics = Metrics()
        # Steps and spans are too frequent to be counted always; a subscriber of the bus can.
        self.metrics.subscribe(self.bus, without=[EngineStep, RestoreSpan, StepPlanned])
        self.tenants = Tenancy(self.bus)
        self.lock, self.closed, self._pid = Guard(), False, os.getpid()
        self.gate = LoadGate()
        self.namespace, self.private = b"", ""  # private: why no page is shared; "" if pages are
        self._warned: set[str] = set()
        self._detach: list[Callable[[], None]] = []
        self._vouch: Callable[[], bool] | None = None
        self._proofs: list[Callable[[float], object]] = []
        self._model: Callable[[], object] | None = None  # None where none was attached
        self._ending: Ending | None = None
        self._lost = 0  # lost pages that `flush` has reported
        self._closings: list[Callable[[], None]] = []
        self._forgets: list[Callable[[str], int]] = []
        self._long: Callable[[], tuple[int, Salt] | None] = lambda: None
        self._records: Callable[[Sequence], object] | None = None
        self.blended: Counter[str] = Counter(dict.fromkeys(BLENDED, 0))
        self.graphed: dict[str, Any] = {"captured": 0, "replayed": 0, "bytes": 0}
        self.graphed.update(eager="", prompts="")
        self.bases: PageBases | None = None
        self._calibrates: Callable[[Any, float], dict[str, float]] | None = None
        self._learns: Callable[[Items[Tokens], str | None], int] | None = None
        self._unlearns: Callable[[Tokens, str | None], int] = lambda tokens, tenant: 0
        self._tiers: list[Tier] = []
        self._open: WeakValueDictionary[int, Sequence] = WeakValueDictionary()
        self._recordings: list[Recording] = []
        self._handing_over: list[None] = []  # blocks of `hand_over` that are open
        self._traces: list[TraceFile] = []
        self.planner: Planner | None = None
        self.prefetches: PrefetchManager | None = None
        self._levels, self._accounts = source(self), list[OpenReport]()
        self.metrics.source(self._levels)
        if geometry is not None:
            if self.config.page_size not in (None, geometry.page_size):
                raise ConfigError(
                    f"page_size={self.config.page_size} beside a geometry of {geometry.page_size}",
                    "Say it in the geometry: Geometry(..., page_size=...)",
                )
            name = namespace or self.config.namespace
            self._need_name(bool(name), geometry)
            bind(self, geometry, name if isinstance(name, Namespace) else Namespace(model=name))

    def _need_name(self, named: bool, geometry: Geometry) -> None:
        places = self.config.places(on_cpu=_on_cpu(geometry))
        lasting = any(place.kind not in ("gpu", "host") or place.path for place in places)
        given = any(tier.kind != "host" or tier.shared for tier in self._given)
        if not named and (lasting or given):
            raise ConfigError(
                "a cache with a lasting or shared tier has no namespace",
                'Name the model and its weights: KV(geometry, namespace="my-model@3", ...)',
            )

    def _introduce(self, namespace: Namespace) -> None:
        """Pass the namespace now in use to the tiers that record it (those with `bind`)."""
        if self.bases is not None and self.namespace != namespace.digest():
            self.bases.use({})  # a changed model has none
        for tier in self._tiers:
            bind: Callable[[bytes, str], None] | None = getattr(tier, "bind", None)
            if bind is not None:
                bind(namespace.digest(), namespace.title)
            if isinstance(tier, CodecTier):
                tier.read_bases(namespace.digest())
        found = self.bases.measured().get("kl", 0.0) if self.bases is not None else 0.0
        if "kl=" in self.config.cold and found > self.config.cold_divergence():
            warn(
                self,
                "bound",
                f"cold pages lie here in a code that was measured to cost {found:.2g}, more than "
                f"cold={self.config.cold!r} allows. Calibrate anew, or name another directory.",
            )

    def _build(self, geometry: Geometry, namespace: Namespace) -> None:
        pools = open_pools(geometry, self.config)
        self.bases = bases = PageBases(coded_forms(geometry)) if self.config.cold else None
        if self.planner is None:
            places = self.config.places(on_cpu=_on_cpu(geometry))
            make_way(place.path for place in places if place.kind == "disk")
            self._tiers = open_tiers(
                *(self.config, self._given, self.clock, self.gate.rates), on_cpu=_on_cpu(geometry)
            )
            if bases is not None:
                self._tiers = [
                    tier
                    if tier.kind == "host" or tier in self._given
                    else CodecTier(tier, bases, clock=self.clock)
                    for tier in self._tiers
                ]
        else:  # the old store must neither read nor write the tiers any more
            store, lost = self.planner.store, self.planner.store.stack.lost
            store.writes.flush(self.config.load_deadline_s)
            if self._ending is not None:
                self._ending.finish(lost)
            store.stack.detach()
            for tier in self._tiers:
                if bases is not None and isinstance(tier, CodecTier):
                    tier.bases = bases
        link_pools(pools.values(), self._tiers)
        self._introduce(namespace)
        # The store must not hold the cache, which may go before its last pages are written.
        config, make_policy, handing_over = self.config, self._make_policy, self._handing_over
        prefetches: PrefetchManager | None = None  # made below: it needs the store
        store = PageStore(
            geometry,
            pools,
            list(self._tiers),
            policies=lambda kind, size: policy_of(config, kind, size, make_policy),
            clock=self.clock,
            bus=self.bus,
            config=self.config,
            gate=self.gate,
            sends=lambda: bool(handing_over),
            on_drop=lambda slots: prefetches.dropped(slots) if prefetches is not None else None,
            on_unused=lambda block: prefetches.unused(block) if prefetches is not None else None,
        )
        if self._ending is not None:
            self._ending.cancel()
        self._ending, self._lost = None, 0
        if store.stack.tiers:
            parts = self, store, self.lock, config.exit_s
            self._ending = Ending(*parts, given=self._given, over=over, prepare=prepare_exit)
        self.loader = loader = PageLoader(store)
        store.writes.give_up_late = loader.expire
        self.prefetches = prefetches = self._open_prefetches(store)
        tables = Tables([torch.device(g.device) for g in geometry.groups], self.config.max_rows)
        self.planner = Planner(
            *(store, tables, self.lock, self.gate.computed),
            prefetches.devices.values() if prefetches is not None else (),
            tails=Tails(store, tables, self._open, self._may_publish, self._vouched),
            on_non_finite=self._non_finite,
            on_refusal=self._refused,
        )
        self.restorer = PrefixMatcher(self.planner, self.gate, self.bus, loader)
        self.snapshots = Snapshots(self.restorer)
        self.restores = RestoreScheduler(self.restorer, partial(count_tokens, self, 0))
        self.gate.model = learned.computes(namespace, geometry)
        self._tell(learned.load)
        self.visits = RequestTracker(self.planner, prefetches)
        self.queue = Queue(self.visits, self.lock)
        self.auditor = partial(
            Auditor, self.restorer, self._like, self.step, self._condemned
        )  # made where pages are audited
        if self.config.record and not self._recordings:
            self.record(self.config.record)
        store.writes.check_room()

    def _check_policies(self) -> None:
        """Check the options of all policies now, and not only when a model is attached.

        Raises:
            ConfigError: A policy has no such option, or options accompany a callable.
        """
        if self._make_policy is not None and self.config.policy_options:
            raise ConfigError(
                "policy_options beside a callable that makes policies", "Let the callable set them"
            )
        chosen = [self.config.selection(kind) for kind in PLACE_KINDS]
        for name, options in [one for i, one in enumerate(chosen) if one not in chosen[:i]]:
            make_policy(name, **options)
        if isinstance(self.config.prefetch, dict):
            configure(PrefetchConfig, "prefetch", self.config.prefetch)

    def _open_prefetches(self, store: PageStore) -> PrefetchManager | None:
        """Return a new prefetch manager; None without a tier, or with prefetch off."""
        if not store.stack.tiers or self.config.prefetch == "off":
            return None
        said, size = self.config.prefetch, store.geometry.page_size
        windows = [g.window if g.kind == "sliding" else None for g in store.geometry.groups]
        pages = [max(1, -(-(window - 1) // size)) if window else None for window in windows]
        options = said if isinstance(said, dict) else {"learned": said} if said == "markov" else {}
        return PrefetchManager(store, self.loader, self.lock, pages, options)

    def _learned(self) -> Path | None:
        """Return the directory for the models that policies learn; None if they are not kept."""
        from flowkv.tiers.disk import DiskTier

        ours = self._tiers[: len(self._tiers) - len(self._given)]  # those given come last
        bare = (tier.inner if isinstance(tier, CodecTier) else tier for tier in ours)
        disks = (tier for tier in bare if isinstance(tier, DiskTier) and tier.writable)
        return next((disk.path for disk in disks), None) if self.config.learned else None

    def _tell(self, work: Callable[[Path, Iterable[PolicyPlace], LoadGate], object]) -> None:
        """Load or save the learned models with `work`; emit a `Warned` event if that fails."""
        directory = self._learned()
        try:
            if directory is not None and self.planner is not None:
                work(directory, self.planner.store.places, self.gate)
        except (ConfigError, OSError) as error:
            self.bus.emit(Warned(code="learned", message=str(error)))

    def record(self, path: str | os.PathLike[str]) -> Recording:
        """Record all requests from now on in a trace file, for `flowkv.sim.replay`.

        The file holds salted hashes of pages, lengths and times, but no tokens and no names.

        Args:
            path: A new file; an old one is replaced.

        Returns:
            The recording, which ends with its `close` or that of the cache.

        Raises:
            ConfigError: The file cannot be made.
            StateError: The cache does not know its model yet.
        """
        planner = self._bound()
        recording = Recording(
            path,
            self.visits,
            self.lock,
            page_size=planner.page_size,
            warn=lambda problem: warn(self, "recording", f"{problem} Check the disk."),
        )
        self._recordings.append(recording)
        return recording

    def trace(self, path: str | os.PathLike[str]) -> TraceFile:
        """Write a timeline for Perfetto: `with kv.trace("restore.json"): ...`.

        The timeline has a track per engine, tier and request. Each event is written at once, and so
        survives an exception that ends the block or the process. Without a trace it costs nothing.

        Args:
            path: A file of JSON; an old one is replaced.

        Returns:
            The trace, which ends with its block, its `close` or that of the cache.

        Raises:
            ConfigError: The file cannot be made.
            StateError: The cache is closed.
        """
        self._alive()
        check = "Check the disk."
        trace = TraceFile(path, self.bus, warn=lambda said: warn(self, "trace", f"{said} {check}"))
        self._traces = [*(other for other in self._traces if not other.closed), trace]
        return trace

    def _may_publish(self, seq: Sequence) -> bool:
        named = seq.namespace == self.namespace and not self.private
        return seq.publishable and named and not self.closed

    def _vouched(self, seq: Sequence) -> bool:
        """Return whether the model is as named, if tokens came since the last look at it.

        If it is not, all open sequences with tokens since their last look become private.
        """
        if self._vouch is None or seq.vouched >= seq.length or self._vouch():
            return True
        for other in [*self._open.values()]:  # the change may be undone before they are released
            other.publishable &= other.vouched >= other.length
        return False

    def _condemned(self, tier: str, verdict: Verdict) -> None:
        """Warn of a wrong page, after it was forgotten with all pages that continue it."""
        self._purge()
        for seq in self._open.values():
            seq.publishable &= not seq.forgotten
        warn(
            self,
            "audit",
            f"A page restored from {tier} is not what the model computes: it is "
            f"{verdict.error:.3g} of its size away, and {verdict.bound:.3g} is allowed. It was "
            "forgotten, and all that continues it. Run `flowkv scrub` on the store, and check the "
            "namespace, if you gave one: it must change with the weights.",
        )

    def _non_finite(self, group: int, page: int) -> None:
        warn(
            self,
            "non-finite",
            f"Page {page} of layer group {group} holds NaN or infinity and is neither shared nor "
            "stored. Check the model's dtype and inputs.",
        )

    def _refused(self, refusal: Refusal) -> None:
        problem = describe(refusal)
        if self.config.non_finite == "error":
            raise NonFiniteError(problem, "Check the model's dtype and inputs, or use codec='raw'")
        warn(
            self,
            "unencoded",
            f"P{problem[1:]}: it stays raw, and so does every other one of this kind, without "
            "another warning. Check the model's dtype and inputs.",
        )

    @property
    def geometry(self) -> Geometry | None:
        """Geometry of the bound model; None before a model is bound."""
        return self.planner.geometry if self.planner else None

    @property
    def page_size(self) -> int:
        """Number of tokens per page."""
        return self.planner.page_size if self.planner else self.config.tokens_per_page

    @property
    def inherited(self) -> bool:
        """Return whether this process was forked from the one that opened the cache."""
        return os.getpid() != self._pid

    def _prove(self, end_s: float = inf) -> bool:
        planner = self.planner
        if planner is not None and planner.pending.work and not (self.closed or self.inherited):
            planner.publish_pending()  # its pages are proven together with the others
        return self.closed or all([callback(end_s) is not False for callback in self._proofs])

    def detach(self) -> None:
        """Detach the cache from its model, which is then as before `attach`.

        Queued pages are still written, at the end of the process at the latest.
        """
        self._prove()
        self._proofs.clear()
        if self._model is not None:
            self._model = lambda: None
        _run_all(self._detach)

    def _alive(self) -> None:
        if self.closed:
            raise StateError("the cache is closed", "Open a new one")
        if os.getpid() != self._pid:
            raise StateError(
                "the cache was opened by the parent process", "Open another one in this process"
            )

    def _bound(self) -> Planner:
        self._alive()
        if self.planner is None:
            raise StateError(
                "the cache is bound to no model yet",
                "Call flowkv.attach(model), or pass a geometry to KV(...)",
            )
        self.planner.publish_pending()
        return self.planner

    def _agreed(self) -> Planner:
        """Drop all pages that other caches erased, then return the planner."""
        planner = self._bound()
        store = planner.store
        if store.stack.erasure_logs.outdated() and erasure.hear(store, list(self._open.values())):
            self._purge()
        return planner

    def open(  # noqa: PLR0913 - the options of a request belong to one call
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
        """Start a sequence and put its cached prefix in place, or start to load it.

        Args:
            tokens: The prompt.
            tenant: Tenant that reads and owns the pages; default the cache's own tenant.
            salts: Inputs beside the tokens that K and V depend on, such as images.
            limit: Most tokens to reuse; default all but the last, which must run to give logits.
            reuse: False computes everything anew; pages are published all the same.
            state: The model has recurrent layers: reuse only where a state was saved.
            session: Name or number of the conversation, for `hint` and for policies that learn
                when conversations continue.
            lease: How long its pages stay, as a lease class of the policy ("turn_end",
                "tool_wait", "one_shot", ...) or a `flowkv.policy.Lease`.
            retain: Spans of tokens that are kept more, or less, than others.
            request: `Sequence.request` of a sequence that was opened in vain for the same request.
            wait: False returns at once, with the pages on the device in place (and those in host
                memory that the device reads, if all others are there). `Sequence.restoration` loads
                the others (None if there are none); `restore` and `prefill` finish it, and may
                compute part of the prefix meanwhile. With `state`, all of it is loaded; if a page
                fails, `length` becomes 0 and `state` None.
            computable: With `wait=False`: whether the caller can compute part of the prefix.

        Returns:
            A sequence whose `length` tokens need no computing.

        Raises:
            TokenError: Not a flat sequence of ids in [0, 2**32).
            CapacityError: Too many sequences are open.
            ConfigError: The policy knows no such lease class, or a span holds no token.
        """
        ids = as_tokens(plain(tokens))
        interrupts.cover()
        self.lock.run_deferred()
        with self.lock:
            planner = self._agreed()
            planner.store.writes.drain()
            seq = self._sequence(planner, tenant, salts)
            try:
                seq.extend(ids)
                seq.prompted, seq.care = len(ids), make_care(session, lease, retain, seq.tenant)
                self.visits.check_lease(seq)
                most = len(ids) - 1 if limit is None else min(limit, len(ids))
                with planner.store.context.moment():
                    seq.request = request
                    planner.store.eviction.expire()
                    if request < 0:  # else the policies know it
                        self.visits.begin(seq, self.queue.pop(seq))
                    if reuse and most > 0 and not self.private:
                        if state:
                            way = self.restorer.attach_whole if wait else self.restores.begin_whole
                            seq.reused = self.snapshots.restore(seq, most, partial(way, seq))
                        elif wait:
                            seq.reused = self.restorer.restore(seq, most)
                        else:
                            self.restores.start_restore(seq, most, computable=computable)
                            seq.reused = seq.length
            except BaseException:
                self.visits.abort(seq.request)
                seq.request = -1
                self._close(seq)
                raise
            count_tokens(self, len(ids), seq.reused)
            if self.bases is not None and reuse and not (salts or seq.owner or self.private):
                self.bases.keep_prompt(ids)
            return seq

    def _sequence(self, planner: Planner, tenant: str | None, salts: Items[Salt]) -> Sequence:
        """Return an empty sequence with a row in the block tables."""
        seq = self._lineless(planner, tenant, salts)
        seq.row = planner.tables.open_row()
        self._open[id(seq)] = seq
        return seq

    def _like(self, seq: Sequence) -> Sequence:
        """Return an empty sequence with the tenant, model and salts of another one."""
        twin = self._sequence(Planner.of(seq), None, seq.salts)
        twin.tenant, twin.namespace, twin.chains = seq.tenant, seq.namespace, seq.chains
        twin.placed, twin.arrived_ns = seq.placed, seq.arrived_ns
        return twin

    def _lineless(self, planner: Planner, tenant: str | None, salts: Items[Salt]) -> Sequence:
        """Return a sequence without a row in the block tables, for lookups only."""
        name = self.config.tenant if tenant is None else tenant
        salt = tenant_salt(name, self._secret)
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
        # A finalizer may call this in the middle of a change, so the close may wait (see Guard).
        self.lock.defer(lambda: self._close(seq))

    def _close(self, seq: Sequence) -> None:
        if self.inherited:
            seq.closed = True  # its pages are the parent's
        if not seq.closed:
            if seq.restoration is not None:
                seq.publishable &= not seq.restoration.lacks
                seq.restoration.abandon()
            seq.closed, served = True, seq.length >= seq.prompted
            if seq.suspended is not None:
                swap.discard(Planner.of(seq), seq)
            self._open.pop(id(seq), None)
            if Planner.of(seq) is self.planner:
                if self._records is not None and seq.request >= 0:
                    self._records(seq)
                self.visits.end(seq)
            Planner.of(seq).release(seq)
            if self.config.quotas:
                Planner.of(seq).store.eviction.shed()
            if served:
                Planner.of(seq).store.eviction.copy_ahead()
            Planner.of(seq).look_ahead()

    def fork(self, seq: Sequence) -> Sequence:
        """Return a second sequence with the same tokens; pages are shared until one writes.

        Raises:
            CapacityError: Too many sequences are open.
            StateError: The sequence is closed, suspended or in a step.
        """
        with self.lock:
            self._alive()
            child = self._like(seq)
            try:
                Planner.of(seq).fork(seq, child)
            except BaseException:
                self._close(child)
                raise
            return child

    def truncate(self, seq: Sequence, length: int) -> None:
        """Drop the tokens of a sequence from position `length` on."""
        Planner.of(seq).truncate(seq, length)

    def suspend(self, seq: Sequence) -> int:
        """Free the device pages of a sequence until `resume` restores them, bit for bit.

        Its private pages are copied to host memory now, published pages once they leave the device.
        Returns the most bytes of host memory that the copies can take.
        """
        with self.lock:
            return swap.suspend(Planner.of(seq), seq)

    def resume(self, seq: Sequence) -> None:
        """Restore the pages of a suspended sequence, bit for bit.

        Raises:
            CapacityError: The pages do not fit now; the sequence stays suspended.
        """
        with self.lock:
            self._agreed()
            swap.resume(Planner.of(seq), seq)
            # Publish the pages again: they are shared again with sequences of the same prefix.
            Planner.of(seq).publish(seq, exact=True)

    @contextmanager
    def _probe(
        self, tokens: Tokens, tenant: str | None, salts: Items[Salt], *, other: bool = False
    ) -> Iterator[Sequence]:
        """Look up a prompt, or with `other` the same tokens in texts of the other encoding."""
        interrupts.cover()
        self.lock.run_deferred()
        with self.lock:
            planner = self._agreed()
            planner.store.writes.drain()
            planner.look_ahead()
            ids = as_tokens(plain(tokens))
            seq = self._lineless(planner, tenant, self._salted(ids, salts, other=other))
            seq.note(ids)
            yield seq

    def _salted(
        self, ids: NDArray[np.uint32], salts: Items[Salt], *, other: bool = False
    ) -> Items[Salt]:
        """Return the salts of a prompt with that of long texts, where a model encodes them so."""
        switch = self._long()
        if switch is None or (len(ids) > switch[0]) == other or switch[1] in salts:
            return salts
        return [switch[1], *salts]

    def explain(
        self, tokens: Tokens, *, tenant: str | None = None, salts: Items[Salt] = ()
    ) -> Explanation:
        """Return how much of a prompt is cached, what prevents more, and the use of CUDA graphs."""
        with self._probe(tokens, tenant, salts) as seq:
            if self.private:
                why = f"nothing of this model is shared: {self.private}"
                found = Explanation(len(seq.tokens), 0, {}, why)
            else:
                found = explain(self.restorer, seq, len(seq.tokens) - 1)
        captured, replayed, _, eager, prompts = self.graphed.values()
        decoding = f"{captured} steps were captured, {replayed} replayed" if captured else ""
        decoding = f"decode steps run eagerly: {eager}" if eager else decoding
        if prompts and not eager:
            decoding += f"; short prompts run eagerly: {prompts}"
        return msgspec.structs.replace(found, decoding=decoding)

    def warm(self, tokens: Tokens, *, tenant: str | None = None, salts: Items[Salt] = ()) -> int:
        """Load a cached prompt onto its device ahead of its use; return its tokens there.

        Raises:
            CapacityError: Too many sequences are open.
        """
        with self.lock:
            ids = as_tokens(plain(tokens))
            seq = self._sequence(self._agreed(), tenant, self._salted(ids, salts))
            try:
                seq.note(ids)
                Planner.of(seq).store.eviction.expire()
                return self.restorer.restore(seq, len(seq.tokens))
            finally:
                self._close(seq)

    def prefetch(
        self, tokens: Tokens, *, tenant: str | None = None, salts: Items[Salt] = ()
    ) -> Prefetch:
        """Start to load a cached prompt onto its device, as far as idle pages make room for it.

        Returns at once; call `cancel` of the result if the prompt is not going to be used.
        """
        with self._probe(tokens, tenant, salts) as seq:
            return self._bring(seq)

    def enqueue(
        self,
        tokens: Tokens,
        *,
        tenant: str | None = None,
        salts: Items[Salt] = (),
        prefetch: bool = True,
    ) -> WaitingRequest:
        """Register a prompt that waits to be served: its cached pages stay, and are prefetched.

        `open` of the same prompt serves the request that has waited longest.

        Args:
            tokens: The prompt.
            tenant: Tenant of the prompt; default the cache's own.
            salts: Inputs beside the tokens that the prompt's K and V depend on.
            prefetch: Start to load it onto its device, as `prefetch` does.

        Returns:
            The request, which can be cancelled.
        """
        with self._probe(tokens, tenant, salts) as seq:
            queued = self.queue.push(seq)
            if prefetch and self.prefetches is None:
                queued.prefetch = self._bring(seq)
            elif prefetch and self.prefetches is not None:
                self.restorer.absent(seq)  # looks up pages that others wrote to shared tiers
                chains = self.visits.chains(seq)
                queued.prefetch = self.prefetches.enqueue(queued.request, chains)
            return queued

    def _bring(self, seq: Sequence) -> Prefetch:
        prefetch = Prefetch(Planner.of(seq).store, self.loader, self.lock)
        prefetch.issue(self.restorer.absent(seq))
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
        """Announce when a prompt, or a conversation, is expected to be used next.

        The hint holds until the prompt's last known page is used. A wrong hint costs hits, never
        wrong output. `flowkv.NEVER` for conversations that are over helps the policy most.

        Args:
            what: A prompt, or the `session` that the prompts of a conversation were opened with.
            eta_s: Seconds from now, `flowkv.SOON` or `flowkv.NEVER`.
            sigma: How far off it may be: standard deviation of the logarithm, 0.5 for "within a
                factor of about two".
            tenant: Tenant of the prompt; default the cache's own.
            salts: Inputs beside the tokens that the prompt's K and V depend on.

        Returns:
            Tokens that the hint covers; 0 if none of them is cached any more.

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
        """Pin or unpin a prompt's cached pages against eviction; return their tokens."""
        with self._probe(tokens, tenant, salts) as seq:
            blocks, store = self.restorer.known_blocks(seq), Planner.of(seq).store
            for block in blocks:
                store.pin(block, pinned)
            store.writes.write_chosen(store.stack.admission.at_once(blocks))
            return sum(block.group == 0 for block in blocks) * self.page_size

    def forget(
        self, tokens: Tokens | None = None, *, tenant: str | None = None, salts: Items[Salt] = ()
    ) -> int:
        """Erase a prompt and all that continues it from every tier, or a whole tenant.

        Waiting requests (`enqueue`) for erased pages are cancelled. Erasing the cache's own tenant
        also erases the outputs that encoders memoize (`attach(memo=...)`). Every tier overwrites or
        removes the bytes, also those that other processes wrote, and is then checked for remains.
        Prefixes shared with other prompts stay; but a prompt of less than a page takes all prompts
        of its tenant along of which this process does not know the tokens, as after a restart. Open
        sequences keep their pages, and publish no further ones.

        Args:
            tokens: The prompt; None for everything of the tenant.
            tenant: Tenant of the prompt; default the cache's own.
            salts: Inputs beside the tokens that the prompt's K and V depend on.

        Returns:
            Blocks erased, and rows of encoders.

        Raises:
            StoreError: A tier, which the message names, could not prove that nothing is left. All
                others have erased by then, and the cache has dropped all of the blocks.
        """
        with self._probe(() if tokens is None else tokens, tenant, salts) as seq, self._purged():
            store = Planner.of(seq).store
            store.writes.flush(self.config.load_deadline_s)
            if tokens is None:
                try:
                    found = self._forget_realm(erasure.Realm(seq.tenant, None))
                finally:
                    name = self.config.tenant if tenant is None else tenant
                    others = sum(forget(name) for forget in self._forgets)
                return found + others
            try:
                try:
                    found = erasure.forget_prompt(store, seq)
                finally:
                    others = self._unlearns(tokens, tenant)
                    if self._long() is not None:  # shorter and longer texts may begin so, too
                        with self._probe(tokens, tenant, salts, other=True) as twin:
                            others += erasure.forget_prompt(store, twin)
                return found + others
            finally:
                for open_seq in self._open.values():
                    known = min(open_seq.known, seq.known)  # may be less than a page
                    begins = np.array_equal(open_seq.tokens[:known], seq.tokens[:known])
                    whole = known == seq.known or open_seq.length > known
                    again = begins and whole and open_seq.tenant == seq.tenant
                    open_seq.publishable &= not (again or open_seq.forgotten)

    def invalidate(self) -> int:
        """Erase everything of this model on every tier, for instance after its weights changed.

        Open sequences keep their pages, and publish no further ones.

        Returns:
            Blocks erased.

        Raises:
            StoreError: See `forget`.
        """
        with self.lock:
            self._agreed().store.writes.flush(self.config.load_deadline_s)
            drop_unproven(self)
            with self._purged():
                return self._forget_realm(erasure.Realm(None, self.namespace))

    @contextmanager
    def _purged(self) -> Iterator[None]:
        """Purge references to erased pages when the block ends, also by an exception."""
        try:
            yield
        finally:
            self._purge()
            self._agreed()  # drop what other caches erased meanwhile: no request waits for it

    def _purge(self) -> None:
        """Remove forgotten pages from the histories of requests and from the queue."""
        self.visits.purge()
        self.queue.purge(self._bound().store.index.slot)
        if self.bases is not None:
            self.bases.forget()

    def _forget_realm(self, realm: erasure.Realm) -> int:
        for seq in self._open.values():
            seq.publishable &= seq.tenant != realm.tenant
        return erasure.forget_realm(self._bound().store, realm)

    def save_state(self, seq: Sequence, values: dict[str, Any], *, replaces: bool = False) -> bool:
        """Save the state of recurrent layers after exactly `seq.length` tokens.

        Args:
            seq: The sequence; its tokens must be known.
            values: Named tensors, numbers, text and lists of them.
            replaces: Whether earlier states of the text that are of little use beside this one are
                forgotten, see `flowkv.policy.pages`.

        Returns:
            Whether it is kept.
        """
        with self.lock:
            kept = self._may_publish(seq) and self.snapshots.save(seq, values)
            if kept and replaces:
                self.snapshots.replace_older(seq)
            return kept

    def keep(
        self, name: str, tensors: Mapping[str, torch.Tensor], *, tenant: str | None = None
    ) -> bool:
        """Store named tensors, weights for instance, on the most durable tier.

        Tensors stored before under this name are replaced. The tensors are copied part by part;
        parts not written when the call returns are written in the background.

        Args:
            name: Name of the bundle, for `fetch`.
            tensors: Tensors on any device.
            tenant: Tenant of the bundle; default the cache's own.

        Returns:
            Whether there was room for all of them.

        Raises:
            StoreError: A tensor has a dtype or layout that cannot be stored, or a name is no text.
        """
        return self._bundles(tenant).keep(name, tensors)

    def fetch(
        self, name: str, only: Iterable[str] | None = None, *, tenant: str | None = None
    ) -> dict[str, torch.Tensor] | None:
        """Load tensors stored by `keep` onto the CPU, verified; return None if they are missing.

        Args:
            name: Name of the bundle.
            only: Names of the tensors to load; only the stripes that hold them are read.
            tenant: Tenant of the bundle; default the cache's own.

        Raises:
            StoreError: There is no tensor of one of these names.
        """
        return self._bundles(tenant).fetch(name, only)

    def _bundles(self, tenant: str | None) -> Bundles:
        with self._probe((), tenant, ()) as seq:
            return Bundles(Planner.of(seq).store, self.lock, seq.namespace, seq.tenant)

    def export(
        self,
        path: str | os.PathLike[str],
        tokens: Tokens | Iterable[Tokens] | None = None,
        *,
        tenant: str | None = None,
        salts: Items[Salt] = (),
    ) -> Exported:
        """Write the cached pages of prompts to one file, for `load` in another process.

        Pages are written as stored, in their codec, with stored tails and the states of recurrent
        layers.
        Frames are checked, encrypted and compressed as on a disk tier. The file appears whole or
        not at all. Other threads can use the cache meanwhile.

        Args:
            path: The file.
            tokens: A prompt, or several; None for everything of the tenant.
            tenant: Tenant of the prompts; default the cache's own.
            salts: Inputs beside the tokens that the prompts' K and V depend on.

        Raises:
            StoreError: The file cannot be written.
        """
        self._prove()
        planner, blocks = self._bound(), dict[int, Any]()
        store = planner.store
        if tokens is None:
            with self._probe((), tenant, salts) as seq:
                mine = erasure.Realm(seq.tenant, seq.namespace)
                own = (b for b in store.index if mine.holds(b) and b.kind in ("page", "state"))
                blocks = {id(block): block for block in own}
        for prompt in () if tokens is None else _prompts(tokens):
            with self._probe(prompt, tenant, salts) as seq:
                known = [*self.restorer.known_blocks(seq), *self.snapshots.known_states(seq)]
                end = len(seq.tokens)
                for stop in {end, max(0, end - 1)}:  # the last token of a prompt must run
                    known += planner.tails.stored(seq, stop // planner.page_size, stop)
                blocks |= {id(block): block for block in known}
        envelope = make_envelope(self.config)
        return export.write(store, self.lock, path, envelope, blocks.values())

    def load(self, path: str | os.PathLike[str]) -> Loaded:
        """Load the pages of an `export` file, onto the device while pages are free, else the tiers.

        Every frame is checked; frames that are damaged, or of another model, geometry or codec, are
        refused and counted. Frames with a plain checksum (`integrity="xxh3"`) are as trustworthy as
        the source of the file; encrypted ones (`"aead"`) were written with the secret.

        Raises:
            StoreError: The file cannot be read, or `export` did not write it.
        """
        store, envelope = self._bound().store, make_envelope(self.config)
        return export.read(store, self.lock, path, envelope, self.namespace)

    def step(self, seqs: Items[Sequence], new_tokens: Items[Tokens]) -> Step:
        """Plan a step of your own model: `with kv.step(seqs, tokens) as step: model(step.tokens)`.

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
        interrupts.cover()
        given = [plain(ids) for ids in new_tokens]
        packed = pack(given)
        step = plan(self, seqs, [len(ids) for ids in given])
        step.give(packed)
        return step

    def prefill(self, seqs: Items[Sequence], *, chunk: int = 512) -> Iterator[Step]:
        """Yield steps that compute the missing tokens: `for step in kv.prefill(seqs): ...`.

        Each step is entered while the loop body runs, and committed when the loop continues.
        Leaving the loop early rolls the current step back. With `audit=` some steps recompute
        restored pages first (`Step.audits`); wrong pages are computed anew with the rest.

        If a sequence was opened with `wait=False`, part of its prefix is computed while the rest
        loads, and the tokens behind the prefix once it is complete. `restore` overlaps these, too.

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
        if seqs and (overflow := Planner.of(seqs[0]).overflow) is not None:
            chunk = min(chunk, overflow.chunk(len(seqs)))
        for out in fronts(self, seqs, chunk):
            if isinstance(out, Step):
                yield out
                continue
            if (restoration := RestoreJob.of(out)) is not None:
                restoration.finish(ok=restoration.complete())
            yield from self.prefill([out], chunk=chunk)
        if seqs:
            incomplete = [seq for seq in seqs if seq.position < len(seq.tokens)]
            yield from self.auditor().steps(incomplete)
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
        """Finish the prefill of prompts opened with `wait=False`, in the shortest time.

        Part of each prefix is computed from the front while the rest of it is loaded from the back.
        The tokens behind the prefix are computed during the loads: each layer of that forward waits
        for this layer of the pages. Pages that do not arrive in time are computed here, in further
        forwards.

        Args:
            seqs: Sequences in no step.
            forward: Called with each step, over one of the sequences, to run your model inside it;
                called again for tokens if their first forward was given up.
            chunk: Most tokens in one step.

        Returns:
            For each sequence, the result of `forward` for the end of its prompt; None if no token
            was left to compute.

        Raises:
            CapacityError: The pages do not fit.
            ConfigError: `chunk` is no positive number.
        """
        if chunk < 1:
            raise ConfigError(f"chunk={chunk}", "Compute at least one token per step")
        outputs: dict[int, Any] = {}
        for out in fronts(self, seqs, chunk):
            if isinstance(out, Step):
                forward(out)
            elif (restoration := RestoreJob.of(out)) is not None:
                outputs[id(out)] = behind(self, out, forward, restoration, chunk)
        for seq in seqs:
            for step in self.prefill([seq], chunk=chunk):
                outputs[id(seq)] = forward(step)
        for seq in seqs:  # wrong pages are computed anew
            for step in self.auditor().steps([seq], whole=True):
                forward(step)
            for step in self.prefill([seq], chunk=chunk) if not seq.closed else ():
                outputs[id(seq)] = forward(step)
        return [outputs.get(id(seq)) for seq in seqs]

    def audit(self, seq: Sequence, forward: Callable[[Step], Any]) -> int:
        """Recompute the restored pages of a sequence that `audit=` samples, and compare them.

        A page that differs by more than its codec and the model's rounding explain is forgotten on
        every tier, with all pages that continue it, and reported by a warning and events
        (`Audited`, `Quarantined`). While part of the prompt is still to be computed, the sequence
        is then cut before the page, and `prefill` computes it anew; `prefill` audits by itself.

        Args:
            seq: A sequence in no step.
            forward: Called with each step, to run your model over one page inside it.

        Returns:
            Pages that were wrong.
        """
        samples = Planner.of(seq).store.samples
        before = samples.mismatches
        for step in self.auditor().steps([seq]):
            forward(step)
        return samples.mismatches - before

    @contextmanager
    def hand_over(self) -> Iterator[None]:
        """Pass prompts to other processes while they are computed: `with kv.hand_over(): ...`.

        The block encloses the prefill in the process that computes; the other process calls
        `take_over`. Both name the same tier and namespace. Every page is written as it becomes
        final, even if recomputing it here were faster than loading; a page of a lossy codec at the
        latest when its sequence closes. When the block ends, other processes can read all pages, or
        `load_deadline_s` have passed.

        Raises:
            StateError: No tier of the stack can be read by others.
        """
        store = self._bound().store
        if store.stack.admission.lasting() < 0:
            raise StateError(
                "the stack has no tier that other processes can read",
                'Add one to the stack, such as "host:NAME:8GiB" or "disk:./kv"',
            )
        self._prove()  # so that no page waits for the first digest of all weights
        self._handing_over.append(None)
        with ExitStack() as last:
            last.callback(self._handing_over.pop)
            last.callback(lambda: self.closed or self.flush(self.config.load_deadline_s))
            yield

    def take_over(
        self,
        seq: Sequence,
        forward: Callable[[Step], Any],
        *,
        patience_s: float | None = None,
        chunk: int = 512,
    ) -> Any:
        """Finish the prefill of a prompt that another process computes, as its pages arrive.

        Pages are loaded onto the device as they are published. When all have arrived, or none
        came for a while, the known pages are attached and the rest is computed.

        Args:
            seq: The sequence, as `open` returned it.
            forward: Called with each step, to run your model inside it.
            patience_s: Longest wait while nothing arrives; default `load_deadline_s`.
            chunk: Most tokens in one step.

        Returns:
            The result of the last call of `forward`; None if no token was left to compute.

        Raises:
            CapacityError: The pages do not fit.
            StateError: The sequence is closed, suspended or in a step, or partly on its way.
        """
        patience_s = self.config.load_deadline_s if patience_s is None else patience_s
        planner, pages = Planner.of(seq), (len(seq.tokens) - 1) // self.page_size
        with self.lock:
            planner.idle(seq)
        known, end_s = seq.length // self.page_size, now_s() + patience_s
        asked, coming = known, None
        while known < pages and now_s() < end_s:
            with self.lock:
                self._agreed().store.writes.drain()
                found = self.restorer.match(seq, pages)
                if found > known:
                    known, end_s = found, now_s() + patience_s
                if known > asked and (coming is None or not coming.left):
                    asked, coming = known, self._bring(seq)
            if known < pages:
                sleep(_POLL_S)
        with self.lock:
            planner.idle(seq)
            if known * self.page_size > seq.length and not seq.dropped:
                planner.vacate(seq)
                planner.tables.lengths[seq.row] = 0
                planner.store.eviction.expire()
                reused = self.restorer.restore(seq, known * self.page_size, pays=True)
                count_tokens(self, 0, reused - seq.reused)
                seq.reused = reused
        output = None
        for step in self.prefill([seq], chunk=chunk):
            output = forward(step)
        return output

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("is_compileable", "get_seq_length"):  # which models ask of their caches
                remedy = "Pass kv.cache(**inputs) in its place, or leave it out"
                raise _NoCacheError("a KV is no cache of one call", remedy)
            return object.__getattribute__(self, name)  # raises again what led here

    def cache(
        self,
        *args: Any,
        tenant: str | None = None,
        session: str | int | None = None,
        lease: str | Lease = "",
        retain: Items[Retain] = (),
        **inputs: Any,
    ) -> Any:
        """Make a Hugging Face cache for one `generate(..., past_key_values=kv.cache(...))`.

        Args:
            *args: `input_ids`, if not by name.
            tenant: Tenant that reads and owns the pages.
            session: See `open`; shared by all rows.
            lease: See `open`.
            retain: See `open`; positions count each row's own tokens, without padding.
            **inputs: The arguments of `generate`.
        """
        care = {"tenant": tenant, "session": session, "lease": lease, "retain": retain}
        return above.open_cache(self, *args, care=care, **inputs)

    def learn(self, documents: Items[Tokens], *, tenant: str | None = None) -> int:
        """Register documents for reuse anywhere in a prompt with `attach(..., reuse="blend")`.

        Pages that are not cached yet are computed, behind the first token of a text. Every process
        must call this: prompts are searched only for registered documents.

        Args:
            documents: Token ids of each, tokenized alone and without a first token.
            tenant: Tenant that reads and owns the pages.

        Returns:
            Tokens that were computed.

        Raises:
            CapacityError: A document does not fit the device pool.
            StateError: No model is attached with `reuse="blend"`.
            TokenError: `documents` holds no token ids.
        """
        if self._learns is None:
            raise StateError(
                "this cache reuses prompts exactly", 'Attach the model with reuse="blend"'
            )
        return self._learns(documents, tenant)

    def calibrate(
        self, tokens: Tokens | list[str] | None = None, *, kl: float | None = None
    ) -> dict[str, float]:
        """Learn from a text how pages are coded on cold tiers (`cold="kvt"`); code later ones so.

        Up to a third of the text is kept apart: the change that coded pages make there decides how
        finely they are coded. The result is stored on every cold tier, for later processes. Pages
        stored before stay as they are, and readable.

        Args:
            tokens: Token ids of a text like those that the cache will hold: at least some 1,000,
                better 16,000. For a model of `flowkv.load`, also a list of texts. Default: the
                prompts so far, without those of tenants, up to 32,768 tokens.
            kl: Largest mean divergence, in nats; default that of the configuration.

        Returns:
            Measured values: "kept" (1.0 if pages are coded now), "bits" a value, "kl",
            "same_token" (share of tokens with the same most likely one), "perplexity" (relative
            change), "tokens" that were judged, and "step".

        Raises:
            ConfigError: There are too few tokens, or the model's pages cannot be coded.
            StateError: No model is attached with `cold="kvt"`; or it was forgotten, or changed,
                meanwhile.
        """
        if self._calibrates is None or self.bases is None or not self.config.cold:
            raise StateError("this cache codes no pages", 'Attach the model with cold="kvt"')
        bound = self.config.cold_divergence() if kl is None else kl
        if not 0 < bound < 10:
            raise ConfigError(f"kl={kl}", "Name a divergence above 0 and below 10, such as 0.005")
        found = self._calibrates(tokens, bound)
        if not found["kept"]:
            return found
        stored = list[bool]()
        for tier in [one for one in self._tiers if isinstance(one, CodecTier)]:
            with self.lock:
                stack = self.planner.store.stack if self.planner else None
                n_bytes = tier.basis_bytes()
                fits = n_bytes <= tier.capacity_bytes // 4 and tier.writable
                if stack is not None and fits and tier in stack.tiers:
                    stack.make_room(stack.tiers.index(tier), n_bytes)
            stored.append(fits and tier.store_bases())
            if not stored[-1]:
                why = f"{tier.name}: their basis, {format_size(n_bytes)}, cannot be stored there"
                remedy = f"Give it {format_size(4 * n_bytes)} or more, and let this process write"
                warn(self, f"bases on {tier.name}", f"pages stay raw on {why}. {remedy} to it.")
        if not stored:
            warn(self, "bases", "no page is coded: no disk or remote tier was opened. Add disk=...")
        return {**found, "kept": float(any(stored))}

    def sparsify(
        self,
        seq: Sequence,
        keep: NDArray[np.integer] | Items[NDArray[np.integer]] | None = None,
        *,
        budget_tokens: int | Items[int] | None = None,
    ) -> int:
        """Remove tokens from an open sequence, which continues at its true positions.

        Its pages become private, and no further ones are published. `Sequence.lengths` counts the
        tokens that are left in each layer group, `Sequence.position` includes the removed ones.

        Args:
            seq: A sequence of a model with full attention in all layers.
            keep: `[L, Hk, n]`: the slots that stay, ascending, for each layer and KV head; one such
                array for each layer group, if there are several, with an n of its own.
            budget_tokens: Instead of `keep`: how many tokens stay, or how many in each layer group,
                chosen by the attention mass of watched steps (`Step.watch`), see `policy.pages`.

        Returns:
            Tokens that were removed, in the group that lost most.

        Raises:
            CapacityError: The pages of the remaining tokens do not fit beside the old ones.
            ConfigError: Not exactly one of `keep` and `budget_tokens`, too small a budget, or
                budgets that are not one for each group.
            GeometryError: `keep` does not fit, or a layer group has a window.
            StateError: The sequence is closed, suspended or in a step, or no step was watched.
        """
        with self.lock:
            self._alive()
            if (keep is None) == (budget_tokens is None):
                raise ConfigError(
                    "keep and budget_tokens are both given, or both missing",
                    "Pass either keep or budget_tokens",
                )
            if budget_tokens is not None:
                keep = chosen(seq, budget_tokens)
            elif isinstance(keep, np.ndarray):
                keep = [keep]
            return sparsify(Planner.of(seq), seq, keep or ())

    def defragment(self) -> int:
        """Empty sparse slabs by moving pages; return the moves, 0 while a step is under way."""
        return self._bound().defragment()

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all published pages are written to the tiers.

        Pages that are still to be encoded are written afterwards.

        Returns:
            False after a timeout, or if pages were lost since the last call: a tier was full,
            failed, or was too busy to take them in time.
        """
        if self.inherited:
            return False  # it is the parent that writes
        self._prove()
        return self._flush(timeout_s)

    def _flush(self, timeout_s: float = 60.0) -> bool:
        interrupts.cover()
        self.lock.run_deferred()
        with self.lock:
            if self.planner is None:
                return True
            store = self._agreed().store
            store.writes.write_chosen(store.index)
            waiting, told = store.writes.flush(timeout_s), self._lost
            self._lost = store.stack.lost
            return not waiting and self._lost == told

    def stats(self) -> dict[str, Any]:
        """Return statistics: tokens seen and reused, hit rate, pages, bytes and events by place.

        The call changes nothing: pages that a step on a GPU fills count from the end of the next
        step.
        """
        self.lock.run_deferred()
        with self.lock:
            seen, reused, planner = self.tokens_seen, self.tokens_reused, self.planner
            found = self.metrics.by("hit_tokens_total", "tier")
            known = sum(found.values()) + self.metrics.total("miss_tokens_total")
            report: dict[str, Any] = {
                "tokens_seen": seen,
                "tokens_reused": reused,
                "hit_rate": reused / seen if seen else 0.0,
                "hits": {tier: tokens / known for tier, tokens in found.items() if known},
                "foreign": self.private,
                "tenants": self.tenants.report(),
                "sequences": len(self._open),
                **dict.fromkeys(("blocks", "ghosts"), 0),
                **{part: {} for part in _PARTS},
                "blend": dict(self.blended),
                "cold": self.bases.measured() if self.bases is not None else {},
                "graphs": dict(self.graphed),
                "events": self.metrics.snapshot(),
            }
            if planner is None:
                return report
            if self.prefetches is not None:
                report["prefetch"] = self.prefetches.counters()
            if planner.overflow is not None:
                report["overflow"] = planner.overflow.counters()
            ours, quotas = not self.inherited, self.config.quotas
            return report | store_report(planner.store, planner.tables, quotas, tiers=ours)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "How it was served",
        tenants: bool = False,
    ) -> OpenReport:
        """Measure how requests are served, and write a report: `with kv.report("x.html"): ...`.

        The report covers all use of the cache meanwhile: latencies, requests over time, memory and
        hits by place. It is one HTML file that loads nothing from elsewhere.

        Args:
            path: The HTML file; an old one is replaced.
            title: Heading of the report.
            tenants: Whether the report names tenants.

        Returns:
            The report, which writes the file when its block ends, or with its `close`; `summary()`
            returns the numbers.

        Raises:
            ConfigError: The file cannot be made.
            MissingDependencyError: Without the extra `report`.
            StateError: The cache is closed.
        """
        self._alive()
        account = above.open_report(path, self.bus, self._levels, title=title, tenants=tenants)
        self._accounts = [*(other for other in self._accounts if not other.closed), account]
        return account

    def close(self) -> None:
        """Detach the model, write all published pages and release everything. Idempotent."""
        with ExitStack() as last:  # an error in one of these calls does not skip the others
            last.callback(self._release)
            last.callback(self.detach)
            if not self.inherited:
                last.callback(_run_all, self._closings)
                self._prove()

    def _release(self) -> None:
        if self.inherited:
            return  # tiers and their pending answers belong to the parent process
        self.lock.run_deferred()
        with self.lock:
            if self.closed:
                return
            with ExitStack() as last:
                if self._ending is not None:
                    last.callback(self._ending.cancel)
                for trace in self._traces:
                    last.callback(trace.close)
                for tier in self.planner.store.stack.tiers if self.planner else self._tiers:
                    last.callback(tier.close)
                if self.planner:
                    last.callback(self.planner.store.stack.erasure_logs.close)
                last.callback(setattr, self, "closed", True)
                if self.planner:
                    last.callback(self.planner.store.stack.mover.cancel)
                last.callback(self._tell, learned.save)
                for recording in self._recordings:
                    last.callback(recording.close)
                if self._ending is not None and self.planner:
                    last.callback(self._ending.finish, self.planner.store.stack.lost)
                last.callback(self._flush)  # also pages that closing the sequences encoded
                last.callback(self._prove)
                for seq in list(self._open.values()):
                    last.callback(self._close, seq)
                for account in self._accounts:
                    last.callback(account.close)
                self._flush()

    def __reduce__(self) -> Any:
        return _no_cache, ()

    @interrupts.unbroken
    def __enter__(self) -> KV:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "unbound" if self.planner is None else "open"
        return f"<flowkv.KV {state}: {self.tokens_reused} of {self.tokens_seen} tokens reused>"


# Functions for code that attaches a cache to a model; users of a cache do not need them.


def bind(kv: KV, geometry: Geometry, namespace: Namespace, *, private: str = "") -> None:
    """Set the model that a cache serves from now on.

    Open sequences keep their pages, but publish no further ones. A new geometry gets fresh pools;
    the tiers stay.

    Args:
        kv: The cache.
        geometry: Geometry of the model.
        namespace: Name of the model and its weights.
        private: Why no page of the model may be shared or stored; "" if pages may.

    Raises:
        CapacityError: The device pool is too small for the geometry.
        StateError: The cache is closed.
    """
    with kv.lock:
        kv._alive()
        exact = msgspec.structs.replace(namespace, geometry=geometry.fingerprint().hex())
        if kv.planner is None or geometry != kv.planner.geometry:
            kv._build(geometry, exact)
        else:
            kv._introduce(exact)
        kv.namespace, kv.private = exact.digest(), private
        drop_unproven(kv)  # also if the old name comes back while sequences are open


def drop_unproven(kv: KV) -> None:
    """Keep pages of a model that may have changed private: those of open and closed sequences."""
    with kv.lock:
        if kv.planner is not None:
            kv.planner.store.tails.drop()
            kv.planner.publisher.refuse()
        for seq in kv._open.values():
            seq.publishable = False


def over(kv: KV) -> bool:
    """Return whether the model that a cache was attached to is gone, or was detached."""
    return kv._model is not None and kv._model() is None


def prepare_exit(kv: KV, end_s: float) -> bool:
    """Prove computed pages, save learned models and close recordings, before a cache ends.

    Returns:
        Whether all pages were proven by `end_s`, a time of `time.monotonic`.
    """
    proven = kv._prove(end_s)
    kv._tell(learned.save)
    for recording in kv._recordings:
        recording.close()
    return proven


def forget_name(kv: KV, namespace: bytes) -> None:
    """Erase all pages that were published under a namespace of a model, on every tier.

    Raises:
        StoreError: A tier cannot erase them.
    """
    with kv.lock, kv._purged():
        kv._forget_realm(erasure.Realm(None, namespace))


def follow(  # noqa: PLR0913 - each callback of the attaching code has a name
    kv: KV,
    *,
    model: Callable[[], object] | None = None,
    prove: Callable[[float], object] | None = None,
    vouch: Callable[[], bool] | None = None,
    detach: Callable[[], None] | None = None,
    close: Callable[[], None] | None = None,
    forget: Callable[[str], int] | None = None,
    learn: Callable[[Items[Tokens], str | None], int] | None = None,
    unlearn: Callable[[Tokens, str | None], int] | None = None,
    long: Callable[[], tuple[int, Salt] | None] | None = None,
    record: Callable[[Sequence], object] | None = None,
    calibrate: Callable[[Any, float], dict[str, float]] | None = None,
) -> None:
    """Register callbacks of the code that attaches a cache to a model.

    Args:
        kv: The cache.
        model: Returns the model, None once it is gone.
        prove: Proves computed pages, so that they can be kept, until a time of `time.monotonic`;
            returns False if that did not suffice.
        vouch: Returns whether the model is still as it was named.
        detach: Called by `KV.detach`.
        close: Called by `KV.close` before anything is released.
        forget: Erases data kept beside the pages of a tenant, and counts it.
        learn: Called by `KV.learn`.
        unlearn: Erases a document, if a prompt to be erased is one, and counts it.
        long: Returns the length beyond which the model encodes all tokens of a text otherwise, and
            the salt of such texts; None if it does not.
        record: Called with each sequence that ends, before its pages are released.
        calibrate: Called by `KV.calibrate`.
    """
    kv._model = model or kv._model
    kv._vouch = vouch or kv._vouch
    kv._proofs += [prove] if prove else []
    kv._detach += [detach] if detach else []
    kv._closings += [close] if close else []
    kv._forgets += [forget] if forget else []
    kv._long = long or kv._long
    kv._calibrates = calibrate or kv._calibrates
    kv._learns, kv._unlearns = learn or kv._learns, unlearn or kv._unlearns
    kv._records = record or kv._records


def warn(kv: KV, code: str, message: str) -> None:
    """Emit a `Warned` event and a Python warning, once per `code`."""
    if code not in kv._warned:
        kv._warned.add(code)
        if not kv.inherited:  # a subscriber may have been in the middle of work at the fork
            kv.bus.emit(Warned(code=code, message=message))
        warnings.warn(message, stacklevel=3)


def plan(
    kv: KV, seqs: Items[Sequence], counts: Items[int] | NDArray[np.int64], last: Step | None = None
) -> Step:
    """Plan a step over rows; their new token ids are passed elsewhere (`Sequence.note`), or never.

    Args:
        kv: The cache.
        seqs: The rows.
        counts: New tokens of each.
        last: A finished step; its arrays are reused if the same rows continue to decode.
    """
    kv._alive()
    planner: Any = seqs[0].planner if seqs else kv._bound()
    if planner.store.stack.erasure_logs.behind:  # another cache erased something
        with kv.lock:
            kv._agreed()
    return Step(planner, seqs, np.asarray(counts, np.int64), last)


# Rows of an engine that consist of a sequence only.


class PagedRow:
    """Row of an engine that consists of a sequence only, see `engine.runner.OpenRow`.

    Args:
        kv: Cache that holds the pages.
        seq: The sequence.
    """

    def __init__(self, kv: KV, seq: Sequence) -> None:
        self._kv, self.seq = kv, seq

    def suspend(self) -> int:
        """Free the sequence's device pages until `resume` restores them, bit for bit."""
        return self._kv.suspend(self.seq)

    def resume(self) -> None:
        """Restore the pages of the suspended sequence, bit for bit."""
        self._kv.resume(self.seq)

    def close(self, stop: str = "") -> None:
        """Release the pages; published ones stay in the index."""
        self.seq.close(stop)


def open_row(kv: KV, request: Any, tokens: Tokens, *, wait: bool) -> PagedRow:
    """Open a row for a request.

    Args:
        kv: The cache.
        request: The request, with the attributes `tenant`, `salts`, `session`, `lease` and
            `retain`, as `open` takes them.
        tokens: Its prompt, and the tokens generated so far.
        wait: See `KV.open`.

    Raises:
        CapacityError: Too many sequences are open.
    """
    names = "tenant", "salts", "session", "lease", "retain"
    given = {name: getattr(request, name) for name in names}
    return PagedRow(kv, kv.open(tokens, wait=wait, **given))
