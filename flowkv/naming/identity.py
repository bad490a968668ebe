"""A model's identity: the name of its pages, and the detection of every change to the model.

Pages are valid for exactly the weights and the computation that made them (DESIGN D13). The name is
made of both (`weights`, `computation`), so it is the same in another process, on another device,
and again when a change was undone. A change is detected when a cache is made and before pages are
published, by comparing the model with the objects that were read for its name.
"""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from flowkv.cache.kv import KV, drop_unproven
from flowkv.core.errors import ConfigError, UnsupportedModelError
from flowkv.core.keys import Namespace
from flowkv.core.reaper import begin
from flowkv.naming.computation import Walk, transformers
from flowkv.naming.fingerprint import Weights

SMALL_BYTES = 8 << 20
"""Weights up to this size are read whole for every cache and before pages become known."""
CALLS = 32
"""Most calls after which a write to weights that PyTorch does not count is found."""
_SHARE = 0.01
"""Share of a call's time in which weights may be read, beyond the bytes that `CALLS` requires."""
_SLICE_BYTES = 16 << 20
_STEPS = [0]
"""Number of optimizer steps that wrote to weights without a count."""
_ROPE_BY_LENGTH = ("dynamic", "longrope")


class _Whole(Namespace, frozen=True, kw_only=True):
    """Namespace of a model that weights and computation cover, wherever these were loaded from."""

    def digest(self) -> bytes:
        return Namespace.digest(msgspec.structs.replace(self, model=""))


