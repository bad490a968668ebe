"""A model's identity: the name that its pages carry, and the notice of every change to it.

Pages are valid for exactly the weights and the computation that made them (DESIGN D13). The name is
made of both (`weights`, `computation`), so it is the same in another process, on another device,
and again when a change was undone. Whether anything changed is asked when a cache is made and
before pages become known, by comparing what was met with what is there.
"""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from flowkv.cache.kv import KV, drop_unproven
from flowkv.core.errors import UnsupportedModelError
from flowkv.core.keys import Namespace
from flowkv.hooks.computation import Walk, transformers
from flowkv.hooks.fingerprint import Weights

SMALL_BYTES = 8 << 20
"""Weights up to this size are read whole for every cache and before pages become known."""
CALLS = 32
"""Within so many calls a write to weights that PyTorch does not count is found."""
_SHARE = 0.01
"""Of the time of a call, what reading weights may take, beyond the part that `CALLS` asks for."""
_SLICE_BYTES = 16 << 20
_STEPS = [0]
"""Steps of optimizers that write to weights without a count."""
_ROPE_BY_LENGTH = ("dynamic", "longrope")


class Identity:
    """The identity of one model at one moment.

    Args:
        model: The model.
        name: Name given by the user, which replaces the model's own and its weights', as long as
            those are what they were; "" for the model's own, with a digest of its weights.
        revision: The user's name for all that no other part of the name says; "" for none.

    Attributes:
        namespace: Its name, for the keys of pages.
        switch: Length from which positions are encoded otherwise, if there is one.
        suspect: Code takes part that is neither torch's nor transformers'.
        draws: A forward may draw random numbers: something trains, or is not transformers'.
        plain: Each forward does the same work on the same memory: nothing trains, no code but
            theirs takes part, and nothing moves weights or keeps results between modules.
    """

    def __init__(self, model: Any, name: str = "", revision: str = "") -> None:
        self.switch = _switch(getattr(model, "config", None))
        # Encodings that depend on length rewrite these in every forward.
        self._passing = "inv_freq" if self.switch is not None else ""
        self._name, self._revision, self._first_weights = name, revision, ""
        self._moving, self._moved = "", set[str]()
        self._offloaded: dict[Any, tuple[Any, str]] = {}
        self._weights, self._steps = Weights(), _STEPS[0]
        self.namespace = Namespace(model=name)
        self.read(model)
        # Weakly: a model must not keep what its former caches knew of it.
        weakref.finalize(model, _forget, weakref.ref(self)).atexit = False

    def read(self, model: Any, *, anew: bool = False) -> bool:
        """Take the model as it is now; return whether that gave it another name.

        Args:
            model: The model.
            anew: Weights were written to without a count: all of them are read.

        Raises:
            UnsupportedModelError: It holds what cannot even be looked at.
        """
        try:
            return self._read(model, anew=anew or self._steps != _STEPS[0])
        except Exception as error:  # whatever odd attributes raise
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be named ({type(error).__name__}: {error})",
                "Use the model without FlowKV, or take that out of it",
            ) from error

    def _read(self, model: Any, *, anew: bool) -> bool:
        if anew:
            self._weights.forget()
        self._steps, self._handles = _STEPS[0], RemovableHandle.next_id
        was = self.foreign if hasattr(self, "_walk") else ""
        self._walk = walk = Walk(model, self._passing, self._offloaded)
        self.suspect = bool(walk.own or walk.foreign)
        self.draws = walk.training or self.suspect
        self.plain = not (self.draws or walk.compiled or self.switch is not None or _helped(model))
        for named in (walk.leaves, walk.tensors):  # the user's revision says what these are
            for path in [path for path in named if path.partition("[")[0] in self._moved]:
                del named[path]
        weights = self._weights.read(walk.tensors)
        self._first_weights = self._first_weights or weights
        self._places = _places(model)
        config: Any = getattr(model, "config", None)
        own_name = str(getattr(config, "_name_or_path", "")) or type(model).__name__
        commit = "" if self._name else str(getattr(config, "_commit_hash", None) or "")
        trusted = bool(self._name) and weights == self._first_weights
        name = Namespace(
            model=self._name or own_name,
            revision=" ".join(filter(None, (commit, self._revision))),
            weights="" if trusted else weights,
            computation=walk.digest,
        )
        self.weights_changed = weights != getattr(self, "_last_weights", weights)
        self._last_weights = weights
        changed, self.namespace = name != self.namespace or was != self.foreign, name
        return changed

    @property
    def foreign(self) -> str:
        """Why no name says what the model computes, so that nothing is shared; "" if one does."""
        return "" if self._revision else self._walk.foreign or self._moving

    def steady(self, model: Any) -> bool:
        """Return whether the model still is what was named, as a forward begins.

        All is looked at where code of the user's takes part, or hooks were put on since; otherwise
        that waits until a page is full.
        """
        count = RemovableHandle.next_id
        if not self._walk.own and count == self._handles:
            return True
        self._handles = count
        return self.same(model)

    def kept(self, model: Any, *, blame: bool = True) -> bool:
        """Return whether a forward, or the time since one, left the model as it was named.

        What then is in a page, no name says: a model that changes in its forwards, or by another
        thread meanwhile, is foreign until it is attached again. With a revision of the user's the
        places that change are in no name.

        Args:
            model: The model.
            blame: It was as named when that forward began.

        Raises:
            UnsupportedModelError: It holds now what cannot be looked at.
        """
        if self.same(model):
            return True
        name, before, tensors = self.namespace, self._walk.leaves, self._walk.tensors
        weights = self._weights
        written = {p for p, t in tensors.items() if not weights.counted(t)}
        self.read(model)
        now, other = self._walk.leaves, self._walk.tensors
        found = written | {p for p in before.keys() | now.keys() if before.get(p) != now.get(p)}
        found |= {p for p in tensors.keys() & other.keys() if tensors[p] is not other[p]}
        if self.namespace == name:
            return True  # replaced by the like
        if self._revision:
            self._moved |= {path.partition("[")[0] for path in found}  # a list may grow
            self.read(model)
        elif blame and not self._moving:
            self._moving = f"{min(found, default='its tensors')}: changed during a forward"
        return False

    def attends(self, model: Any) -> list[Any]:
        """Return the functions that attend: FlowKV's own stands in only for what was tried."""
        modules = dict.fromkeys(type(module).__module__ for module in model.modules())
        own = [getattr(sys.modules.get(name), "eager_attention_forward", None) for name in modules]
        return [*(f for _, _, f in transformers().chosen_functions(model)), *own]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides how a model can be served: its code and settings, dtypes and devices."""
        return self._walk.kind, frozenset(self._places)

    @property
    def n_bytes(self) -> int:
        """Bytes of its weights."""
        return self._weights.n_bytes

    @property
    def own(self) -> list[str]:
        """Code that takes part and is neither torch's nor transformers'."""
        return self._walk.own

    @property
    def training(self) -> bool:
        """Whether submodules are in training mode."""
        return self._walk.training

    @property
    def trains(self) -> bool:
        """Whether gradients may flow to its tensors."""
        return any(tensor.requires_grad for tensor in self._walk.tensors.values())

    @property
    def settled(self) -> bool:
        """Whether encodings that depend on length are as a fresh model has them."""
        return self._walk.settled()

    @property
    def compiled(self) -> bool:
        """Whether parts of the model are compiled."""
        return self._walk.compiled

    def same(self, model: torch.nn.Module) -> bool:
        """Whether nothing was replaced, moved, set, patched, hooked or written to in the open."""
        try:
            return self._steps == _STEPS[0] and self._walk.same() and bool(self._weights.counted())
        except Exception:  # what cannot be compared is not the same
            return False

    def state(self, model: torch.nn.Module) -> object:
        """Return what was met when the model was named; None if it is another, or not `plain`."""
        return self._walk if self.plain and self.same(model) else None

    def same_content(self) -> bool:
        """Whether small weights still hold what they held; larger ones take `roll`."""
        return self.n_bytes > SMALL_BYTES or self._weights.same()

    def roll(self, seconds: float) -> bool:
        """Reads on in the weights, so that `CALLS` calls read all; False if they changed.

        Args:
            seconds: How long the call before took.
        """
        least = -(-self.n_bytes // (CALLS - 2))  # a call late, and one ends the reading
        end_s = time.monotonic() + _SHARE * seconds
        done = 0
        while True:
            passes = self._weights.passes
            part = least if not done else min(_SLICE_BYTES, least)
            if not self._weights.roll(part):
                return False
            done += part
            ended = self._weights.passes > passes or self._weights.waits
            if ended or time.monotonic() >= end_s:
                return True

    @property
    def weights(self) -> Weights:
        """Its weights as they were read."""
        return self._weights

    def moved(self, model: torch.nn.Module) -> bool:
        """Whether a dtype or device is new."""
        return _places(model) != self._places

    def _forget(self) -> None:
        self._weights.forget()
        self._walk.forget()
        self._offloaded.clear()


def _forget(held: weakref.ref[Identity]) -> None:
    if (identity := held()) is not None:
        identity._forget()


def _stepped(optimizer: Any, *_: Any) -> None:
    if any(group.get("fused") for group in optimizer.param_groups):
        _STEPS[0] += 1


register_optimizer_step_post_hook(_stepped)


def drawn() -> tuple[bytes, ...]:
    """Where torch's generators stand: the same before and after a forward that draws nothing."""
    states = [torch.get_rng_state().numpy().tobytes()]
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return tuple(states)


