"""`attach`: one line gives a Hugging Face model a FlowKV cache."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch

from flowkv.cache.kv import KV, bind, follow, warn
from flowkv.core.errors import ConfigError, StateError, UnsupportedModelError
from flowkv.hooks.huggingface.attention import Switch
from flowkv.hooks.huggingface.cache import PagedCache
from flowkv.hooks.huggingface.door import ForwardHook, warn_inherited
from flowkv.hooks.huggingface.identity import Identity
from flowkv.hooks.huggingface.inputs import ForwardCall, Names
from flowkv.hooks.huggingface.plan import plan_geometry
from flowkv.hooks.huggingface.probe import probe, settle
from flowkv.hooks.huggingface.restore import NOTHING, ReuseWish, admit
from flowkv.hooks.huggingface.rows import Rows
from flowkv.hooks.huggingface.versions import DynamicCache, PreTrainedModel

Reads = Literal["auto", "dense"]

_LOCK = threading.Lock()
_ATTACHED: weakref.WeakKeyDictionary[torch.nn.Module, ForwardHook] = weakref.WeakKeyDictionary()
_DOORS: weakref.WeakKeyDictionary[KV, weakref.ref[ForwardHook]] = weakref.WeakKeyDictionary()


def attach(model: Any, *, reads: Reads = "auto", **config: Any) -> KV:
    """Gives a model a cache. `model.generate(...)` and everything else stay as they are.

    Prompts that begin like earlier ones, of this process or (with a disk) of another, are not
    computed again. In fp32 with `codec="raw"` the tokens are those of the model's own cache. What
    cannot be served (see `flowkv.verify`) is left to the model's own cache, with one warning.

    Args:
        model: A transformers model; of an adapter-wrapped model, its base is taken.
        reads: "auto" reads pages where they lie, wherever the model's attention allows it; "dense"
            gathers K and V for the model's own attention.
        **config: Fields of `flowkv.Config`, `tiers=` and `policy=` as `flowkv.KV` takes them.

    Returns:
        The cache. `kv.detach()` leaves the model as it was.

    Raises:
        ConfigError: A field is unknown, or `model` is no transformers model.
        StateError: The model has a cache already.
        StoreError: A directory cannot be used.

    Example:
        >>> kv = flowkv.attach(model, disk="./kv:20GiB")  # doctest: +SKIP
        >>> model.generate(**inputs)
    """
    model = base_model(model)
    with _LOCK:
        if model in _ATTACHED and _ATTACHED[model].kv.inherited:
            _ATTACHED[model].kv.detach()
        if model in _ATTACHED:
            raise StateError("the model has a FlowKV cache already", "Call kv.detach() before")
        kv = KV(**config)
        try:
            door = install(model, kv, reads=reads)
        except UnsupportedModelError as error:
            warn(kv, "unsupported", f"FlowKV leaves the model to its own cache: {error}")
            return kv
        except BaseException:
            kv.close()
            raise
        _ATTACHED[model] = door
        follow(kv, detach=partial(_forget, weakref.ref(model)))
        return kv


def install(model: Any, kv: KV, *, reads: Reads = "auto") -> ForwardHook:
    """Probes a model, binds the cache to it, and hangs the door.

    Raises:
        UnsupportedModelError: The model cannot be served from pages.
    """
    switch = Switch(model)
    in_pages = not switch.reason
    identity, modules = Identity(model, kv.config.namespace), list(model.modules())
    long = bool(identity.foreign)
    found = probe(model, kv.page_size, in_pages=in_pages, long=long)
    if list(map(id, modules)) != list(map(id, model.modules())):
        # Its first forward rebuilt it, as BigBird's does: it is what it has become.
        identity = Identity(model, kv.config.namespace)
        found = probe(model, kv.page_size, in_pages=in_pages, long=long)
    identity.learn(model, named=False)
    bind(kv, found.plan.geometry, identity.namespace)
    door = ForwardHook(model, kv, found.plan, identity, switch)
    door.hang()
    try:
        settle(model, kv, found, door)
    except BaseException:
        door.unhang()
        raise
    if reads == "dense" and in_pages:
        door.read_dense("reads='dense' was asked for")
    _DOORS[kv] = weakref.ref(door)  # the model's hooks keep it
    identity.settle(model)  # with the hooks of the door, which are in no name
    bind(kv, found.plan.geometry, identity.namespace)
    door.tried()
    follow(kv, prove=door.proof.finish, detach=door.unhang)
    return door


def make_cache(
    kv: KV,
    *args: Any,
    tenant: str | None = None,
    care: Mapping[str, Any] = NOTHING,
    **inputs: Any,
) -> Any:
    """`KV.cache`: a cache for one call, `generate(**inputs, past_key_values=kv.cache(**inputs))`.

    With an attached model this does what happens by itself, for a tenant of choice. Without one it
    reads known prefixes for any model that fits the geometry, and publishes what the prompt's own
    full pages hold; generated tokens are not seen and not published. In a forked child it is a
    `DynamicCache`.

    Args:
        kv: The cache.
        *args: `input_ids`, if not by name.
        tenant: Whose pages may be used and made; default the cache's own tenant.
        care: `session`, `lease` and `retain` for `KV.open`, as far as they are said.
        **inputs: What `generate` is given.

    Raises:
        ConfigError: Nothing says what the model looks like.
        StateError: The prompt cannot be named by its token ids.
    """
    found = _DOORS.get(kv)
    door = found() if found is not None else None
    if kv.inherited:
        warn_inherited(kv)
        return door.native_cache() if door is not None else DynamicCache()
    if args:
        inputs = {(door.names.ids if door else "input_ids"): args[0], **inputs}
    if door is not None and door.hung:
        cache = door.open(inputs, tenant, care)
        cache.tenant, cache.care = tenant, care
        return cache
    if kv.geometry is None:
        raise ConfigError(
            "the cache does not know its model",
            "Call flowkv.attach(model), or pass a geometry to KV(...)",
        )
    return _unattached(kv, inputs, tenant, care)


def _unattached(
    kv: KV, inputs: dict[str, Any], tenant: str | None, care: Mapping[str, Any]
) -> PagedCache:
    assert kv.geometry is not None
    call = ForwardCall(Names({"logits_to_keep": 0}, False, {}), inputs)
    more = call.problem or call.modal or call.condition or call.types
    pads = None if more else call.pads()
    if pads is None:
        raise StateError(
            "no cache for this prompt: "
            + (call.problem or "it has more than token ids and left padding"),
            "Call flowkv.attach(model) and generate, or generate without past_key_values",
        )
    plan = plan_geometry(kv.geometry)
    # `generate` makes positions from the mask, which count a row's own tokens.
    prompts = [prompt._replace(salts=[]) for prompt in call.prompts(pads)[0]]
    found = admit(kv, prompts, ReuseWish(call.columns - 1, tenant, care=care))
    rows = Rows(kv, found.seqs, pads, found.base, layers=len(plan.placed))
    rows.promised = call.columns
    cache = PagedCache(rows, plan)
    cache.tenant, cache.care = tenant, care
    return cache


def base_model(model: Any) -> Any:
    """The transformers model itself, out of what adapter libraries wrap around it.

    Raises:
        ConfigError: There is none.
    """
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} is no transformers model",
            "For your own model use flowkv.KV(geometry) and flowkv.attention",
        )
    return model


def _forget(model: weakref.ref[Any]) -> None:
    held = model()
    if held is not None:
        _ATTACHED.pop(held, None)


def door_of(model: Any) -> ForwardHook | None:
    """The door of an attached model."""
    return _ATTACHED.get(model)


def _in_child() -> None:
    global _LOCK  # noqa: PLW0603 - whoever held it is not here
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def installing() -> contextlib.AbstractContextManager[object]:
    """Held while hooks are put on models, so that nobody else attaches meanwhile."""
    return _LOCK
