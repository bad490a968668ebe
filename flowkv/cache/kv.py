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
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache import erasure, export, swap
from flowkv.cache import stack as learned
from flowkv.cache.audit import Auditor, Explanation, explain
from flowkv.cache.block_table import Planner
from flowkv.cache.ending import Ending, make_way
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
from flowkv.cache.seal import Refusal, describe
from flowkv.cache.sequence import Guard, Retain, Sequence, Tables, eta_ns, make_care, session_number
from flowkv.cache.stack import (
    link_pools,
    open_pools,
    store_levels,
    store_report,
)
from flowkv.cache.step import Step, chosen, sparsify
from flowkv.cache.store import PageStore, Verdict
from flowkv.cache.swap import Snapshots
from flowkv.cache.tail import Tails
from flowkv.cache.tier_stack import PolicyPlace
from flowkv.core import interrupts
from flowkv.core.clock import Clock, SystemClock
from flowkv.core.compiling import now_s
from flowkv.core.config import PLACE_KINDS, load_config
from flowkv.core.errors import (
    ConfigError,
    MissingDependencyError,
    NonFiniteError,
    StateError,
    TokenError,
)
from flowkv.core.geometry import Geometry
from flowkv.core.keys import KeyChain, Namespace, Salt, as_tokens, tenant_salt
from flowkv.observe.events import Bus, EngineStep, RestoreSpan, StepPlanned, Warned
from flowkv.observe.metrics import Level, Metrics, Tenancy
from flowkv.observe.timeline import TraceFile
from flowkv.policy import CATALOGUE, make_policy
from flowkv.policy.base import Lease, Policy, configure
from flowkv.policy.prefetch import PrefetchConfig
from flowkv.policy.restore import LoadGate
from flowkv.report.account import Account
from flowkv.residency.places import make_envelope, open_tiers, policy_of
from flowkv.tiers.base import Tier