class Identity:
    """Identity of one model at one moment.

    Args:
        model: The model.
        name: Name given by the user, which replaces the model's own name and the digest of its
            weights while the weights are unchanged; "" for the model's own name and digest.
        revision: The user's name for everything that no other part of the name covers; "" for none.

    Attributes:
        namespace: The model's name, for the keys of pages.
        switch: Length from which positions are encoded otherwise; None without such a length.
        twofold: All longer texts are encoded alike, and all shorter ones.
        suspect: Code takes part that is neither torch's nor transformers'.
        own: Paths of code that takes part and is no library's.
        training: Submodules are in training mode.
        compiled: Parts of the model are compiled.
        weights: The weights as they were read.
        n_bytes: Bytes of the weights.
        draws: A forward may draw random numbers: a module trains, or foreign code takes part.
        plain: Each forward does the same work on the same memory: no module trains, no foreign code
            takes part, and no hook moves weights or keeps results between modules.
    """

    def __init__(self, model: Any, name: str = "", revision: str = "") -> None:
        if not isinstance(revision, str):
            raise ConfigError(f"revision={revision!r}", "Use text")
        self._name, self._revision, self._first_weights = name, revision, ""
        self._moving, self._moved = "", set[str]()
        self._offloaded: dict[Any, tuple[Any, str]] = {}
        self.weights, self._steps = Weights(), _STEPS[0]
        self.namespace = Namespace(model=name)
        self.read(model)
        # Held weakly: a model must not keep the identities of its former caches alive.
        self._until = weakref.ref(model, partial(_forget, weakref.ref(self)))

    def read(self, model: Any, *, anew: bool = False) -> bool:
        """Name the model as it is now; return whether that gave it another name.

        Args:
            model: The model.
            anew: Read all weights, after a write to them that was not counted.

        Raises:
            UnsupportedModelError: The model holds an object that cannot be inspected.
        """
        try:
            return self._read(model, anew=anew or self._steps != _STEPS[0])
        except Exception as error:  # attributes of any class may raise anything
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be named ({type(error).__name__}: {error})",
                "Use the model without FlowKV, or remove that from it",
            ) from error

    def _read(self, model: Any, *, anew: bool) -> bool:
        if anew:
            self.weights.forget()
        self._steps, self._handles = _STEPS[0], RemovableHandle.next_id
        was = self.foreign if hasattr(self, "_walk") else ""
        self.switch, self.twofold = _switch(getattr(model, "config", None))
        # Encodings that depend on length rewrite buffers of this name in every forward.
        passing = "inv_freq" if self.switch is not None else ""
        self._walk = walk = Walk(model, passing, self._offloaded)
        self.own, self.training, self.compiled = walk.own, walk.training, walk.compiled
        self.suspect = bool(walk.own or walk.foreign)
        self.draws = walk.training or self.suspect
        self.plain = not (self.draws or walk.compiled or self.switch is not None or _helped(model))
        for named in (walk.leaves, walk.tensors):  # the user's revision stands for these
            for path in [path for path in named if path.partition("[")[0] in self._moved]:
                del named[path]
        weights = self.weights.read(walk.tensors)
        self.n_bytes = self.weights.n_bytes
        self._first_weights = self._first_weights or weights
        self._places = self.places(model)
        config: Any = getattr(model, "config", None)
        path = str(getattr(config, "_name_or_path", "")) or type(model).__name__
        commit = getattr(config, "_commit_hash", None)
        origin = f"{path}@{commit}" if commit else path
        trusted = bool(self._name) and weights == self._first_weights
        whole = not (self._name or self._revision or self.foreign)
        name = (_Whole if whole else Namespace)(
            model=self._name or origin,
            revision=self._revision,
            weights="" if trusted else weights,
            computation=walk.digest,
        )
        self.weights_changed = weights != getattr(self, "_last_weights", weights)
        self._last_weights = weights
        changed, self.namespace = name != self.namespace or was != self.foreign, name
        return changed

    @property
    def foreign(self) -> str:
        """Return why the name cannot cover the model, so that no page is shared; "" if it does."""
        return "" if self._revision else self._walk.foreign or self._moving

    def steady(self, model: Any) -> bool:
        """Return whether the model still has its name, as far as it is checked in each forward.

        Of a model of libraries alone, weights are compared once a page is full.
        """
        count, walk = RemovableHandle.next_id, self._walk
        if not walk.own and count == self._handles and walk.same():
            return True
        self._handles = count
        return self.same(model)

    def kept(self, model: Any, *, blame: bool = True) -> bool:
        """Return whether the model still has its name after a forward; else name it anew.

        No name covers pages of a model that changed in a forward, by itself or by another thread:
        it is foreign until it is attached again. With a revision of the user's, the attributes that
        change are left out of the name instead.

        Args:
            model: The model.
            blame: The model had its name when that forward began.

        Raises:
            UnsupportedModelError: The model holds an object that cannot be inspected.
        """
        if self.same(model):
            return True
        name, before, tensors = self.namespace, self._walk.leaves, self._walk.tensors
        written = {p for p, t in tensors.items() if not self.weights.counted(t)}
        self.read(model)
        now, other = self._walk.leaves, self._walk.tensors
        found = written | {p for p in before.keys() | now.keys() if before.get(p) != now.get(p)}
        found |= {p for p in tensors.keys() & other.keys() if tensors[p] is not other[p]}
        if self.namespace == name:  # objects were replaced by equal ones
            return not any(isinstance(tensors[path], torch.nn.Parameter) for path in written)
        if self._revision:
            self._moved |= {path.partition("[")[0] for path in found}  # a list may grow
            self.read(model)
        elif blame and not self._moving:
            self._moving = f"{min(found, default='its tensors')}: changed during a forward"
        return False

    def attends(self, model: Any) -> list[Any]:
        """Return the model's attention functions, for FlowKV replaces only those it has tested."""
        modules = dict.fromkeys(type(module).__module__ for module in model.modules())
        own = [getattr(sys.modules.get(name), "eager_attention_forward", None) for name in modules]
        return [*(f for _, _, f in transformers().chosen_functions(model)), *own]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return a key for test results of the model: its code, settings, dtypes and devices."""
        return self._walk.kind, frozenset(self._places)

    @property
    def trains(self) -> bool:
        """Return whether gradients may flow to tensors of the model."""
        return any(tensor.requires_grad for tensor in self._walk.tensors.values())

    @property
    def settled(self) -> bool:
        """Return whether encodings that depend on length are the same as in a fresh model."""
        return self._walk.settled()

    def same(self, model: torch.nn.Module) -> bool:
        """Return whether the model is as it was named, but for uncounted writes to its weights."""
        try:
            return self._steps == _STEPS[0] and self._walk.same() and bool(self.weights.counted())
        except Exception:  # objects that cannot be compared count as changed
            return False

    def state(self, model: torch.nn.Module, *, whole: bool) -> object:
        """Return an object that stands for the unchanged, `plain` model; else None.

        Args:
            model: The model.
            whole: Compare everything; otherwise weights only, for `steady` has just been asked.
        """
        weights = self._steps == _STEPS[0] and self.weights.counted()
        return self._walk if self.plain and weights and (not whole or self.same(model)) else None

    def same_content(self) -> bool:
        """Return whether small weights have the same content; larger ones are read by `roll`."""
        return self.n_bytes > SMALL_BYTES or self.weights.same()

    def roll(self, seconds: float) -> bool:
        """Read the next part of the weights, so that `CALLS` calls read all; False on a change.

        Args:
            seconds: Duration of the call before.
        """
        least = -(-self.n_bytes // (CALLS - 2))  # one call compares late, one ends the reading
        end_s, part = time.monotonic() + _SHARE * seconds, least
        while True:
            passes = self.weights.passes
            if not self.weights.roll(part):
                return False
            part = min(_SLICE_BYTES, least)
            if self.weights.passes > passes or self.weights.waits or time.monotonic() >= end_s:
                return True

    @staticmethod
    def places(model: torch.nn.Module) -> set[tuple[torch.dtype, torch.device]]:
        """Return the dtypes and devices of a model's tensors."""
        return {(t.dtype, t.device) for t in (*model.parameters(), *model.buffers())}

    def _forget(self) -> None:
        self.weights.forget()
        self._walk.forget()
        self._offloaded.clear()


