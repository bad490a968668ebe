"""Which model a cache serves: its geometry and namespace, and what is built for them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import torch

from flowkv.core.clock import Clock, SystemClock
from flowkv.core.config import load_config
from flowkv.core.errors import ConfigError, NonFiniteError, StateError
from flowkv.core.geometry import Geometry
from flowkv.core.keys import Namespace, Shard
from flowkv.core.selection import PLACE_KINDS, parse_quota
from flowkv.core.sizes import format_size
from flowkv.observe.events import Bus, EngineStep, RestoreSpan, StepPlanned, Warned
from flowkv.observe.metrics import Metrics
from flowkv.observe.tenancy import Tenancy
from flowkv.observe.trace import Trace
from flowkv.policy import CATALOGUE, make_policy
from flowkv.policy.base import Policy
from flowkv.policy.config import configure
from flowkv.policy.prefetch import PrefetchConfig
from flowkv.policy.quota import Quota
from flowkv.policy.restore import LoadGate
from flowkv.policy.tenants import Tenants
from flowkv.runtime import learned
from flowkv.runtime.foresight import Foresight
from flowkv.runtime.guard import Guard
from flowkv.runtime.planner import Planner
from flowkv.runtime.queue import Queue
from flowkv.runtime.recording import Recording
from flowkv.runtime.restore import Restorer
from flowkv.runtime.restores import Restores
from flowkv.runtime.sealer import Refusal, describe
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.snapshots import Snapshots
from flowkv.runtime.stack import divided, open_pools, open_tiers
from flowkv.runtime.store import Store
from flowkv.runtime.tables import Tables
from flowkv.runtime.visits import Visits
from flowkv.tiers.base import Tier


class Binding:
    """A cache's configuration, and the pools, tables and tiers of the model that it serves.

    Args:
        geometry: The model's layer groups; None if it is learned later.
        namespace: Name of the model and its weights.
        config: TOML file with further fields.
        tiers: The stack, fastest first.
        policy: Name in the catalogue, or a callable that makes a `Policy` for each place.
        clock: Time for the policies.
        shard: Which rank of a tensor-parallel model this is; `geometry` is the whole model's then.
        fields: Further fields of `flowkv.core.config.Config`.
    """

    def __init__(
        self,
        geometry: Geometry | None,
        *,
        namespace: str | Namespace,
        config: str | os.PathLike[str] | None,
        tiers: Iterable[str | Tier] | None,
        policy: str | Callable[[], Policy] | None,
        clock: Clock | None,
        shard: Shard | None,
        fields: dict[str, Any],
    ) -> None:
        self.shard = shard
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
        self.namespace = b""
        self._warned: set[str] = set()
        self._detach: list[Callable[[], None]] = []
        self._proofs: list[Callable[[], None]] = []
        self._closings: list[Callable[[], None]] = []
        self._tiers: list[Tier] = []
        self._open: dict[int, Sequence] = {}
        self._recordings: list[Recording] = []
        self._traces: list[Trace] = []
        self.planner: Planner | None = None
        if geometry is not None:
            if self.config.page_size not in (None, geometry.page_size):
                raise ConfigError(
                    f"page_size={self.config.page_size} beside a geometry of {geometry.page_size}",
                    "Say it in the geometry: Geometry(..., page_size=...)",
                )
            name = namespace or self.config.namespace
            self._need_name(bool(name), geometry)
            self.bind(geometry, name if isinstance(name, Namespace) else Namespace(model=name))

    def _need_name(self, named: bool, geometry: Geometry) -> None:
        places = self.config.places(on_cpu=_on_cpu(geometry))
        lasting = any(place.kind not in ("gpu", "host") or place.path for place in places)
        given = any(tier.kind != "host" or tier.shared for tier in self._given)
        if not named and (lasting or given):
            raise ConfigError(
                "a cache with a lasting or shared tier has no namespace",
                'Name the model and its weights: KV(geometry, namespace="my-model@3", ...)',
            )

    # ---- identity

    def bind(self, geometry: Geometry, namespace: Namespace) -> None:
        """Says which model this cache serves from now on.

        Sequences that are open keep their pages, but what they compute is not published any more.
        A new geometry gets fresh pools; the tiers stay.

        Raises:
            CapacityError: The device pool is too small for the geometry.
            GeometryError: The heads cannot be divided evenly among the ranks.
            StateError: The cache is closed.
        """
        with self.lock:
            self._alive()
            shard = self.shard
            local = geometry.local(shard.rank, shard.world) if shard else geometry
            exact = msgspec.structs.replace(namespace, geometry=geometry.fingerprint().hex())
            if self.planner is None or local != self.planner.geometry:
                self._build(local, geometry, exact)
            else:
                self._introduce(exact)
            self.namespace = exact.digest()
            for seq in self._open.values():  # also if the old name comes back while they are open
                seq.publishable = False

    def _introduce(self, namespace: Namespace) -> None:
        """Tells tiers that note it whose frames are in use from now on."""
        for tier in self._tiers:
            bind: Callable[[bytes, str], None] | None = getattr(tier, "bind", None)
            if bind is not None:
                bind(namespace.digest(), namespace.title)

    def _build(self, geometry: Geometry, whole: Geometry, namespace: Namespace) -> None:
        pools = open_pools(geometry, self.config)
        if self.planner is None:
            self._tiers = open_tiers(
                *(self.config, self._given, self.clock, self.gate.rates),
                on_cpu=_on_cpu(geometry),
            )
        else:  # the old store must neither read nor write the tiers any more
            self.planner.store.flush(self.config.load_deadline_s)
            self.planner.store.detach_tiers()
        self._introduce(namespace)
        store = Store(
            geometry,
            pools,
            divided(self._tiers, whole, self.shard),
            policies=self._policy,
            clock=self.clock,
            bus=self.bus,
            config=self.config,
            rates=self.gate.rates,
        )
        store.page_cost_ns = lambda: round(self.gate.seconds_per_token * geometry.page_size * 1e9)
        tables = Tables([torch.device(g.device) for g in geometry.groups], self.config.max_rows)
        self.planner = planner = Planner(store, tables, self.lock, self.gate.computed)
        # What a sender writes is for others, whose rates nobody here knows.
        store.pays = lambda tier, n_bytes, reach: (
            planner.sender is not None
            or self.gate.pays_to_store(tier, n_bytes, geometry.page_size, reach)
        )
        self.planner.foresight = self._foresight(self.planner)
        self.planner.publisher.allowed = self._may_publish
        self.planner.publisher.on_non_finite = self._non_finite
        if self.planner.sealer:
            self.planner.sealer.on_refusal = self._refused
        self.restorer = Restorer(self.planner, self.gate, self.bus)
        self.snapshots = Snapshots(self.restorer)
        self.restores = Restores(store, self.gate, self.bus)
        if (directory := self._learned()) is not None:
            self._tell(partial(learned.load, directory, store.places))
        self.visits = Visits(self.planner)
        self.queue = Queue(self.visits, self.lock)
        if self.config.record and not self._recordings:
            self.record(self.config.record)

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

    def _foresight(self, planner: Planner) -> Foresight | None:
        """What brings pages nearer before they are asked for; None without a tier, or if off."""
        if not planner.store.tiers or self.config.prefetch == "off":
            return None
        said, size = self.config.prefetch, planner.page_size
        windows = [planner.window(g) for g in range(len(planner.geometry.groups))]
        pages = [None if w is None else max(1, -(-(w - 1) // size)) for w in windows]
        options = said if isinstance(said, dict) else {}
        return Foresight(planner.store, self.lock, pages, options)

    def _policy(self, kind: str, capacity_bytes: int) -> Policy:
        """The policy of a place."""
        make, total = self._make_policy, capacity_bytes
        if make is None:
            name, options = self.config.selection(kind)
            make = partial(make_policy, name, **options)
        if not self.config.quotas:
            return make()
        shares = [parse_quota(quota, kind, total) for quota in self.config.quotas.values()]
        kept = sum(reserve for reserve, _ in shares)
        if kept > total:
            raise ConfigError(
                f"quotas reserve {format_size(kept)} of a {kind} place of {format_size(total)}",
                "Reserve less, or give the place more bytes",
            )
        quotas = [Quota(reserve, inf if limit is None else limit) for reserve, limit in shares]
        return Tenants(make, dict(enumerate(quotas)))

    def _learned(self) -> Path | None:
        """The directory in which what policies learned is kept; None if it is not."""
        from flowkv.tiers.disk import DiskTier

        ours = self._tiers[: len(self._tiers) - len(self._given)]  # those given come last
        disks = (tier for tier in ours if isinstance(tier, DiskTier) and tier.writable)
        return next((disk.path for disk in disks), None) if self.config.learned else None

    def _save_learned(self) -> None:
        directory = self._learned()
        if directory is not None and self.planner is not None:
            self._tell(partial(learned.save, directory, self.planner.store.places))

    def _tell(self, work: Callable[[], object]) -> None:
        """Does something with a file that is worth an event if it fails, and nothing more."""
        try:
            work()
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
            warn=lambda problem: self.warn("recording", f"{problem} Check the disk."),
        )
        self._recordings.append(recording)
        return recording

    def trace(self, path: str | os.PathLike[str]) -> Trace:
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
        trace = Trace(path, self.bus, warn=lambda said: self.warn("trace", f"{said} {check}"))
        self._traces = [*(other for other in self._traces if not other.closed), trace]
        return trace

    def _may_publish(self, seq: Sequence) -> bool:
        return seq.publishable and seq.namespace == self.namespace and not self.closed

    def _non_finite(self, group: int, page: int) -> None:
        self.warn(
            "non-finite",
            f"Page {page} of layer group {group} holds NaN or infinity and is neither shared nor "
            "stored. Check the model's dtype and inputs.",
        )

    def _refused(self, refusal: Refusal) -> None:
        problem = describe(refusal)
        if self.config.non_finite == "error":
            raise NonFiniteError(problem, "Check the model's dtype and inputs, or use codec='raw'")
        self.warn(
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

    # ---- life

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that opened it."""
        return os.getpid() != self._pid

    def warn(self, code: str, message: str) -> None:
        """Warns once per `code`."""
        if code not in self._warned:
            self._warned.add(code)
            if not self.inherited:  # who listens may have been busy when the child was forked
                self.bus.emit(Warned(code=code, message=message))
            warnings.warn(message, stacklevel=3)

    def on_detach(self, callback: Callable[[], None]) -> None:
        """Registers what `detach` does."""
        self._detach.append(callback)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Registers what `close` does before anything is released."""
        self._closings.append(callback)

    def on_prove(self, callback: Callable[[], None]) -> None:
        """Registers what proves pages that were computed so far, so that they can be kept."""
        self._proofs.append(callback)

    def _prove(self) -> None:
        if not self.closed:
            for callback in self._proofs:
                callback()

    def detach(self) -> None:
        """Takes the cache off the model it is attached to; the model is as before."""
        self._prove()
        self._proofs.clear()
        while self._detach:
            self._detach.pop()()

    def _alive(self) -> None:
        if self.closed:
            raise StateError("the cache is closed", "Open a new one")
        if self.inherited:
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
        return self.planner


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