def _maker(policy: object) -> Callable[[], Policy] | None:
    """What makes a policy for each place; None where the configuration says which.

    Raises:
        ConfigError: It is neither a name nor callable, or one policy for all places.
    """
    if policy is None or isinstance(policy, str):
        return None
    one = isinstance(policy, Policy) and not isinstance(policy, type)
    if one or not callable(policy):
        kind, what = type(policy).__name__, "one policy, and each place needs its own"
        raise ConfigError(
            f"policy={kind}(...) is {what}" if one else f"policy={policy!r} makes no policies",
            f"Pass the class or a callable that makes one: policy=lambda: {kind}(...)"
            if one
            else f"Pass a name ({', '.join(CATALOGUE)}), a class, or a callable that makes one;"
            " options of places go into policy_options",
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


# The sequences of a cache: opened with what is known of them, forked, cut, set aside, closed.

Tokens = Items[int] | NDArray[np.generic] | torch.Tensor


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


# What a cache knows: looked up, brought near, protected, erased, carried away in files.


def _prompts(tokens: Tokens | Iterable[Tokens]) -> list[Tokens]:
    """One prompt, or several."""
    given = plain(tokens) if isinstance(tokens, torch.Tensor) else tokens
    if isinstance(given, np.ndarray):
        return list(given) if given.ndim == 2 else [given]
    listed = list(given)
    single = not listed or isinstance(listed[0], (int, np.integer))
    return [listed] if single else listed


# Prompts whose prefix is on its way: their fronts are computed meanwhile, the rest behind it.


def fronts(kv: KV, seqs: Items[Sequence], chunk: int) -> Iterator[Step | Sequence]:
    """Steps over fronts, and each sequence whose front is done, once: settled, in their order.

    Each step is entered while it is out.
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
    """Runs what follows a settled prefix behind it; None if there was nothing, or it was late."""
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
        end(kv, restoration, ok=ok)
    return output


def end(kv: KV, restoration: RestoreJob, *, ok: bool) -> None:
    """Ends a restore; what came needed no computing. Of one that is not settled, nothing did."""
    with kv.lock:
        settled = restoration.settled
        restoration.finish(ok=ok)
        came = max(0, restoration.tokens - restoration.front) if settled else 0
        restoration.seq.reused += came
        kv.tokens_reused += came


# `KV`: the cache as users hold it: sequences, steps, known prompts, upkeep.


def levels(kv: KV) -> Iterator[Level]:
    """Levels and counts of a cache, without its lock; none of one that is closed.

    See `flowkv.cache.stack.store_levels`.
    """
    if kv.closed:
        return
    # What was opened in vain is taken out again: these wait until they grow beyond it. The present
    # value is read before the one that it may give way to, so that no correction slips between.
    yield Level("tokens_seen_total", max(kv.tokens_seen, kv.seen_most))
    yield Level("tokens_reused_total", max(kv.tokens_reused, kv.reused_most))
    yield Level("open_sequences", len(kv._open))
    if kv.planner is not None:
        yield from store_levels(kv.planner.store)


def source(kv: KV) -> Callable[[], list[Level]]:
    """What reads `levels` of a cache again and again, without keeping the cache alive."""
    ref = weakref.ref(kv)

    def read() -> list[Level]:
        there = ref()
        return list(levels(there)) if there is not None else []

    return read


def _run_all(callbacks: list[Callable[[], None]]) -> None:
    """Runs callbacks from the last on, and forgets each; not one that was interrupted."""
    while callbacks:
        try:
            callbacks[-1]()
        except Exception:
            callbacks.pop()
            raise
        callbacks.pop()


_POLL_S = 0.002  # between two looks for pages of others

cache_door: Callable[..., Any] | None = None
"""Makes the object behind `KV.cache`; put here by the package, since hooks lie above this floor."""


def _no_cache() -> None:
    """A cache stays where it is: copies and pickles of what holds one hold None in its place."""


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
    """Tells everything worth knowing."""
    metrics: Metrics
    """Counts what the bus tells."""

    # Tokens of all prompts opened, and those of them that needed no computing; what both had
    # reached before they were last corrected downwards.
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
            fields["tiers"] = tuple(tier for tier in stack if isinstance(tier, str))
        if isinstance(policy, str):
            fields["policy"] = policy
        if isinstance(namespace, str) and namespace:
            fields["namespace"] = namespace  # for `attach`, which asks the configuration
        self.config = load_config(config, **fields)
        self._given = [tier for tier in stack or () if not isinstance(tier, str)]
        self._make_policy = _maker(policy)
        self._check_policies()
        self.clock, self.bus = clock or SystemClock(), Bus()
        self.metrics = Metrics()
        # Steps and spans come too often: who wants them counted subscribes to the bus.
        self.metrics.follow(self.bus, without=[EngineStep, RestoreSpan, StepPlanned])
        self.tenants = Tenancy(self.bus)
        self.lock, self.closed, self._pid = Guard(), False, os.getpid()
        self.gate = LoadGate()
        self.namespace, self.private = b"", ""  # why nothing is shared; "" where it is
        self._warned: set[str] = set()
        self._detach: list[Callable[[], None]] = []
        self._proofs: list[Callable[[float], object]] = []
        self._model: Callable[[], object] | None = None  # None where none was attached
        self._ending: Ending | None = None
        self._lost = 0  # pages of which `flush` has told
        self._closings: list[Callable[[], None]] = []
        self._forgets: list[Callable[[str], int]] = []
        self.blended: Counter[str] = Counter(documents=0, taken_tokens=0, computed_tokens=0)
        self.graphed: dict[str, Any] = {"captured": 0, "replayed": 0, "bytes": 0, "eager": ""}
        self._learns: Callable[[Items[Tokens], str | None], int] | None = None
        self._unlearns: Callable[[Tokens, str | None], int] = lambda tokens, tenant: 0
        self._tiers: list[Tier] = []
        self._open: WeakValueDictionary[int, Sequence] = WeakValueDictionary()
        self._recordings: list[Recording] = []
        self._handing_over: list[None] = []  # blocks of `hand_over` that are open
        self._traces: list[TraceFile] = []
        self.planner: Planner | None = None
        self.prefetches: PrefetchManager | None = None
        self._levels, self._accounts = source(self), list[Account]()
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
        """Tells tiers that note it whose frames are in use from now on."""
        for tier in self._tiers:
            bind: Callable[[bytes, str], None] | None = getattr(tier, "bind", None)
            if bind is not None:
                bind(namespace.digest(), namespace.title)

    def _build(self, geometry: Geometry, namespace: Namespace) -> None:
        pools = open_pools(geometry, self.config)
        if self.planner is None:
            places = self.config.places(on_cpu=_on_cpu(geometry))
            make_way(place.path for place in places if place.kind == "disk")
            self._tiers = open_tiers(
                *(self.config, self._given, self.clock, self.gate.rates),
                on_cpu=_on_cpu(geometry),
            )
        else:  # the old store must neither read nor write the tiers any more
            self.planner.store.flush(self.config.load_deadline_s)
            self.planner.store.stack.detach()
        link_pools(pools.values(), self._tiers)
        self._introduce(namespace)
        # The store must not hold the cache, which may go before its last pages are written.
        config, make_policy, handing_over = self.config, self._make_policy, self._handing_over
        prefetches: PrefetchManager | None = None  # which needs the store that tells it
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
            give_up_late=lambda: loader.expire(),  # noqa: PLW0108 - which needs the store
        )
        if self._ending is not None:
            self._ending.cancel()
        self._ending = (
            Ending(
                *(self, store, self.lock, config.exit_s),
                given=self._given,
                over=over,
                prepare=prepare_exit,
            )
            if store.stack.tiers
            else None
        )
        self._lost = 0
        self.loader = loader = PageLoader(store)
        self.prefetches = prefetches = self._open_prefetches(store)
        tables = Tables([torch.device(g.device) for g in geometry.groups], self.config.max_rows)
        self.planner = Planner(
            *(store, tables, self.lock, self.gate.computed, prefetches),
            tails=Tails(store, tables, self._open, self._may_publish),
            on_non_finite=self._non_finite,
            on_refusal=self._refused,
        )
        self.restorer = PrefixMatcher(self.planner, self.gate, self.bus, loader)
        self.snapshots = Snapshots(self.restorer)
        self.restores = RestoreScheduler(self.restorer)
        self.gate.model = learned.computes(namespace, geometry)
        self._tell(learned.load)
        self.visits = RequestTracker(self.planner, prefetches)
        self.queue = Queue(self.visits, self.lock)
        self.auditor = Auditor(self.restorer, self._like, self.step, self._condemned)
        if self.config.record and not self._recordings:
            self.record(self.config.record)
        store.stack.check_room()

    def _check_policies(self) -> None:
        """Has a wrong option told now, and not when a model is attached."""
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
        """What brings pages nearer before they are asked for; None without a tier, or if off."""
        if not store.stack.tiers or self.config.prefetch == "off":
            return None
        said, size = self.config.prefetch, store.geometry.page_size
        windows = [g.window if g.kind == "sliding" else None for g in store.geometry.groups]
        pages = [max(1, -(-(window - 1) // size)) if window else None for window in windows]
        options = said if isinstance(said, dict) else {}
        if said == "markov":
            options = {"learned": said}
        return PrefetchManager(store, self.loader, self.lock, pages, options)

    def _learned(self) -> Path | None:
        """The directory in which what policies learned is kept; None if it is not."""
        from flowkv.tiers.disk import DiskTier

        ours = self._tiers[: len(self._tiers) - len(self._given)]  # those given come last
        disks = (tier for tier in ours if isinstance(tier, DiskTier) and tier.writable)
        return next((disk.path for disk in disks), None) if self.config.learned else None

    def _tell(self, work: Callable[[Path, Iterable[PolicyPlace], LoadGate], object]) -> None:
        """Reads or writes what was learned; if that fails, an event says so."""
        directory = self._learned()
        try:
            if directory is not None and self.planner is not None:
                work(directory, self.planner.store.places, self.gate)
        except (ConfigError, OSError) as error:
            self.bus.emit(Warned(code="learned", message=str(error)))

    def record(self, path: str | os.PathLike[str]) -> Recording:
        """Writes all requests from now on as a trace, for `flowkv.sim.replay`.

        Only salted hashes of pages are written, lengths and times; no tokens and no names.

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
        """Writes who works on what, and when, for Perfetto: `with kv.trace("restore.json"): ...`.

        There is a track per engine, tier and request. Every event is in the file at once, also if
        an exception ends the block or the process. Without a trace nothing of this is done.

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

    def _condemned(self, tier: str, verdict: Verdict) -> None:
        """A page was found wrong, and is forgotten with all that continues it."""
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
        """What it was bound to; None before."""
        return self.planner.geometry if self.planner else None

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.planner.page_size if self.planner else self.config.tokens_per_page

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that opened it."""
        return os.getpid() != self._pid

    def _prove(self, end_s: float = inf) -> bool:
        planner = self.planner
        if planner is not None and planner.pending and not (self.closed or self.inherited):
            planner.settle()  # what is full becomes known, and is proven with all else
        return self.closed or all([callback(end_s) is not False for callback in self._proofs])

    def detach(self) -> None:
        """Takes the cache off the model it is attached to; the model is as before.

        What is queued is still written, at the end of the process at the latest.
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
                "the cache does not know its model yet",
                "Call flowkv.attach(model), or pass a geometry to KV(...)",
            )
        self.planner.settle()
        return self.planner

    def _agreed(self) -> Planner:
        """The planner, once all is dropped that other caches erased."""
        planner = self._bound()
        store = planner.store
        if store.stack.outdated() and erasure.hear(store, list(self._open.values())):
            self._purge()
        return planner

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
        interrupts.cover()
        self.lock.settle()
        with self.lock:
            planner = self._agreed()
            planner.store.drain()
            seq = self._sequence(planner, tenant, salts)
            try:
                seq.extend(ids)
                seq.prompted, seq.care = len(ids), make_care(session, lease, retain, seq.tenant)
                self.visits.check(seq)
                most = len(ids) - 1 if limit is None else min(limit, len(ids))
                with planner.store.context.moment():
                    self._begin(seq, request)
                    if reuse and most > 0 and not self.private:
                        if wait:
                            source = self.snapshots if state else self.restorer
                            seq.reused = source.restore(seq, most)
                        elif state:
                            attach = partial(self.restores.begin_whole, seq)
                            seq.reused = self.snapshots.begin(seq, most, attach)
                        else:
                            self.restores.begin(seq, most, computable=computable)
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

    def _like(self, seq: Sequence) -> Sequence:
        """An empty sequence of the tenant, model and salts of another one."""
        twin = self._sequence(Planner.of(seq), None, seq.salts)
        twin.tenant, twin.namespace, twin.chains = seq.tenant, seq.namespace, seq.chains
        return twin

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
                seq.publishable &= not seq.restoration.lacks
                seq.restoration.abandon()
            seq.closed = True
            swap.discard(Planner.of(seq), seq)
            self._open.pop(id(seq), None)
            if Planner.of(seq) is self.planner:
                self.visits.end(seq)
            Planner.of(seq).release(seq)
            if self.config.quotas:
                Planner.of(seq).store.shed()
            Planner.of(seq).look_ahead()

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence with the same past; pages are shared until one of them writes.

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
        """Drops the tokens of a sequence from position `length` on."""
        Planner.of(seq).truncate(seq, length)

    def suspend(self, seq: Sequence) -> int:
        """Gives a sequence's pages up for others until `resume` brings them back, bit for bit.

        What only it knows moves to host memory now, pages that are known once they leave the
        device. Returns the bytes of host memory that this takes at most.
        """
        with self.lock:
            return swap.suspend(Planner.of(seq), seq)

    def resume(self, seq: Sequence) -> None:
        """Brings a suspended sequence back, bit for bit.

        Raises:
            CapacityError: It does not fit now; it stays suspended.
        """
        with self.lock:
            self._agreed()
            swap.resume(Planner.of(seq), seq)
            # Shared again with whoever has the same by now, and known again.
            Planner.of(seq).publish(seq, exact=True)

    @contextmanager
    def _probe(self, tokens: Tokens, tenant: str | None, salts: Items[Salt]) -> Iterator[Sequence]:
        interrupts.cover()
        self.lock.settle()
        with self.lock:
            planner = self._agreed()
            planner.store.drain()
            planner.look_ahead()
            seq = self._lineless(planner, tenant, salts)
            seq.note(as_tokens(plain(tokens)))
            yield seq

    def explain(
        self, tokens: Tokens, *, tenant: str | None = None, salts: Items[Salt] = ()
    ) -> Explanation:
        """Return how much of a prompt is known now, what prevents more, and what graphs do."""
        with self._probe(tokens, tenant, salts) as seq:
            if self.private:
                why = f"nothing of this model is shared: {self.private}"
                found = Explanation(len(seq.tokens), 0, {}, why)
            else:
                found = explain(self.restorer, seq, len(seq.tokens) - 1)
        captured, replayed, eager = map(self.graphed.get, ("captured", "replayed", "eager"))
        decoding = f"{captured} decode steps were captured, {replayed} replayed" if captured else ""
        decoding = f"decode steps run eagerly: {eager}" if eager else decoding
        return msgspec.structs.replace(found, decoding=decoding)

    def warm(self, tokens: Tokens, *, tenant: str | None = None, salts: Items[Salt] = ()) -> int:
        """Brings a known prompt onto its device ahead of its use; returns its tokens there.

        Raises:
            CapacityError: Too many sequences are open.
        """
        with self.lock:
            seq = self._sequence(self._agreed(), tenant, salts)
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
            return self._bring(seq)

    def enqueue(
        self,
        tokens: Tokens,
        *,
        tenant: str | None = None,
        salts: Items[Salt] = (),
        prefetch: bool = True,
    ) -> WaitingRequest:
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

    def _nearer(self, seq: Sequence, queued: WaitingRequest) -> Prefetch:
        if self.prefetches is None:
            return self._bring(seq)
        self.restorer.absent(seq)  # which asks tiers that others write to
        return self.prefetches.enqueue(queued.request, self.visits.chains(seq))

    def _bring(self, seq: Sequence) -> Prefetch:
        prefetch = Prefetch(Planner.of(seq).store, self.loader, self.lock)
        prefetch.start(self.restorer.absent(seq))
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
                Planner.of(seq).store.pin(block, pinned)
            return sum(block.group == 0 for block in blocks) * self.page_size

    def forget(
        self,
        tokens: Tokens | None = None,
        *,
        tenant: str | None = None,
        salts: Items[Salt] = (),
    ) -> int:
        """Erases a prompt and all that continues it from every tier, or a whole tenant.

        Requests that wait for what nobody knows then (`enqueue`) are called off. With the
        cache's own tenant goes what encoders remember (`attach(memo=...)`). Every tier
        overwrites or removes the bytes, also those that other processes wrote, and is
        then asked whether anything is left. Beginnings that other prompts share stay. Open
        sequences keep their pages, and publish nothing more.

        Args:
            tokens: The prompt; None for everything of the tenant.
            tenant: Whose; default the cache's own.
            salts: What the prompt's K and V depend on beside the tokens.

        Returns:
            Blocks erased, and rows of encoders.

        Raises:
            StoreError: A tier, which the message names, could not prove that nothing is left. All
                others have erased by then, and the cache knows none of the blocks any more.
        """
        with self._probe(() if tokens is None else tokens, tenant, salts) as seq, self._purged():
            store = Planner.of(seq).store
            store.flush(self.config.load_deadline_s)
            if tokens is None:
                try:
                    found = self._forget_realm(erasure.Realm(seq.tenant, None))
                finally:
                    name = self.config.tenant if tenant is None else tenant
                    others = sum(forget(name) for forget in self._forgets)
                return found + others
            try:
                return erasure.forget_prompt(store, seq) + self._unlearns(tokens, tenant)
            finally:
                for open_seq in self._open.values():
                    known = min(open_seq.known, seq.known)  # which may fill no page
                    begins = np.array_equal(open_seq.tokens[:known], seq.tokens[:known])
                    whole = known == seq.known or open_seq.length > known
                    again = begins and whole and open_seq.tenant == seq.tenant
                    open_seq.publishable &= not (again or open_seq.forgotten)

    def invalidate(self) -> int:
        """Erases everything of this model on every tier, for instance after its weights changed.

        Open sequences keep their pages, and publish nothing more.

        Returns:
            Blocks erased.

        Raises:
            StoreError: See `forget`.
        """
        with self.lock:
            self._agreed().store.flush(self.config.load_deadline_s)
            drop_unproven(self)
            with self._purged():
                return self._forget_realm(erasure.Realm(None, self.namespace))

    @contextmanager
    def _purged(self) -> Iterator[None]:
        """Afterwards nothing names what was erased within, whatever was raised."""
        try:
            yield
        finally:
            self._purge()
            self._agreed()  # all else that was erased meanwhile, so that nothing waits for it

    def _purge(self) -> None:
        """Requests name nothing that was forgotten."""
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
            return Bundles(Planner.of(seq).store, self.lock, seq.namespace, seq.tenant)

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
        interrupts.cover()
        given = [plain(ids) for ids in new_tokens]
        packed = pack(given)
        step = plan(self, seqs, [len(ids) for ids in given])
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
        if seqs and (overflow := Planner.of(seqs[0]).overflow) is not None:
            chunk = min(chunk, overflow.chunk(len(seqs)))
        for out in fronts(self, seqs, chunk):
            if isinstance(out, Step):
                yield out
                continue
            if (restoration := RestoreJob.of(out)) is not None:
                end(self, restoration, ok=restoration.complete())
            yield from self.prefill([out], chunk=chunk)
        if seqs:
            incomplete = [seq for seq in seqs if seq.position < len(seq.tokens)]
            yield from self.auditor.steps(incomplete)
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
        outputs: dict[int, Any] = {}
        for out in fronts(self, seqs, chunk):
            if isinstance(out, Step):
                forward(out)
            elif (restoration := RestoreJob.of(out)) is not None:
                outputs[id(out)] = behind(self, out, forward, restoration, chunk)
        for seq in seqs:
            for step in self.prefill([seq], chunk=chunk):
                outputs[id(seq)] = forward(step)
        for seq in seqs:  # what is found wrong is computed anew
            for step in self.auditor.steps([seq], whole=True):
                forward(step)
            for step in self.prefill([seq], chunk=chunk) if not seq.closed else ():
                outputs[id(seq)] = forward(step)
        return [outputs.get(id(seq)) for seq in seqs]

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
        samples = Planner.of(seq).store.samples
        before = samples.mismatches
        for step in self.auditor.steps([seq]):
            forward(step)
        return samples.mismatches - before

    @contextmanager
    def hand_over(self) -> Iterator[None]:
        """Hands prompts to other processes while they are computed: `with kv.hand_over(): ...`.

        Around the prefill, in the process that computes; `take_over` in the one that goes on. Both
        name the same tier and namespace. Every page is written down as it becomes final, whatever
        loading it would take here; that of a lossy codec once its sequence is closed, at the
        latest. When the block ends, all of them can be read, or `load_deadline_s` have passed.

        Raises:
            StateError: No tier of the stack can be read by others.
        """
        store = self._bound().store
        if store.stack.lasting() < 0:
            raise StateError(
                "pages can be handed over through a tier that others read only",
                'Add one to the stack, such as "host:NAME:8GiB" or "disk:./kv"',
            )
        self._prove()  # so that no page waits for the first reading of all weights
        self._handing_over.append(None)
        try:
            try:
                yield
            finally:
                if not self.closed:
                    self.flush(self.config.load_deadline_s)
        finally:
            self._handing_over.pop()

    def take_over(
        self,
        seq: Sequence,
        forward: Callable[[Step], Any],
        *,
        patience_s: float | None = None,
        chunk: int = 512,
    ) -> Any:
        """Finishes the prefill of a prompt that another process computes, as its pages arrive.

        Pages are brought onto the device as they become known. When all are there, or none came
        for a while, what is known is attached and the rest is computed.

        Args:
            seq: As `open` returned it.
            forward: Called with each step, inside of which your model runs.
            patience_s: Longest wait while nothing arrives; default `load_deadline_s`.
            chunk: Most tokens in one step.

        Returns:
            What the last call of `forward` returned; None if nothing was left to compute.

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
                self._agreed().store.drain()
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
                reused = self.restorer.restore(seq, known * self.page_size, pays=True)
                self.tokens_reused += reused - seq.reused
                seq.reused = reused
        output = None
        for step in self.prefill([seq], chunk=chunk):
            output = forward(step)
        return output

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

    def learn(self, documents: Items[Tokens], *, tenant: str | None = None) -> int:
        """Makes documents known to `attach(..., reuse="blend")`, wherever they stand in a prompt.

        What of them no cache knows yet is computed, behind the first token of a text. Call it in
        every process: it says what to look for.

        Args:
            documents: Token ids of each, tokenized alone and without a first token.
            tenant: Whose pages may be used and made.

        Returns:
            Tokens that were computed.

        Raises:
            CapacityError: A document does not fit the device pool.
            StateError: The cache belongs to no model that was attached so.
            TokenError: What is given are no token ids.
        """
        if self._learns is None:
            raise StateError(
                "this cache reuses prompts exactly", 'Attach the model with reuse="blend"'
            )
        return self._learns(documents, tenant)

    def sparsify(
        self,
        seq: Sequence,
        keep: NDArray[np.integer] | Items[NDArray[np.integer]] | None = None,
        *,
        budget_tokens: int | Items[int] | None = None,
    ) -> int:
        """Takes tokens out of an open sequence; it goes on at its true positions.

        Its pages become private: nothing of it is published any more. Its `lengths` count the
        tokens that are left in each layer group, `Sequence.position` those that there were.

        Args:
            seq: A sequence of a model all of whose layers see the whole context.
            keep: `[L, Hk, n]`: the slots that stay, ascending, for each layer and KV head; one such
                array for each layer group, if there are several, with an n of its own.
            budget_tokens: Instead of `keep`: how many stay, or how many in each layer group, chosen
                by what the steps that were watched (`Step.watch`) looked at, see `policy.pages`.

        Returns:
            Tokens that it lost, in the group that lost most.

        Raises:
            CapacityError: The pages of what stays do not fit beside the old ones.
            ConfigError: Not exactly one of `keep` and `budget_tokens`, too small a budget, or
                budgets that are not one for each group.
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
            return sparsify(Planner.of(seq), seq, keep or ())

    def defragment(self) -> int:
        """Empties sparse slabs by moving pages; returns the moves, 0 while a step is under way."""
        return self._bound().defragment()

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits until all that was published is written down.

        Pages that are still to be encoded are written down afterwards.

        Returns:
            False if that took too long, or if pages were lost since the last call: a tier was full,
            failed, or was too busy to take them in time.
        """
        if self.inherited:
            return False  # it is the parent that writes
        self._prove()
        return self._flush(timeout_s)

    def _flush(self, timeout_s: float = 60.0) -> bool:
        interrupts.cover()
        self.lock.settle()
        with self.lock:
            if self.planner is None:
                return True
            store = self._agreed().store
            waiting, told = store.flush(timeout_s), self._lost
            self._lost = store.stack.lost
            return not waiting and self._lost == told

    def stats(self) -> dict[str, Any]:
        """Plain numbers: tokens seen and reused, hit rate, pages, bytes and events by place.

        To ask changes nothing: pages that a step on a GPU fills count from the end of the next one.
        """
        self.lock.settle()
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
                "blocks": 0,
                "devices": {},
                "tiers": {},
                "policies": {},
                "prefetch": {},
                "ghosts": 0,
                "audit": {},
                "overflow": {},
                "blend": dict(self.blended),
                "graphs": dict(self.graphed),
                "events": self.metrics.snapshot(),
            }
            if planner is None:
                return report
            if self.prefetches is not None:
                report["prefetch"] = self.prefetches.report()
            if planner.overflow is not None:
                report["overflow"] = planner.overflow.report()
            ours, quotas = not self.inherited, self.config.quotas
            return report | store_report(planner.store, planner.tables, quotas, tiers=ours)

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
            MissingDependencyError: Without the extra `report`.
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
            _run_all(self._closings)
        self.detach()
        if self.inherited:
            return  # tiers and the answers they owe belong to the parent process
        self.lock.settle()
        with self.lock:
            if self.closed:
                return
            with ExitStack() as last:  # what closing one of them raises does not keep the others
                if self._ending is not None:
                    last.callback(self._ending.cancel)
                for trace in self._traces:
                    last.callback(trace.close)
                for tier in self.planner.store.stack.tiers if self.planner else self._tiers:
                    last.callback(tier.close)
                if self.planner:
                    last.callback(self.planner.store.stack.close_logs)
                last.callback(setattr, self, "closed", True)
                if self.planner:
                    last.callback(self.planner.store.stack.mover.cancel)
                last.callback(self._tell, learned.save)
                for recording in self._recordings:
                    last.callback(recording.close)
                last.callback(self._flush)  # what was encoded just now, too
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "unbound" if self.planner is None else "open"
        return f"<flowkv.KV {state}: {self.tokens_reused} of {self.tokens_seen} tokens reused>"