def _forget(held: weakref.ref[Identity], _: weakref.ref[Any]) -> None:
    if (identity := held()) is not None:
        identity._forget()


def _stepped(optimizer: Any, *_: Any) -> None:
    if any(group.get("fused") for group in optimizer.param_groups):
        _STEPS[0] += 1


register_optimizer_step_post_hook(_stepped)


def drawn() -> tuple[bytes, ...]:
    """Return the states of torch's generators; a forward without random draws keeps them."""
    more = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return tuple(state.numpy().tobytes() for state in (torch.get_rng_state(), *more))


def modes(*, own: bool = True) -> str:
    """Return why torch modes may change what the model computes at this moment; "" without any.

    Args:
        own: Count FlowKV's own modes, too; their effects are in the names of pages.
    """
    found: list[tuple[str, Any]] = []
    if torch._C._len_torch_dispatch_stack():
        found += [("dispatch", mode) for mode in _get_current_dispatch_mode_stack()]
    if torch._C._len_torch_function_stack():
        stack = torch.overrides._get_current_function_mode_stack()
        found += [("function", mode) for mode in stack if not isinstance(mode, DeviceContext)]
    for kind, mode in found:
        if own or not getattr(mode, "names_flowkv_pages", False):
            return f"a torch {kind} mode may change the results of the model"
    return ""


TRANSFORM, TRACED = torch._C._functorch.peek_interpreter_stack, torch._C._is_tracing


def transformed() -> str:
    """Return why torch asks for more of a call than its results; "" if it does not."""
    if TRANSFORM() is not None or forward_ad._current_level >= 0:
        return "a transform of torch.func or a forward derivative is wanted of it"
    return "it is traced" if TRACED() else ""


def _helped(model: torch.nn.Module) -> bool:
    """Return whether modules have hooks or replaced forwards, beside those that allow captures."""
    found = list[Any]()
    for module in model.modules():
        held = vars(module)
        around = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        found += [getattr(each, "__self__", each) for each in around]
        found += [held[name] for name in ("forward", "_call_impl", "_hf_hook") if name in held]
    return not all(getattr(each, "captures", False) for each in found)