def modes(*, own: bool = True) -> str:
    """Why what torch computes at this moment is not what the code says; "" if it is.

    Args:
        own: Modes of FlowKV's own count as well. They do not where pages are named by them.
    """
    found: list[tuple[str, Any]] = []
    if torch._C._len_torch_dispatch_stack():
        found += [("dispatch", mode) for mode in _get_current_dispatch_mode_stack()]
    if torch._C._len_torch_function_stack():
        stack = torch.overrides._get_current_function_mode_stack()
        found += [("function", mode) for mode in stack if not isinstance(mode, DeviceContext)]
    for kind, mode in found:
        if own or not getattr(mode, "names_flowkv_pages", False):
            return f"a {kind} mode stands between the model and torch"
    return ""


def _helped(model: torch.nn.Module) -> bool:
    """Return whether something stands between modules: hooks and forwards beside the door's own."""
    for module in model.modules():
        held = vars(module)
        around = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        owners = [getattr(each, "__self__", each) for each in around]
        owners += [held[name] for name in ("forward", "_call_impl") if name in held]
        if "_hf_hook" in held or not all(getattr(o, "captures", False) for o in owners):
            return True
    return False


def _places(model: torch.nn.Module) -> set[tuple[torch.dtype, torch.device]]:
    return {(t.dtype, t.device) for t in (*model.parameters(), *model.buffers())}


