"""Ray Serve: requests go to the replica that knows most of their prompt, unless others are free.

Give `PrefixRouter` to a deployment whose replicas publish KV events and say where:

    @serve.deployment(num_replicas=2, request_router_config=RequestRouterConfig(
        request_router_class=PrefixRouter, request_routing_stats_period_s=1.0))
    class Replica:
        def record_routing_stats(self):
            return event_address(self.publisher)

and call it through `ask`, which asks another replica where one died. Needs the extra `ray`; written
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
    """What `record_routing_stats` of a replica returns, so that routers hear its KV events.

    Args:
        publisher: Bound to any address of this node: `EventPublisher(kv, "tcp://*:*",
            replay="tcp://*:*")`.
    """
    here = ray.util.get_node_ip_address()
    found = {_EVENTS: publisher.endpoint, _REPLAY: publisher.replay}
    return {name: address.replace("0.0.0.0", here) for name, address in found.items()}


async def ask(handle: Any, prompt: Sequence[int], *said: Any, tries: int = 5, **fields: Any) -> Any:
    """Calls a deployment, and another replica of it where one died before it answered.

    Only for calls that may be made twice, such as generation.

    Args:
        handle: A `DeploymentHandle`, or a method of one.
        prompt: Token ids; what `PrefixRouter` looks at.
        *said: Further arguments.
        tries: Most replicas to ask.
        **fields: Further arguments by name.

    Raises:
        RayActorError: So many replicas died.
    """
    for left in reversed(range(tries)):
        try:
            return await handle.remote(prompt, *said, **fields)
        except RayActorError:
            if not left:
                raise
            await asyncio.sleep(0.1)  # until Serve knows of it as well
    raise ConfigError(f"tries={tries}", "Ask one replica at least")


class PrefixRouter(RequestRouter):
    """A request router of Ray Serve over `flowkv.connect.routing.Router`.

    The first argument of a request, or the one named `prompt`, is its token ids; one named `salt`
    tells tenants apart. Requests without go where least is to be computed. Replicas that say no
    address are taken for ones that know nothing.

    Options, in `request_router_kwargs`: `compute` and `fetch`, see `ReplicaRates`.
    """

    def initialize_state(self, compute: float = 5_000.0, fetch: float = 0.0) -> None:
        """Called by Serve with `request_router_kwargs`."""
        self._prefixes = Router(rates=ReplicaRates(compute, fetch))
        self._heard: dict[Hashable, tuple[Mapping[str, Any], EventSubscription]] = {}
        self._requests: dict[str, contextlib.ExitStack] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Candidates, the one where the first token is expected soonest first."""
        self._listen(candidate_replicas)
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        ranked = self._prefixes.ranked(*_prompt(pending_request))
        return [[candidates[name]] for name in ranked if name in candidates]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Listens to them before the first request comes."""
        super().update_replicas(replicas)
        self._listen(replicas)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """The replica has this to compute."""
        prompt, salt = _prompt(pending_request)
        if replica_id in self._prefixes.replicas:
            work = contextlib.ExitStack()
            work.enter_context(self._prefixes.request(prompt, salt, replica=replica_id))
            self._requests[pending_request.metadata.internal_request_id] = work

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It is done, well or not."""
        if (work := self._requests.pop(internal_request_id, None)) is not None:
            work.close()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """What it knew is gone."""
        super().on_replica_actor_died(replica_id)
        self._leave(replica_id)

    def _listen(self, replicas: Sequence[RunningReplica]) -> None:
        """Takes in what replicas have said since the last request."""
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