def _switch(config: Any) -> tuple[int | None, bool]:
    """Return the length from which positions are encoded otherwise, and whether all longer alike.

    None without such a length.
    """
    if not hasattr(config, "get_text_config"):  # no model of transformers
        return None, False
    text = config.get_text_config(decoder=True)
    rope: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, dict):
        return None, False
    trained = getattr(text, "max_position_embeddings", None)
    kinds, lengths = set[str](), []
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = part.get("rope_type", part.get("type"))
        if isinstance(kind, str) and any(name in kind for name in _ROPE_BY_LENGTH):
            kinds.add(kind)
            lengths.append(part.get("original_max_position_embeddings") or trained or 1)
    if not lengths:
        return None, False
    first = min(int(n) for n in (*lengths, trained or lengths[0]))
    return first, kinds == {"longrope"} and max(lengths) == first


# `Proof` proves pages by reading weights again: a little in every call, more while nothing runs.
#
# A page may leave the process once a reading of all weights, begun after the page became known, has
# found the named content. A reading that finds other content drops all unproven pages.

_IDLE_S = 0.05
"""Time without a forward after which a model counts as idle."""
_PART_S = 0.002
_END_S = 5.0


class Proof:
    """Reader that proves the pages of one cache by the weights of one model.

    Args:
        kv: The cache.
        identity: Identity of the model.
        lock: Held while the identity is read or changed; acquired before the cache's lock.
    """

    def __init__(self, kv: KV, identity: Identity, lock: threading.RLock) -> None:
        self._kv, self._identity, self._lock = kv, identity, lock
        self._began_s = self._ended_s = time.monotonic()
        self._running = False
        self._thread: threading.Thread | None = None

    # ---- calls

    def enter(self) -> None:
        """Record the begin of a forward."""
        self._running = True

    def leave(self) -> None:
        """Record the end of a forward."""
        self._running = False
        self._ended_s = time.monotonic()

    def read(self) -> bool:
        """Read a part of the weights at the start of a call; False if they have changed."""
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
            self._tell(lambda store: None if self._kv.closed else store.writes.confirm())
        return True

    def _tell(self, what: Callable[[Any], None]) -> None:
        """Call a function with the store of pages, if there is one."""
        with self._kv.lock:
            if (planner := self._kv.planner) is not None:
                what(planner.store)

    # ---- proofs

    def watch(self) -> None:
        """Require proofs of pages from now on if the new identity needs them."""
        proves = self._identity.n_bytes > SMALL_BYTES or bool(self._identity.foreign)
        self._tell(lambda store: setattr(store.stack.provisional, "active", proves))

    def reject(self) -> None:
        """Forget the unproven pages after a change of the weights."""
        self._tell(lambda store: store.forget(*store.stack.provisional))
        drop_unproven(self._kv)

    def finish(self, end_s: float = math.inf) -> bool:
        """Read all weights from the beginning, to prove all pages that are known by now.

        Args:
            end_s: Give up at this time of `time.monotonic`.

        Returns:
            Whether no page is left to be proven; False if that took too long.
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
        """Start to read weights in the background, after a forward, if pages need a proof."""
        planner = self._kv.planner
        if planner is None or not planner.store.stack.provisional.active or self._identity.foreign:
            return
        stack = planner.store.stack
        if not stack.provisional or not any(map(stack.admission.outlives, range(len(stack.tiers)))):
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = begin(_read_on, weakref.ref(self), name="flowkv-weights")
            _READERS.update([self._thread] if self._thread else [])

    def step(self) -> bool:
        """Read a part of the weights if the model is idle; return whether pages may need more."""
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
    """Join the readers: a thread inside torch at the interpreter's end aborts the process."""
    _ENDING.set()
    for thread in [*_READERS]:
        thread.join(_END_S)


def _read_on(held: weakref.ref[Proof]) -> None:
    while not _ENDING.is_set() and (proof := held()) is not None and proof.step():
        del proof  # the thread must not keep it alive while it sleeps
        time.sleep(_PART_S)
