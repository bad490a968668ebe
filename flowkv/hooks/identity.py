"""A model's identity: the name that its pages carry, and the notice of every change to it.

Pages are valid for exactly the weights and the computation that made them (DESIGN D13). The name is
made of both (`weights`, `computation`), so it is the same in another process, on another device,
and again when a change was undone. Whether anything changed is asked when a cache is made and
before pages become known, by comparing what was met with what is there.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flowkv.cache.kv import KV, drop_unproven
from flowkv.core.errors import UnsupportedModelError
from flowkv.core.keys import Namespace
from flowkv.hooks.computation import (
    LONG,
    MISSING,
    PLAIN,
    Walk,
    Written,
    items_of,
    key_text,
    settles,
    transformers,
)
from flowkv.hooks.fingerprint import Weights, bytes_of, version_of

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

    Attributes:
        namespace: Its name, for the keys of pages.
        switch: Length from which positions are encoded otherwise, if there is one.
        unnamed: What cannot be named, and why; then nothing outlives the process.
        unshared: Why nothing may be shared; "" if it may.
        foreign: What takes part that is neither torch's nor transformers'.
    """

    def __init__(self, model: Any, name: str = "") -> None:
        self.switch = _switch(getattr(model, "config", None))
        # Encodings that depend on length rewrite these in every forward.
        self._passing = "inv_freq" if self.switch is not None else ""
        self._name, self._first_weights = name, ""
        self._written, self._places_written = Written(), Places()
        self._learnt: dict[str, Any] = {}
        self._settled = self._paused = False
        self._parts: list[tuple[str, Walk, str]] = []
        self._numbers: dict[Any, tuple[Any, Any]] = {}
        self._weights = Weights()
        self.unshared, self._steps = "", _STEPS[0]
        self.namespace = Namespace(model=name)
        self.read(model)
        # Weakly: a model must not keep what its former caches knew of it.
        weakref.finalize(model, _forget, weakref.ref(self)).atexit = False

    def read(self, model: Any, *, anew: bool = False) -> bool:
        """Takes the model as it is now; whether that gave it another name.

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
        self._steps = _STEPS[0]
        self._walk = walk = Walk(model, self._written, self._passing, self._numbers)
        weights = self._weights.read(walk.tensors)
        self._first_weights = self._first_weights or weights
        self._places = _places(model)
        self._take(walk)
        config: Any = getattr(model, "config", None)
        own_name = str(getattr(config, "_name_or_path", "")) or type(model).__name__
        release = transformers().library_release() if walk.pretrained else ""
        trusted = bool(self._name) and weights == self._first_weights
        self._plain = Namespace(
            model=self._name or own_name,
            revision="" if self._name else str(getattr(config, "_commit_hash", None) or ""),
            weights="" if trusted else weights,
            computation=f"{release} {walk.digest}",
        )
        name = self._with_edits()
        self.weights_changed = weights != getattr(self, "_last_weights", weights)
        self._last_weights = weights
        changed, self.namespace = name != self.namespace, name
        return changed

    def _take(self, walk: Walk, seen_once: Iterable[str] = ()) -> None:
        for path in walk.spots:
            if not path.endswith("/new"):
                self._written.setdefault(path, ())
        self._places_written.take(walk.spots, seen_once)

    def _with_edits(self) -> Namespace:
        """The name, with what somebody else wrote where forwards write."""
        edited = dict(self._places_written.edited)
        self._parts = parts = []
        for path, value in sorted(edited.items(), key=lambda item: item[0]):
            part = Walk(None, {}, "", self._numbers, part=(path, value))
            leaves = part.leaves
            if value is MISSING:
                leaves = {path: "missing"}
            kept = self._written.get(path, ())
            if not part.tensors and tuple(sorted(leaves.items())) == tuple(sorted(kept)):
                continue  # it is what the name says
            parts.append((path, part, f"{part.digest} {Weights().read(part.tensors)}"))
        self._places_written.foreign = set(edited)
        texts = [f"{path} {digest}" for path, _, digest in parts]
        # What such a place held once is in the name: as forwards leave it, it is something else.
        texts += [
            f"{p} left"
            for p in sorted(self._places_written.touched - edited.keys())
            if p in self._places_written and self._written.get(p)
        ]
        if not texts:
            return self._plain
        text = " ".join(texts)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        computation = f"{self._plain.computation} {digest}"
        return msgspec.structs.replace(self._plain, computation=computation)

    def begin(self) -> None:
        """A forward begins, of whatever cache."""
        if not self._paused:
            self._places_written.follow(ended=False)

    def end(self) -> None:
        """A forward has ended, of whatever cache."""
        if not self._paused:
            self._places_written.follow(ended=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What forwards write meanwhile is taken back: they are of a trial."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @property
    def unsteady(self) -> int:
        """Another number than when a cache began: it computes by now what its name does not say."""
        return self._places_written.unsteady

    def restate(self) -> bool:
        """Names what somebody else wrote where forwards write; whether the name is another one."""
        name = self._with_edits()
        changed, self.namespace = name != self.namespace, name
        return changed

    def settle(self, model: Any) -> None:
        """Names what the first forwards set once, and left as it was in later ones.

        A scale that a module makes for itself when it is first called is a setting like any other:
        somebody may have made it before. What holds more than a number or a text stays out: caches
        of masks are as long as what was seen.
        """
        for path, state in self._learnt.items():
            if path not in self._places_written:
                continue
            now = self._places_written.value(path)
            if path.endswith("/new"):
                known = self._written.grown[path.removesuffix("/new")]
                values = (
                    {str(key_text(k)): v for k, v in now.items()} if isinstance(now, dict) else {}
                )
                keep = {k for k, v in values.items() if settles(v) and state.get(k) == state_of(v)}
                self._written.grown[path.removesuffix("/new")] = known | keep
                if len(keep) == len(values):
                    del self._written.grown[path.removesuffix("/new")]
            elif settles(now) and state == state_of(now):
                self._written.pop(path)
        self._learnt.clear()
        self._settled = True
        self.read(model)
        for path, inv_freq, original in self._walk.frequencies():
            if not torch.equal(inv_freq, original):
                self._places_written.distrust(path)
        self.restate()

    def learn(self, model: Any, *, named: bool = True) -> bool:
        """Notes, right after a forward, what that forward wrote itself, and will write again.

        Counters, masks and activations that are kept, tables that grow: they say nothing about what
        the next forward computes that its inputs do not say. Parameters do. What was seen to be
        written only once, by a model that serves, is named by what is there until a forward writes
        it again: another thread may have written it.

        Args:
            model: The model.
            named: What it wrote stays in the name as it was before; otherwise it is in no name.

        Returns:
            Whether the name is another one.

        Raises:
            UnsupportedModelError: It wrote what cannot even be looked at.
        """
        try:
            return self._learn(model, named=named and self._settled)
        except UnsupportedModelError:
            raise
        except Exception as error:  # whatever odd attributes raise
            raise UnsupportedModelError(
                f"what {type(model).__name__} writes cannot be named ({error})",
                "Use the model without FlowKV",
            ) from error

    def _learn(self, model: Any, *, named: bool) -> bool:
        if not named:  # forwards that no door has seen
            self._places_written.follow(ended=True)
        uncounted = self._uncounted(always=not named)
        if not uncounted and self.same(model):
            return False
        before, after = self._walk, Walk(model, self._written, self._passing, self._numbers)
        leaves = before.leaves.keys() | after.leaves.keys()
        written = {path for path in leaves if before.leaves.get(path) != after.leaves.get(path)}
        written |= {  # replaced by another with the same content, and so again
            path for path, value in after.held.items() if before.held.get(path, value) is not value
        }
        for path, tensor in after.tensors.items():
            old = before.tensors.get(path)
            if old is not tensor or not self._weights.counted(tensor) or id(tensor) in uncounted:
                if isinstance(tensor, torch.nn.Parameter):
                    self.unshared = f"its forward writes to its parameter {path}"
                else:
                    written.add(path)
                    if old is tensor and self._weights.counted(tensor):
                        self._places_written.uncounted.add(path)
        for path, keys in after.mappings.items():
            known = before.mappings.get(path)
            if known is not None and keys - known and path not in self._written.grown:
                self._written.grown[path] = known & keys
        written = {path for path in written if not self._added(path)}
        written = set(itertools.chain.from_iterable(_whole(p, before, after) for p in written))
        fresh = written - self._written.keys()
        for path in written:
            kept = [(q, t) for q, t in before.leaves.items() if _within(q, path)]
            self._written[path] = tuple(kept) if named else ()
        if named:
            self._walk = Walk(model, self._written, self._passing, self._numbers)
            self._take(self._walk, (path for path in self._walk.spots if path in fresh))
        changed = self.read(model)
        if not named:
            for path in self._walk.spots:
                self._learnt.setdefault(path, self._first(path))
        return changed

    def _added(self, path: str) -> bool:
        """Whether a forward added what is at a path to a mapping, which is one place then."""
        return any(
            path.startswith(f"{above}[") and not any(_within(path, f"{above}[{k}]") for k in known)
            for above, known in self._written.grown.items()
        )

    def _first(self, path: str) -> Any:
        value = self._places_written.value(path)
        if path.endswith("/new") and isinstance(value, dict):
            return {key_text(key): state_of(item) for key, item in value.items()}
        return {} if path.endswith("/new") else state_of(value)

    def _uncounted(self, *, always: bool) -> set[int]:
        """Ids of buffers and other small tensors that were written to without a count.

        Args:
            always: Asks of library models as well, whose own forwards count what they write.
        """
        if not (always or self.foreign):
            return set()
        asked: dict[int, torch.Tensor] = {}
        n_bytes = 0
        for tensor in self._walk.tensors.values():
            size = tensor.numel() * tensor.element_size()
            small = not isinstance(tensor, torch.nn.Parameter) and n_bytes + size <= SMALL_BYTES
            if small and id(tensor) not in asked and self._weights.counted(tensor):
                asked[id(tensor)] = tensor
                n_bytes += size
        return self._weights.differing(asked.values()) if asked else set()

    def attends(self, model: Any) -> tuple[list[Any], dict[str, str]]:
        """The functions that attend, and by path whatever code of libraries refers to.

        FlowKV's own attention stands in only for what was tried.
        """
        own = [
            getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
            for module in model.modules()
        ]
        functions = [
            *(f for _, _, f in transformers().chosen_functions(model)),
            *dict.fromkeys(own),
        ]
        return functions, self._walk.libraries

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides how a model can be served: its code and settings, dtypes and devices."""
        return self._walk.kind, frozenset(self._places)

    @property
    def n_bytes(self) -> int:
        """Bytes of its weights."""
        return self._weights.n_bytes

    @property
    def unnamed(self) -> list[str]:
        """What cannot be named, and why; then nothing outlives the process."""
        return [*self._walk.unnamed, *(why for _, part, _ in self._parts for why in part.unnamed)]

    @property
    def foreign(self) -> list[str]:
        """What takes part that is neither torch's nor transformers'."""
        return self._walk.foreign

    @property
    def training(self) -> bool:
        """Whether submodules are in training mode."""
        return self._walk.training

    @property
    def trains(self) -> bool:
        """Whether gradients may flow to its tensors."""
        return any(tensor.requires_grad for tensor in self._walk.tensors.values())

    @property
    def draws(self) -> bool:
        """Whether a forward may draw random numbers: something trains, or is not transformers'."""
        return self._walk.training or bool(self._walk.foreign)

    @property
    def random(self) -> bool:
        """Whether code draws random numbers where torch's own generator does not show it."""
        return self._walk.random or any(part.random for _, part, _ in self._parts)

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

    def same_content(self) -> bool:
        """Whether small weights still hold what they held; larger ones take `roll`."""
        return self.n_bytes > SMALL_BYTES or self._weights.same()

    def roll(self, seconds: float) -> bool:
        """Reads on in the weights, so that `CALLS` calls read all; False if they changed.

        Args:
            seconds: How long the call before took.
        """
        least = -(-self.n_bytes // CALLS)
        end_s = time.monotonic() + _SHARE * seconds
        done = 0
        while True:
            passes = self._weights.passes
            part = least if not done else min(_SLICE_BYTES, least)
            if not self._weights.roll(part):
                return False
            done += part
            if self._weights.passes > passes or time.monotonic() >= end_s:
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
        self._places_written.forget()
        self._parts.clear()
        self._learnt.clear()
        self._numbers.clear()


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


def _places(model: torch.nn.Module) -> set[tuple[torch.dtype, torch.device]]:
    return {(t.dtype, t.device) for t in (*model.parameters(), *model.buffers())}


def _whole(path: str, before: Walk, after: Walk) -> Iterator[str]:
    """The places of which it is said that a forward writes them, for a leaf that it changed."""
    if path.endswith("/all"):  # a container that is one leaf
        path = path.removesuffix("/all")
    if path in after.configs:
        (_, old), (_, new) = before.configs.get(path, (None, {})), after.configs[path]
        names = {name for name in new if name not in old or old[name] != new[name]}
        yield from (f"{path}.{name}" for name in names)
        return
    above = path.rpartition("[")[0]
    yield above if above in after.rings else path


def _within(path: str, above: str) -> bool:
    return path == above or path.startswith((f"{above}.", f"{above}[", f"{above}/"))


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


# What a model's own forward writes, and whether somebody else wrote to it since.
#
# A counter that a forward moves is no part of a model's name: it says nothing that the inputs do
# not say. But the same place may be set by hand afterwards. So the state in which each forward
# left such a place is remembered; whoever finds it in another one before the next forward knows
# that somebody else wrote, and names what is there.

_MOST = 256
_DEEP = 6
_SMALL_TENSOR = 1 << 16


class _Who:
    """The identity of an object, without keeping it alive."""

    __slots__ = ("_met",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        try:
            self._met: Any = weakref.ref(value)
        except TypeError:  # it cannot be referred to weakly
            self._met = lambda: value

    def __eq__(self, other: object) -> bool:
        found = self._met()
        return found is not None and isinstance(other, _Who) and found is other._met()


def state_of(value: Any) -> Any:
    """What equals its like as long as nothing was replaced or written to; keeps nothing alive.

    Of containers of more than `LONG` items it is the length and both ends.
    """
    return _state(value, [_MOST], 0)


def _state(value: Any, left: list[int], depth: int) -> Any:
    left[0] -= 1
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if isinstance(value, torch.Tensor):
        return _Who(value), version_of(value)
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _SMALL_TENSOR and not value.dtype.hasobject
        return _Who(value), value.tobytes() if small else None
    if depth >= _DEEP or left[0] <= 0:
        return _Who(value)
    if isinstance(value, (set, frozenset)):
        return kind, len(value), frozenset(map(id, value)) if len(value) <= LONG else None
    if isinstance(value, (Mapping, list, tuple, deque)):
        if len(value) <= LONG:
            items = items_of(value).items()
            return kind, {key: _state(item, left, depth + 1) for key, item in items}
        ends = () if isinstance(value, Mapping) else (value[0], value[-1])
        return kind, len(value), [_state(end, [0], 0) for end in ends]
    held = getattr(value, "__dict__", None)
    return _Who(value), _state(held, left, depth + 1) if type(held) is dict else None


def _content_of(value: Any) -> Any:
    """The state of a small tensor to which somebody writes without a count."""
    if not isinstance(value, torch.Tensor) or value.nbytes > _SMALL_TENSOR:
        return state_of(value)
    # Bytes alone do not say that they are read as another dtype or shape now.
    content = bytes_of(value.detach()).cpu().numpy().tobytes()
    return _Who(value), value.dtype, tuple(value.shape), content


class Places:
    """The places that a model's forwards write, and in which state each was left.

    Attributes:
        touched: Places to which somebody else ever wrote.
        uncounted: Places of tensors that are written to without a count.
        foreign: Places that were not as a forward left them, when they were named last.
        edited: What was at the places that were not as a forward left them when one began.
        unsteady: Grows whenever somebody else wrote to such a place, or a forward did to one that
            somebody else had written to: what is computed from now on is another thing than the
            name says which a call began with.
    """

    def __init__(self) -> None:
        self.unsteady = 0
        self.edited: dict[str, Any] = {}
        self.uncounted: set[str] = set()
        self.touched: set[str] = set()
        self.foreign: set[str] = set()
        self._spots: dict[str, Callable[[], Any]] = {}
        self._left: dict[str, Any] = {}
        self._own: dict[str, Any] = {}

    def take(self, spots: Mapping[str, Callable[[], Any]], learnt: Iterable[str] = ()) -> None:
        """Takes the places of a walk.

        Args:
            spots: What is at each place, by path.
            learnt: Places at which a write was seen only once: they are named by what is there,
                until a forward writes to them again.
        """
        self._spots = dict(spots)
        for path in spots.keys() - self._left.keys():
            self._left[path] = self._own[path] = self._state(path, self.value(path))
        for path in learnt:
            self.distrust(path)
        for gone in self._left.keys() - spots.keys():
            for held in (self._left, self._own, self.edited):
                held.pop(gone, None)

    def distrust(self, path: str) -> None:
        """What is at a place now was not left by a forward."""
        self._own[path] = None
        self.edited[path] = self.value(path)

    def follow(self, *, ended: bool) -> None:
        """A forward begins, or has ended: what differs by then, it has written.

        Whatever odd values raise, nothing is shared then.
        """
        try:
            for path, get in self._spots.items():
                now = get()
                state = self._state(path, now)
                if state == self._left[path]:
                    continue
                self._left[path] = state
                if ended:
                    self._own[path] = state
                    self.unsteady += path in self.foreign
                else:
                    self.touched.add(path)
                    self.unsteady += 1
                if state == self._own[path]:
                    self.edited.pop(path, None)
                else:
                    self.edited[path] = now
        except Exception:
            self.unsteady += 1

    def __contains__(self, path: str) -> bool:
        return path in self._spots

    def _state(self, path: str, value: Any) -> Any:
        return _content_of(value) if path in self.uncounted else state_of(value)

    def value(self, path: str) -> Any:
        """What is at a place."""
        return self._spots[path]()

    def forget(self) -> None:
        """Lets go of everything."""
        for held in (self._spots, self._left, self._own, self.edited):
            held.clear()


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
            self._tell(lambda store: store.provisional.begin())
        passes = weights.passes
        if not self._identity.roll(max(seconds, 0.0)):
            return False
        if weights.passes > passes and not self._identity.unnamed:
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
        proves = self._identity.n_bytes > SMALL_BYTES or bool(self._identity.unnamed)
        self._tell(lambda store: setattr(store.provisional, "active", proves))

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
            if planner is None or not planner.store.provisional or self._identity.unnamed:
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
        if planner is None or not planner.store.provisional or self._identity.unnamed:
            return
        if not any(map(planner.store.outlives, range(len(planner.store.tiers)))):
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
        if planner is None or self._kv.closed or not planner.store.provisional:
            return False
        if self._running or time.monotonic() - self._ended_s < _IDLE_S:
            return True
        if self._lock.acquire(blocking=False):
            try:
                if self._identity.unnamed or self._identity.n_bytes <= SMALL_BYTES:
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