def _switch(config: Any) -> int | None:
    """Length from which positions are encoded otherwise, for encodings that depend on length."""
    if not hasattr(config, "get_text_config"):  # no model of transformers
        return None
    text = config.get_text_config(decoder=True)
    rope: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, dict):
        return None
    trained = getattr(text, "max_position_embeddings", None)
    lengths = []
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = part.get("rope_type", part.get("type"))
        if isinstance(kind, str) and any(name in kind for name in _ROPE_BY_LENGTH):
            lengths.append(part.get("original_max_position_embeddings") or trained or 1)
    return min(int(n) for n in (*lengths, trained or lengths[0])) if lengths else None


# Proves pages by reading weights again: a little in every call, more while nothing runs.
#
# A page may leave the process once a reading of all weights, begun after the page became known, has
# found them as they were named. A reading that finds another content takes back what is not proven.

_IDLE_S = 0.05
"""So long nothing has run when a model counts as idle."""
_PART_S = 0.002
_END_S = 5.0


class Proof:
    """Reads the weights of one model for one cache.

    Args:
        kv: Where the pages are.
        identity: Whose weights.
        lock: Held while the identity is looked at or changed; taken before the cache's.
    """

    def __init__(self, kv: KV, identity: Identity, lock: threading.RLock) -> None:
        self._kv, self._identity, self._lock = kv, identity, lock
        self._began_s = self._ended_s = time.monotonic()
        self._running = False
        self._thread: threading.Thread | None = None

    # ---- calls

    def enter(self) -> None:
        """A forward begins."""
        self._running = True

    def leave(self) -> None:
        """A forward is over."""
        self._running = False
        self._ended_s = time.monotonic()

    def read(self) -> bool:
        """Reads on, at the start of a call; False if weights are not what they were."""
        identity = self._identity
        if identity.n_bytes <= SMALL_BYTES:
            return identity.same_content()
        now_s = time.monotonic()
        seconds, self._began_s = self._ended_s - self._began_s, now_s
        return self._roll(seconds)

    def _roll(self, seconds: float) -> bool:
        weights = self._identity.weights
        if not weights.rolling:
            self._tell(lambda store: store.stack.provisional.begin())
        passes = weights.passes
        if not self._identity.roll(max(seconds, 0.0)):
            return False
        if weights.passes > passes and not self._identity.foreign:
            self._tell(lambda store: None if self._kv.closed else store.confirm())
        return True

    def _tell(self, what: Callable[[Any], None]) -> None:
        """Says something to the store of pages, once there is one."""
        with self._kv.lock:
            if (planner := self._kv.planner) is not None:
                what(planner.store)

    # ---- what is proven

    def watch(self) -> None:
        """From now on pages are proven or not as the identity, which is new, asks for."""
        proves = self._identity.n_bytes > SMALL_BYTES or bool(self._identity.foreign)
        self._tell(lambda store: setattr(store.stack.provisional, "active", proves))

    def reject(self) -> None:
        """Weights changed: forgets what may have been computed by others than it is named after."""
        self._tell(lambda store: store.reject())
        drop_unproven(self._kv)

    def finish(self, end_s: float = math.inf) -> bool:
        """Read all weights from the beginning, so that all that is known by now is proven.

        Args:
            end_s: Give up at this time of `time.monotonic`.

        Returns:
            Whether nothing is left to be proven; False if that took too long.
        """
        left_s = end_s - time.monotonic()
        if not self._lock.acquire(timeout=min(max(left_s, 0.0), threading.TIMEOUT_MAX)):
            return False
        try:
            planner = self._kv.planner
            if planner is None or not planner.store.stack.provisional or self._identity.foreign:
                return True
            self._identity.weights.restart()
            passes = self._identity.weights.passes
            part_s = 1e9 if end_s == math.inf else _PART_S
            while self._identity.weights.passes == passes:
                if time.monotonic() > end_s:
                    return False
                if not self._roll(part_s):
                    self.reject()
                    break
            return True
        finally:
            self._lock.release()

    def rest(self) -> None:
        """A call may be over: reads on in the background while nothing else runs."""
        planner = self._kv.planner
        if planner is None or not planner.store.stack.provisional.active or self._identity.foreign:
            return
        stack = planner.store.stack
        if not stack.provisional or not any(map(stack.outlives, range(len(stack.tiers)))):
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_read_on, args=(weakref.ref(self),), name="flowkv-weights", daemon=True
            )
            _READERS.add(self._thread)
            self._thread.start()

    def step(self) -> bool:
        """Reads a part if the model is idle; whether there is more to prove."""
        planner = self._kv.planner
        if planner is None or self._kv.closed or not planner.store.stack.provisional:
            return False
        if self._running or time.monotonic() - self._ended_s < _IDLE_S:
            return True
        if self._lock.acquire(blocking=False):
            try:
                if self._identity.foreign or self._identity.n_bytes <= SMALL_BYTES:
                    return False
                if not self._roll(0.0):
                    self.reject()
                    self._identity.weights.restart()
            finally:
                self._lock.release()
        return True


_ENDING = threading.Event()
_READERS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """A thread within torch must not see the interpreter go: that aborts the process."""
    _ENDING.set()
    for thread in [*_READERS]:
        thread.join(_END_S)


def _read_on(held: weakref.ref[Proof]) -> None:
    while not _ENDING.is_set() and (proof := held()) is not None and proof.step():
        del proof  # nobody is kept alive by being watched
        time.sleep(_PART_S)
