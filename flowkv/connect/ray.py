"""Prefix-aware routing on Ray Serve: replicas that cache most of a prompt, unless others are free.

Give `PrefixRouter` to a deployment with replicas that publish KV events and report the address:

    @serve.deployment(num_replicas=2, request_router_config=RequestRouterConfig(
        request_router_class=PrefixRouter, request_routing_stats_period_s=1.0))
    class Replica:
        def record_routing_stats(self):
            return event_address(self.publisher)

and call it through `ask`, which calls another replica if one died. Needs the extra `ray`; written
for Serve 2.49 and later (`ray.serve.request_router`, tried with 2.60).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from flowkv.connect.events import EventPublisher, EventSubscription
from flowkv.connect.routing import ReplicaRates, Router
from flowkv.core.errors import ConfigError, MissingDependencyError, experimental

try:
    import ray
    from ray.exceptions import RayActorError
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise MissingDependencyError(
        "routing on Ray Serve", "ray", "Ray Serve 2.49 or later"
    ) from error

experimental(__name__, "Ray Serve changes the interfaces below it with its own releases")

__all__ = ["PrefixRouter", "ask", "event_address"]

_EVENTS, _REPLAY = "flowkv_events", "flowkv_replay"


def event_address(publisher: EventPublisher) -> dict[str, str]:
    """Return the addresses of KV events for a replica's `record_routing_stats`.

    Args:
        publisher: Bound to any address of this node: `EventPublisher(kv, "tcp://*:*",
            replay="tcp://*:*")`.
    """
    here = ray.util.get_node_ip_address()
    found = {_EVENTS: publisher.endpoint, _REPLAY: publisher.replay}
    return {name: address.replace("0.0.0.0", here) for name, address in found.items()}


async def ask(handle: Any, prompt: Sequence[int], *said: Any, tries: int = 5, **fields: Any) -> Any:
    """Call a deployment, and another replica of it if one dies before it answers.

    Only for calls that may be made twice, such as generation.

    Args:
        handle: A `DeploymentHandle`, or a method of one.
        prompt: Token ids, which `PrefixRouter` reads.
        *said: Further arguments.
        tries: Most replicas to call.
        **fields: Further arguments by name.

    Raises:
        RayActorError: All `tries` replicas died.
    """
    for left in reversed(range(tries)):
        try:
            return await handle.remote(prompt, *said, **fields)
        except RayActorError:
            if not left:
                raise
            await asyncio.sleep(0.1)  # Serve needs a moment to notice the death
    raise ConfigError(f"tries={tries}", "Ask one replica at least")


class PrefixRouter(RequestRouter):
    """Request router of Ray Serve over `flowkv.connect.routing.Router`.

    The first argument of a request, or the one named `prompt`, is its token ids; one named `salt`
    separates tenants. Requests without token ids go to the replica with the least work. Replicas
    that report no address count as empty.

    Options, in `request_router_kwargs`: `compute` and `fetch`, see `ReplicaRates`.
    """

    def initialize_state(self, compute: float = 5_000.0, fetch: float = 0.0) -> None:
        """Set up the router; called by Serve with `request_router_kwargs`."""
        self._prefixes = Router(rates=ReplicaRates(compute, fetch))
        self._heard: dict[Hashable, tuple[Mapping[str, Any], EventSubscription]] = {}
        self._requests: dict[str, contextlib.ExitStack] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates, ordered by the expected time of the first token."""
        self._listen(candidate_replicas)
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        ranked = self._prefixes.ranked(*_prompt(pending_request))
        return [[candidates[name]] for name in ranked if name in candidates]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Subscribe to the events of replicas before the first request comes."""
        super().update_replicas(replicas)
        self._listen(replicas)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count a request as work of its replica."""
        prompt, salt = _prompt(pending_request)
        if replica_id in self._prefixes.replicas:
            work = contextlib.ExitStack()
            work.enter_context(self._prefixes.request(prompt, salt, replica=replica_id))
            self._requests[pending_request.metadata.internal_request_id] = work

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """End the work of a request, which succeeded or failed."""
        if (work := self._requests.pop(internal_request_id, None)) is not None:
            work.close()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica and its blocks."""
        super().on_replica_actor_died(replica_id)
        self._leave(replica_id)

    def _listen(self, replicas: Sequence[RunningReplica]) -> None:
        """Read the events of replicas since the last request."""
        here = {replica.replica_id for replica in replicas}
        for gone in (
            set(self._prefixes.replicas) - here - {r.replica_id for r in self._replicas_list}
        ):
            self._leave(gone)
        for replica in replicas:
            name, said = replica.replica_id, replica.routing_stats
            self._prefixes.add(name)
            address, heard = self._heard.get(name, ({}, None))
            if said.get(_EVENTS) and address != said:
                if heard is not None:
                    heard.close()
                heard = EventSubscription(said[_EVENTS], replay=said.get(_REPLAY, ""))
                self._heard[name] = said, heard
            if heard is not None:
                self._prefixes.feed(name, heard.poll())

    def _leave(self, replica: Hashable) -> None:
        self._prefixes.remove(replica)
        _, heard = self._heard.pop(replica, ({}, None))
        if heard is not None:
            heard.close()


def _prompt(request: PendingRequest | None) -> tuple[Sequence[int], str]:
    said = request.kwargs if request is not None else {}
    found = said.get("prompt", request.args[0] if request is not None and request.args else ())
    tokens = found if all(isinstance(token, int) for token in found[:1]) else ()
    return tokens, said.get("salt", "")