# What only those need who attach a cache to a model: no business of its users.


def bind(kv: KV, geometry: Geometry, namespace: Namespace, *, private: str = "") -> None:
    """Says which model a cache serves from now on.

    Sequences that are open keep their pages, but what they compute is not published any more.
    A new geometry gets fresh pools; the tiers stay.

    Args:
        kv: The cache.
        geometry: The model's.
        namespace: Its name.
        private: Why nothing of it may be shared or stored; "" if it may.

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
    """The model may have changed: nobody learns what open sequences hold, or closed ones left."""
    with kv.lock:
        if kv.planner is not None:
            kv.planner.store.drop_tails()
            kv.planner.publisher.refuse()
        for seq in kv._open.values():
            seq.publishable = False


def over(kv: KV) -> bool:
    """Whether the model that a cache was attached to is gone, or was detached."""
    return kv._model is not None and kv._model() is None


def prepare_exit(kv: KV, end_s: float) -> bool:
    """Bring what a cache knows to where it can be written; whether all was proven by `end_s`."""
    proven = kv._prove(end_s)
    kv._tell(learned.save)
    for recording in kv._recordings:
        recording.close()
    return proven


def forget_name(kv: KV, namespace: bytes) -> None:
    """Erase on every tier what was published under a name of a model.

    Raises:
        StoreError: A tier cannot erase it.
    """
    with kv.lock, kv._purged():
        kv._forget_realm(erasure.Realm(None, namespace))


def follow(
    kv: KV,
    *,
    model: Callable[[], object] | None = None,
    prove: Callable[[float], object] | None = None,
    detach: Callable[[], None] | None = None,
    close: Callable[[], None] | None = None,
    forget: Callable[[str], int] | None = None,
    learn: Callable[[Items[Tokens], str | None], int] | None = None,
    unlearn: Callable[[Tokens, str | None], int] | None = None,
) -> None:
    """Registers who takes part in the end of a cache, and of what it knows.

    Args:
        kv: The cache.
        model: Returns the model, None once it is gone.
        prove: Proves pages that were computed so far, so that they can be kept, until a time of
            `time.monotonic`; False if that did not suffice.
        detach: What `KV.detach` does.
        close: What `KV.close` does before anything is released.
        forget: Erases what is kept beside pages for a tenant, and counts it.
        learn: What `KV.learn` does.
        unlearn: Erases a document, where a prompt to be erased is one, and counts it.
    """
    kv._model = model or kv._model
    kv._proofs += [prove] if prove else []
    kv._detach += [detach] if detach else []
    kv._closings += [close] if close else []
    kv._forgets += [forget] if forget else []
    kv._learns, kv._unlearns = learn or kv._learns, unlearn or kv._unlearns


def warn(kv: KV, code: str, message: str) -> None:
    """Warns once per `code`."""
    if code not in kv._warned:
        kv._warned.add(code)
        if not kv.inherited:  # who listens may have been busy when the child was forked
            kv.bus.emit(Warned(code=code, message=message))
        warnings.warn(message, stacklevel=3)


def plan(
    kv: KV,
    seqs: Items[Sequence],
    counts: Items[int] | NDArray[np.int64],
    last: Step | None = None,
) -> Step:
    """A step over rows whose new token ids are told elsewhere (`Sequence.note`), or never.

    Args:
        kv: The cache.
        seqs: The rows.
        counts: New tokens of each.
        last: A step that is over: what it prepared is used again where the same rows decode on.
    """
    kv._alive()
    planner: Any = seqs[0].planner if seqs else kv._bound()
    if planner.store.stack.behind:  # a store found that others erased something
        with kv.lock:
            kv._agreed()
    return Step(planner, seqs, np.asarray(counts, np.int64), last)


# Rows of an engine that are sequences and nothing else, however the model is run over them.


class Asked(Protocol):
    """Options of a request for its row, see `KV.open`."""

    @property
    def tenant(self) -> str | None:
        """Whose pages may be used and made."""
        ...

    @property
    def salts(self) -> Items[Salt]:
        """What K and V depend on beside the tokens."""
        ...

    @property
    def session(self) -> str | int | None:
        """Its conversation."""
        ...

    @property
    def lease(self) -> str | Lease:
        """How long its pages stay."""
        ...

    @property
    def retain(self) -> Items[Retain]:
        """Spans of tokens that are kept more, or less, than others."""
        ...


class PagedRow:
    """A row that is a sequence and nothing else, see `engine.runner.OpenRow`.

    Args:
        kv: Where its pages are.
        seq: Its sequence.
    """

    def __init__(self, kv: KV, seq: Sequence) -> None:
        self._kv, self.seq = kv, seq

    def suspend(self) -> int:
        """Gives a sequence's pages up for others until `resume` brings them back, bit for bit."""
        return self._kv.suspend(self.seq)

    def resume(self) -> None:
        """Brings a suspended sequence back, bit for bit."""
        self._kv.resume(self.seq)

    def close(self, stop: str = "") -> None:
        """Releases its pages; published ones stay known."""
        self.seq.close(stop)


def open_row(kv: KV, request: Asked, tokens: Tokens, *, wait: bool) -> PagedRow:
    """Opens a row for a request.

    Args:
        kv: The cache.
        request: Whose row.
        tokens: Its prompt, and what was made of it so far.
        wait: See `KV.open`.

    Raises:
        CapacityError: Too many sequences are open.
    """
    seq = kv.open(
        tokens,
        tenant=request.tenant,
        salts=request.salts,
        session=request.session,
        lease=request.lease,
        retain=request.retain,
        wait=wait,
    )
    return PagedRow(kv, seq)
