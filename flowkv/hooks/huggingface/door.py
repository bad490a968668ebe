"""The door between one model and one cache: the hooks before and after each of its forwards."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from flowkv.cache.kv import KV, bind, drop_unproven, follow, forget_name, warn
from flowkv.cache.sequence import Sequence
from flowkv.cache.step import Step
from flowkv.core import interrupts
from flowkv.core.errors import CapacityError, FlowKVError, StateError, UnsupportedModelError
from flowkv.core.keys import Salt
from flowkv.hooks.graphs import SHORT, GraphedForward, StaticStep, recorder_of
from flowkv.hooks.huggingface.attention import RUNNING, Switch
from flowkv.hooks.huggingface.cache import BY_COLUMN, ModelPlan, PagedCache, configured_layers
from flowkv.hooks.huggingface.inputs import Fill, ForwardCall, Names, digest_of, is_plain, usual
from flowkv.hooks.huggingface.packing import PackedCall
from flowkv.hooks.huggingface.press import Press, Pressing, Thinning
from flowkv.hooks.huggingface.probe import Alike, native_cache, odd_type, probe, rows_alike, settle
from flowkv.hooks.huggingface.restore import (
    NOTHING,
    AdmittedRows,
    Nested,
    Restoring,
    ReuseLimits,
    admit,
    audit_rows,
    extend,
    go_ahead,
)
from flowkv.hooks.huggingface.rows import (
    Rows,
    check_paired,
    closed_on_error,
    exclusive,
    refuse_lost,
    without_known,
)
from flowkv.hooks.huggingface.versions import PREFILL, DynamicCache, EncoderDecoderCache
from flowkv.naming.identity import TRACED, TRANSFORM, Identity, Proof, drawn, modes, transformed
from flowkv.policy.sparsify import Sparsifier

_OWN_ATTRIBUTES = ("__deepcopy__", "__reduce_ex__", "compile", "_prefill", "forward")
_HOOKS = frozenset(
    f"_forward_{kind}{flags}"
    for kind in ("hooks", "pre_hooks")
    for flags in ("", "_with_kwargs", "_always_called")
)
_ASIDE: ContextVar[frozenset[Any]] = ContextVar("flowkv_aside", default=frozenset())
"""Doors that do not serve this thread's forwards."""
_GENERATES: ContextVar[Any] = ContextVar("flowkv_generates", default=None)
"""Door of an encoder-decoder whose `generate` runs its first forward, which reads the last logits
only: decoders get `logits_to_keep`, here the same arguments of another caller may want all."""
_PATIENCE_S = 10.0
"""Longest time for which closing and detaching wait for forwards of other threads."""
_MIXED = "the rows of a batch depend on each other"
COMPILED = "compiles it whole, and a compiled forward calls no hooks"
_GRADIENTS = "gradients are wanted; call it under torch.no_grad()"
_PADDING = "its mask is more than left padding"
_LONG = Salt(0, digest_of("encoded as a long text"))
"""Salt of texts in which every token is encoded otherwise than in a short one."""


class ForwardHook:
    """Serves the forwards of one model from one cache. Thread-safe: all state is per cache.

    Args:
        model: The model, held weakly.
        kv: The cache.
        plan: The model's layers.
        identity: The identity of the model.
        switch: The switch of its attention.

    Attributes:
        proof: The reader that verifies the model's weights, so that pages may be kept.
        sparsifier: The policy that drops tokens of a prompt; None keeps all of them.
        passes: Native caches that were warned of or had pages once: they cause no more warnings.
        graphs: The captured decode steps; None if none may be captured.
    """

    __slots__ = tuple(  # see `Rows`
        """kv plan identity switch names proof passes sparsifier blending _model _switched _lock
        graphs _answers
        _attends _reads _verdicts _alike _types _caches _inside _leaving _problem _names_used
        _doubted _handles _naming _untried _planned __weakref__""".split()
    )

    captures = True  # these hooks work with steps that are captured as graphs

    def __init__(
        self, model: torch.nn.Module, kv: KV, plan: ModelPlan, identity: Identity, switch: Switch
    ) -> None:
        self._model = weakref.ref(model)
        self.kv, self.plan, self.identity, self.switch = kv, plan, identity, switch
        self.names = Names(model)
        self._switched: set[tuple[int, int]] = set()
        self._lock = threading.RLock()
        self.proof = Proof(kv, identity, self._lock)
        self.proof.watch()
        self._names_used, self._doubted, self._naming = {kv.namespace}, False, False
        self._untried = False  # the name changed after a forward, or a trial was interrupted
        self._planned = identity.places(model)
        self._attends, self._reads = identity.attends(model), switch.reason
        self._verdicts: dict[Any, tuple[str, str, frozenset[int]]] = {}
        self._alike = dict[tuple[bytes, int], Alike]()
        self._types = dict[tuple[Any, ...], str]()
        self._caches: weakref.WeakSet[PagedCache] = weakref.WeakSet()
        self._inside: set[tuple[int, int]] = set()
        self._leaving, self._problem = False, ""
        self.sparsifier: Sparsifier | Press | None = None
        self.blending: Any = None  # a `blend.Blending`
        self.passes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handles: list[Any] = []
        self.graphs: GraphedForward | None = None
        self._answers: type[Any] | None = None  # class of the model's output of a decode step

    @property
    def model(self) -> Any:
        """The model; None once it has been freed."""
        return self._model()

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHook:
        return self

    def __reduce__(self) -> Any:
        raise StateError("the hooks of a cache cannot be pickled", "Pickle the model itself")

    # ---- on and off

    def install(self) -> None:
        """Install the hooks on the model."""
        model = self.model
        assert model is not None
        self._handles = [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]
        model.__dict__["__reduce_ex__"] = self._reduce_model
        if hasattr(type(model), "__deepcopy__"):
            # Wrappers that forward missing attributes to the model, as PEFT's, must not find one.
            model.__dict__["__deepcopy__"] = self._copy_model
        model.__dict__["compile"] = self._compile
        whole = self.names.encoder or "logits_to_keep" not in self.names.parameters
        if whole and getattr(type(model), "_prefill", self) is PREFILL:
            model.__dict__.setdefault("_prefill", self._prefill)
        if self._capturable and "forward" not in model.__dict__:
            model.__dict__["forward"] = _answering(model.forward, self.names.cache)
            state = partial(_state, weakref.ref(self))
            call = partial(_packed, weakref.ref(self), PackedCall(model, self.names, masked=False))
            most = SHORT[-1] if "logits_to_keep" in self.names.parameters else 1
            self.graphs = GraphedForward(call, state, self.kv.config, self.kv.graphed, most)
        follow(self.kv, close=self.release, long=self._long_texts)

    @property
    def _capturable(self) -> bool:
        """Return whether the layers, arguments and devices allow the capture of decode steps."""
        devices = {place.shape[4] for place in self.plan.placed.values()}
        if all(recorder_of(device) is None for device in devices):
            return False
        obstacles = {
            'graphs="off"': self.kv.config.graphs == "off",
            "the model has an encoder": self.names.encoder,
            "the model keeps recurrent states": self.plan.stateful,
            "its layers have indexers": bool(self.plan.indexers),
            "the model takes no positions": self.names.positions not in self.names.parameters,
            "its layers lie on more than one device": len(devices) > 1,
        }
        self.kv.graphed["eager"] = next((why for why, holds in obstacles.items() if holds), "")
        return not self.kv.graphed["eager"]

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model as its class does, and warn that its forwards skip the hooks."""
        type(self.model).compile(self.model, *args, **kwargs)
        self.warn_compiled("model.compile()")

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first forward of the model's `generate`, marked as such."""
        with self.generating():
            return PREFILL(self.model, *args, **kwargs)

    def generating(self) -> interrupts.Setting[Any]:
        """Leave all but the last logits out of first forwards: `with door.generating(): ...`."""
        return interrupts.Setting(_GENERATES, self)

    def warn_compiled(self, how: str) -> None:
        """Warn that forwards of a compiled model do not run the hooks of this door."""
        self._refuse(f"{how} {COMPILED}", "compiled")

    def _copy_model(self, memo: dict[int, Any]) -> Any:
        """Copy a model of a class with its own `__deepcopy__`, without the hooks of this door."""
        own: Any = type(self.model).__deepcopy__
        twin = own(self.model, memo)
        self._strip(vars(twin))
        return twin

    def _reduce_model(self, protocol: Any) -> Any:
        """Reduce the model for `pickle` and `copy.deepcopy`, without the hooks of this door."""
        own: Any = type(self.model).__reduce_ex__
        reduced = own(self.model, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        return (*reduced[:2], self._plain(reduced[2]), *reduced[3:])

    def _plain(self, state: Any) -> Any:
        if isinstance(state, tuple):  # with slots
            return tuple(map(self._plain, state))
        if not isinstance(state, dict):
            return state
        held = {k: v.copy() if k in _HOOKS else v for k, v in state.items()}
        self._strip(held)
        return held

    def _strip(self, state: dict[str, Any]) -> None:
        for name in _OWN_ATTRIBUTES:
            if getattr(state.get(name), "__module__", "") == __name__:
                del state[name]
        for name in _HOOKS & state.keys():
            for handle in self._handles:
                state[name].pop(handle.id, None)

    @property
    def installed(self) -> bool:
        """Return whether the hooks are on the model."""
        return bool(self._handles)

    def aside(self) -> interrupts.Setting[Any]:
        """Leave this thread's forwards to the model's own cache: `with door.aside(): ...`."""
        return interrupts.Setting(_ASIDE, _ASIDE.get() | {self})

    def remove(self) -> None:
        """Remove the hooks and replaced attributes from the model, once its forwards have ended."""
        for handle in self._handles:  # the hook before a forward first, that behind it later
            handle.remove()
            self._wait()
        self._handles = []
        if (model := self.model) is not None:
            self._strip(model.__dict__)
        self.graphs = None

    def release(self) -> None:
        """Turn all caches that are still held into native ones, before the pages are freed.

        Waits for forwards of other threads; a later forward converts its cache itself.
        """
        self._leaving = True
        self._wait()
        for cache in self._held():
            self._let_go(cache)

    def _wait(self) -> None:
        """Wait for forwards of other threads that began with the hooks, but not for ever."""
        end_s, me = time.monotonic() + _PATIENCE_S, threading.get_ident()
        while any(thread != me for thread, _ in list(self._inside)) and time.monotonic() < end_s:
            if self.kv.inherited:
                return  # the threads are the parent's
            time.sleep(1e-3)

    def hold(self, cache: PagedCache) -> None:
        """Remember a cache, to turn it into a native one when the pages are freed."""
        with self._lock:
            self._caches.add(cache)

    def _held(self) -> list[PagedCache]:
        """Return the caches that are still referenced; some may have become native."""
        with self._lock:  # another thread may add one
            return list(self._caches)

    def _let_go(self, cache: PagedCache) -> None:
        with exclusive(cache):
            if self._rests(cache) and not self.kv.closed:
                with suppress(FlowKVError):  # its pages were not loaded, and cannot be any more
                    cache.give_up(private=True)

    def _rests(self, cache: PagedCache) -> bool:
        """Return whether a cache is paged still, and no other thread is in a forward over it."""
        me, inside = threading.get_ident(), list(self._inside)
        taken = any(thread != me and at == id(cache) for thread, at in inside)
        return isinstance(cache, PagedCache) and cache.rows.step is None and not taken

    # ---- hooks

    def before(self, module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Turn a fresh cache into a paged one before a forward, and skip the known prefix."""
        if module is not self._model() or torch.compiler.is_compiling():
            return None
        interrupts.cover()
        if args:
            given = dict(zip(self.names.parameters, args, strict=False)) | given
        given, cache = self._past(given)
        packed = RUNNING.get() is not None
        aside = packed or self in _ASIDE.get()
        key = threading.get_ident(), id(cache)
        changed, served = None, False
        try:
            locked = isinstance(cache, PagedCache) and cache.rows.pid == os.getpid()
            with cache.rows.turn if locked else nullcontext():
                self._inside.add(key)  # operations of other threads have ended
            if self._leaving and isinstance(cache, PagedCache):
                self._let_go(cache)
            changed = None if aside else self._serve(module, cache, given)
            served = packed or isinstance(cache, PagedCache)
        finally:
            if not served:
                self._inside.discard(key)
        if served and (packed or cache.answer is None):
            self._enter(key)
        return changed

    def _past(self, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the arguments by the model's own names, and the decoder's own cache of them."""
        names = self.names
        if names.other in given:
            given = names.own(given)
        cache = given.get(names.cache)
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        return given, cache

    @interrupts.unbroken
    def _enter(self, key: tuple[int, int]) -> None:
        if key not in self._switched:
            self._switched.add(key)
            self.switch.on()

    @interrupts.unbroken
    def _leave(self, key: tuple[int, int]) -> None:
        self._inside.discard(key)
        if key in self._switched:
            self._switched.remove(key)
            self.switch.off()

    def left(self, cache: int) -> None:
        """End the interrupted forwards over a cache that was freed, given by its id."""
        for key in [key for key in list(self._inside | self._switched) if key[1] == cache]:
            self._leave(key)

    def _serve(self, model: Any, cache: Any, given: dict[str, Any]) -> Any:
        training: bool = model.training
        if isinstance(cache, PagedCache) and cache.stays():
            door: ForwardHook = cache.door or self
            wants_grad = torch.is_grad_enabled() and _wants_grad(door, model, given)
            # As `transformed`, without a call in each step.
            more = TRANSFORM() is not None or forward_ad._current_level >= 0 or TRACED()
            if door._model() is not model or wants_grad or more:
                with temporarily_clear_interpreter_stack():  # of transforms
                    cache.give_up(private=True)  # from here the model needs tensors of its own
                if door.model is model:
                    self._refuse(transformed() or _GRADIENTS)
                return None
            return (), door._go_on(cache, given, training=training)
        if self.kv.inherited:
            if cache is not None and not training:
                warn_inherited(self.kv)
            return None
        door = _GENERATES.get() or self  # `verify` may have one beside that of an attached model
        door = door if door._model() is model else self
        problem = None if door.kv.closed or door._leaving else door.decide(model, cache, given)
        if problem:
            door._pass(cache, given, problem)
        return ((), door.start(cache, given)) if problem == "" else None

    @interrupts.unbroken
    def after(self, module: Any, args: Any, given: dict[str, Any], output: Any) -> None:
        """Commit the tokens of a forward and publish full pages; roll back if it failed."""
        if torch.compiler.is_compiling():
            return
        cache = given.get(self.names.cache)
        if type(cache) is not PagedCache:
            cache = self._past(given)[1]
        try:
            self._after(module, cache, output)
        finally:
            self._leave((threading.get_ident(), id(cache)))

    def _after(self, module: Any, cache: Any, output: Any) -> None:
        if module is self._model() and isinstance(cache, PagedCache):
            self.proof.leave()
            if cache.drawn is not None and cache.drawn != drawn():
                cache.rows.disable_publishing()  # random results may not be reused
            if output is None:
                cache.fail()
            else:
                if cache.decoding is not None and cache.rows.agree():
                    self._learn(cache, output)
                cache.finish()
                # A write to its keys meanwhile would have made the cache native.
                if isinstance(cache, PagedCache) and cache.audits is not None:
                    audit_rows(cache)
                if self._doubted:
                    self.retract()
                self.proof.rest()

    def decide(self, module: Any, cache: Any, given: dict[str, Any]) -> str | None:
        """Return why a forward is left to the model's own cache; changes nothing.

        Args:
            module: The model.
            cache: Its cache for the decoder, which is not paged.
            given: The arguments of the forward.

        Returns:
            "" if it is served; None if it expects no reuse, so that a warning would be noise.
        """
        if module.training or given.get("use_cache") is False or given.get("labels") is not None:
            return None
        keep = given.get("logits_to_keep", 0)
        says = cache is not None and "logits_to_keep" in self.names.parameters
        says = says and not hasattr(cache, "care")  # as those of kv.cache(...) have
        if says and not (isinstance(keep, int) and keep > 0):
            return None  # all logits are wanted: no generation
        space = getattr(vars(module).get("forward"), "__globals__", {})
        if str(space.get("__name__")).startswith("transformers.exporters."):
            return None  # it is recorded: with prompts as they are, and caches that can be traced
        problem = self._foreign(cache)
        if problem is None or cache in self.passes or getattr(cache, "left_pages", False):
            return None
        if problem:
            return problem
        if torch.is_grad_enabled() and _wants_grad(self, module, given):
            return _GRADIENTS
        if problem := transformed():
            return problem
        if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
            return "it runs under autocast"
        whole = given[self.names.cache]
        return "" if whole is cache or not whole.cross_attention_cache.get_seq_length() else None

    def _foreign(self, cache: Any) -> str | None:
        """Return the problem of a cache, "" for none; None for a user's class: no warning then."""
        if cache is None:
            return "it has no cache; give it an empty DynamicCache"
        if type(cache) is not DynamicCache:
            known = type(cache).__module__.startswith("transformers.")
            return f"its cache is a {type(cache).__name__}" if known else None
        if getattr(cache, "offloading", False):
            return "its cache is offloaded"
        if getattr(cache, "_is_user_defined", False) and not hasattr(cache, "care"):
            return "generate was given a DynamicCache; give it kv.cache(...), or none"
        if cache.get_seq_length():
            return "its cache was filled without FlowKV"
        model = self.model
        if not self.plan.matches(cache.layers, model.config):
            if configured_layers(model.config) < self.plan.count:
                return "it is a draft that exits early, with fewer layers than the model"
            return "its cache has other layers than the model"
        return ""

    # ---- the first forward of a cache

    def start(self, cache: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Turn a fresh cache into a paged one in place; return the arguments still to compute."""
        try:
            self.refresh(private=False)
        except FlowKVError as error:
            problem = f"the model has changed and cannot be served any more: {error}"
            return self._pass(cache, given, problem, "changed")
        if self.identity.foreign:
            self.passes.add(cache)
            return given
        self._calibrate()
        call = ForwardCall(self.names, given)
        if hasattr(cache, "care"):
            check_paired(call)
        if _GENERATES.get() is self:
            call.keep = max(call.keep, 1)
        pads = None if call.problem else call.pads()
        if problem := self._obstacle(call, pads):
            return self._pass(cache, given, problem)
        assert pads is not None
        if call.asks("output_hidden_states"):
            warn(
                self.kv,
                "hidden states",
                "FlowKV computes prompts whose hidden states are wanted from their first token, "
                "as drafts from them need (MTP, DFlash, Gemma 4's assistant): the result is the "
                "same, nothing is reused. Without such drafts, leave output_hidden_states out.",
            )
        try:
            most = call.columns - max(call.keep, self._asked) if call.skippable else 0
            shifts = call.shifts(pads)
            shifted = shifts is not None and bool(shifts.any())  # as positions of M-RoPE are
            entire = shifted or self._by_length(call, pads)
            # All known pages are loaded first if rows or spans cannot be computed by themselves.
            waits = entire or self.blending is not None or not self._divides(call)
            care = getattr(cache, "care", NOTHING)
            found = self._admit(call, pads, ReuseLimits(most, care=care, wait=waits))
            with closed_on_error(found.seqs):
                restoring = Restoring(self.kv, found.seqs, pads, call.types)
                # Nested forwards are needed only to compute tokens outside the forward itself.
                beside = restoring or self.blending is not None or self.kv.config.overflow
                nested: Any = None
                if beside or self.kv.config.audit:
                    nested = Nested(self, call, call.types, call.fill)
                if restoring:
                    found = restoring.restore(found, nested)
                found, blended = self._blended(found, call, nested, most)
                found = self._placed(found, call, most, restoring)
                if self.kv.config.overflow and most and not entire and call.fill.divides:
                    found = go_ahead(nested, found, pads, most)
        except CapacityError as error:
            return self._pass(cache, given, error.problem, "capacity")
        except TypeError as error:
            return self._pass(cache, given, str(error))
        paged = self._paged(found, call, pads, restoring, cache)
        paged.care = care
        further = any(p + seq.length > found.base for p, seq in zip(pads, found.seqs, strict=True))
        paged.rows.uneven |= self.kv.config.overflow or (self.blending is not None and further)
        if blended and self.blending.private:
            paged.rows.disable_publishing()
        self._watch(paged)
        paged.audits = nested if self.kv.config.audit and not entire else None
        base = self._arrived(paged, call)
        if base == found.base:  # no page that was being loaded was lost
            paged.rows.noted = call.columns  # the sequences were opened with these ids
        if not self._begin(paged, call, call.columns - base):
            return given
        left = call.skip(base, call.fill.rest(base, pads) if call.fillers else None)
        if self.graphs is not None and call.columns - base <= self.graphs.most_new:
            self._replay(paged, ForwardCall(self.names, left))
        return left

    def _calibrate(self) -> None:
        """Calibrate the codes of cold pages once prompts have brought enough tokens, if asked to.

        Other threads go on without.
        """
        bases = self.kv.bases
        if bases is None or not self.kv.config.cold.endswith(":auto") or not bases.take_turn():
            return
        try:
            self.kv.calibrate()
        except Exception as error:  # any error of the model or device: the prompt goes on without
            warn(self.kv, "calibrate", f"cold pages stay raw: {error}")

    def _arrived(self, cache: PagedCache, call: ForwardCall) -> int:
        """Wait for pages being loaded if a graph could go on from there; return columns in pages.

        A replay after the loads takes less time than layers that Python launches beside them.
        """
        rows, graphs = cache.rows, self.graphs
        if rows.restoring is None or graphs is None or call.columns - rows.base != 1:
            return rows.base
        if graphs.captured(len(rows.seqs), call.columns - int(rows.pads.min())):
            rows.land()
            rows.lost = 0  # the forward begins behind the pages that were loaded
        return rows.base

    def _obstacle(self, call: ForwardCall, pads: list[int] | None) -> str:
        """Return why a prompt is left to the model's own cache; "" if it is served."""
        if not self.identity.settled:
            return "its RoPE frequencies differ from those of a fresh model"
        if self.identity.compiled:
            return "parts of the model are compiled"
        if self.identity.suspect and torch.is_grad_enabled():
            return _GRADIENTS  # it may have got parameters of foreign code just now
        if problem := call.problem or modes() or self._apart(call, pads):
            return problem
        assert pads is not None
        if call.unplaced and (any(pads) or call.fillers):
            return f"it has {'padding' if any(pads) else 'images'} and no position_ids"
        if call.positions is None and not self.plan.from_0:
            return "it has no position_ids, and those of the model itself do not count from 0"
        return ""

    def _apart(self, call: ForwardCall, pads: list[int] | None) -> str:
        """Return why rows of a call are not what each is alone; "" if they are."""
        if call.problem or pads is None:
            return call.problem or _PADDING
        if self.plan.by_column and any(pads):
            return BY_COLUMN
        config = self.model.config.get_text_config(decoder=True)
        if call.fillers and getattr(config, "cross_attention_layers", None):
            return "layers of their own read its images"
        if call.fillers and call.hides(pads):
            return "its padding holds images"
        if problem := self._odd_tokens(call):
            return problem
        places = None if call.shifts(pads) is not None else call.numbers[2]
        if places is not None and not usual(0, call.columns, places, np.array(pads)):
            return "its positions do not count a row's tokens from 0"
        return _MIXED if self.alike_rows(call.rows) == "mixed" else ""

    def _blended(
        self, found: AdmittedRows, call: ForwardCall, nested: Nested, most: int
    ) -> tuple[AdmittedRows, bool]:
        """Put known documents in place if `reuse="blend"`; return the rows, and whether any are."""
        special = call.modal or call.types or call.condition
        if self.blending is None or special or not call.skippable:
            return found, False
        return self.blending.apply(found, nested, call.pads(), most)  # type: ignore[no-any-return]

    def _placed(
        self, found: AdmittedRows, call: ForwardCall, most: int, restoring: Restoring
    ) -> AdmittedRows:
        """Compute rows of a model with states up to the points where states are worth saving.

        A state is available only where a forward ends. Without these stops, a prompt that parts
        from a known one would find no state but the one behind that one's answer.
        """
        if not self.plan.stateful or most <= found.base or self.identity.suspect:
            return found
        pads = call.pads() or []
        if self.kv.private or any(pads) or not self._divides(call) or self._by_length(call, pads):
            return found
        with self.kv.lock:
            cut = partial(call.fill.cut_at_page, page_size=self.kv.page_size)
            stops = self.kv.snapshots.plan_stops(found.seqs, found.base, most, cut)
        if not stops or not restoring.end_complete():
            return found
        if any(seq.length != found.base for seq in found.seqs):  # a page was lost meanwhile
            return found._replace(base=0, states=None)  # `uneven` rows leave out what is there
        rows = self.rows(found.seqs, [0] * call.rows, found.base)
        rows.noted = stops[-1]  # the sequences were opened with these ids
        cache = PagedCache(rows, self.plan, self, owns=False)
        cache.load_states(found.states)
        try:
            for stop in stops:
                spans = dict.fromkeys(range(call.rows), (rows.base, stop))
                features = call.fill.arguments(spans) if call.modal else None
                part = ForwardCall(self.names, call.head(stop)).skip(rows.base, features)
                rows.plan(stop - rows.base)
                with self.aside(), torch.no_grad():
                    self.model(**part | {self.names.cache: cache})
            states: list[Mapping[str, Any]] = [
                cache.recurrent.state_of(row) for row in range(call.rows)
            ]
        finally:
            rows.abandon()  # does nothing after a success
        return found._replace(base=stops[-1], states=states)

    def _pass(
        self, cache: Any, given: dict[str, Any], problem: str, code: str = ""
    ) -> dict[str, Any]:
        """Leave a native cache to the model and warn why; return the arguments unchanged."""
        if cache is not None:
            self.passes.add(cache)
        self._refuse(problem, code)
        return given

    def open(self, given: dict[str, Any], care: Mapping[str, Any] = NOTHING) -> Any:
        """Open a cache for a prompt that will be passed to `generate`, paged or to be so then.

        Raises:
            StateError: The prompt cannot be named by its token ids, or the model has changed into
                one that cannot be served.
        """
        try:
            self.refresh()
        except UnsupportedModelError as error:
            raise StateError(error.problem, "Call generate without a cache") from error
        call = ForwardCall(self.names, given)
        pads = None if call.problem else call.pads()
        if (problem := self._apart(call, pads)) or pads is None:
            raise StateError(f"no cache for this prompt: {problem}", "Call generate without one")
        pressed = isinstance(self.sparsifier, Press)  # the kept tokens get their own pages
        if self._waits(call, pads) and not pressed:
            cache: Any = native_cache(self.model)
            cache.reused, cache.close = 0, int  # as its owner may ask for, before the first forward
            return cache
        most = 0 if pressed else call.columns - max(1, self._asked)
        limits = ReuseLimits(most, care=care, wait=self.plan.stateful)
        return self._paged(self._admit(call, pads, limits), call, pads)

    def _waits(self, call: ForwardCall, pads: list[int]) -> bool:
        """Return whether only the first forward over a cache shows what names its pages.

        `generate` runs encoders and makes positions before it, and cuts off what the cache holds.
        """
        counted = any(pads) and self.names.positions in self.names.parameters
        if call.positions is None and (counted or not self.plan.from_0):
            return True
        filled = np.isin(call.numbers[0], list(self.names.placeholders.values())).any()
        return self.names.encoder or not self.names.counts or bool(call.fillers) or bool(filled)

    def _admit(self, call: ForwardCall, pads: list[int], limits: ReuseLimits) -> AdmittedRows:
        """Open the rows of a call with their known prefixes, within the limits and the pools."""
        self._save_states()
        prompts = call.prompts(pads, by_place=self.alike_rows(call.rows) != "alike")
        lengths, most = self._lengths(call, pads), max(limits.most, 0)
        if lengths is not None and call.columns not in lengths:
            most = 0
        elif self._by_length(call, pads):
            limits = limits._replace(wait=True)
            for prompt in prompts:
                prompt.salts.insert(0, _LONG)
        if not self._holds(sum(len(prompt.tokens) for prompt in prompts)):
            if self.kv.config.overflow:
                limits = limits._replace(wait=True)  # pages that do not fit are not loaded at all
            elif not self._holds(max(len(prompt.tokens) for prompt in prompts)):
                most = 0  # nothing is loaded for a prompt that will not fit
        wait = limits.wait or not call.fill.divides
        limits = ReuseLimits(most, self.plan.stateful, call.fill, limits.care, wait)
        return admit(self.kv, prompts, limits)

    def _lengths(self, call: ForwardCall | None = None, pads: Items[int] = ()) -> range | None:
        """Return the lengths at which positions are encoded as in a call, or as in short texts.

        None if length changes nothing; empty if the positions of the call may be of any size.
        """
        switch, twofold = self.identity.switch, self.identity.twofold
        if switch is None or call is None:
            return None if switch is None else range(switch)
        if (shifts := call.shifts(pads)) is not None and shifts.any():
            return range(0)
        longer = twofold and not self.identity.suspect and call.columns - min(pads) > switch
        return range(switch + 1, sys.maxsize) if longer else range(switch)

    def _long_texts(self) -> tuple[int, Salt] | None:
        """Return the length beyond which texts are encoded otherwise, and the salt of those."""
        switch = self.identity.switch if self.identity.twofold else None
        return None if switch is None or self.identity.suspect else (switch, _LONG)

    def _by_length(self, call: ForwardCall, pads: Items[int]) -> bool:
        """Return whether a part of a text would be encoded otherwise alone, as it is shorter."""
        lengths = self._lengths(call, pads)
        return lengths is not None and (lengths.start > 0 or call.columns not in lengths)

    @property
    def _asked(self) -> int:
        """Return how many last tokens of a prompt are always computed, for the sparsifier."""
        return 0 if self.sparsifier is None else self.sparsifier.queries

    def alike_rows(self, rows: int) -> Alike:
        """Return how the model treats the rows of a batch, by a trial where that is in doubt.

        It is in doubt for code that is neither torch's nor transformers', and for 3-D weights with
        one slice for each row.
        """
        model = self.model
        if rows < 2 or model is None:
            return "alike"
        key = self.kv.namespace, rows
        if key not in self._alike:
            lines = ((p.dim(), p.shape[:1]) for p in model.parameters())
            suspect = self.identity.suspect or any(n == 3 and k == (rows,) for n, k in lines)
            with self.aside():
                self._alike[key] = rows_alike(model, self.names, rows) if suspect else "alike"
        return self._alike[key]

    def _odd_tokens(self, call: ForwardCall, base: int = 0) -> str:
        """Return why pages cannot be shared by their tokens or the types of these; "" if they can.

        Tokens of one image see later ones in some models, which `Fill` knows: others may not.
        """
        if call.ids is not None and any(bool((call.ids == n).any()) for n in self.plan.uncounted):
            return "it does not count the position of a pad token among others"
        for name, types in call.types.items():
            if name in self.names.whole and types.shape[1] != base + call.columns:
                return "its types are not those of all tokens"
            for kind in types.unique().tolist():
                filled = bool(kind and call.modal)
                problem = self._odd_type(name, kind, apart=filled)
                if not problem and filled and not call.joined(types):
                    problem = self._odd_type(name, kind, apart=False)
                if problem:
                    return problem
        return ""

    def _odd_type(self, name: str, kind: int, *, apart: bool) -> str:
        """Return the result of `odd_type` for the model as it is now, tried once."""
        key = self.kv.namespace, name, kind, apart
        if key not in self._types:
            with self.aside():
                self._types[key] = odd_type(self.model, self.names, name, kind, apart=apart)
        return self._types[key]

    def _divides(self, call: ForwardCall) -> bool:
        """Return whether rows and spans of tokens of a call can be computed by themselves."""
        plain = all(map(is_plain, call.condition.values()))
        return (plain or self.names.encoder) and self.alike_rows(call.rows) == "alike"

    def _watch(self, cache: PagedCache) -> None:
        """Note the begin of a forward and the state of torch's generators, to find random draws."""
        cache.drawn = drawn() if self.identity.draws else None
        self.proof.enter()

    def _holds(self, tokens: int) -> bool:
        """Return whether the pools could hold that many tokens if all other pages were evicted."""
        planner = self.kv.planner
        assert planner is not None
        wanted, pages = dict.fromkeys(planner.store.pools, 0), -(-tokens // self.kv.page_size)
        for g, group in enumerate(planner.geometry.groups):
            forms = planner.store.forms[g]
            if planner.window(g) is None:
                least = min(layout.granules for layout in forms.layouts.values())
                wanted[group.device] += pages * least
        pools = planner.store.pools
        return all(pools[device].capacity_granules >= n for device, n in wanted.items())

    def rows(self, seqs: list[Sequence], pads: Items[int], base: int) -> Rows:
        """Create the rows of a new cache; they are published only while the model is unchanged."""
        layers = len(self.plan.placed) + len(self.plan.indexers)
        rows = Rows(self.kv, seqs, pads, base, layers=layers, trusted=self.trusted)
        rows.lengths = self._lengths()
        if isinstance(self.sparsifier, Press):
            columns = max(len(seq.tokens) + pad for seq, pad in rows.padded)
            rows.thinning = Pressing(self.sparsifier, columns)
        elif self.sparsifier is not None:
            rows.thinning = Thinning(self.sparsifier)
        return rows

    def _paged(
        self,
        found: AdmittedRows,
        call: ForwardCall,
        pads: list[int],
        restoring: Restoring | None = None,
        cache: Any = None,
    ) -> PagedCache:
        """Make a paged cache over opened rows, in place of a native cache if one is given."""
        rows = self.rows(found.seqs, pads, found.base)
        rows.lengths = self._lengths(call, pads)
        if restoring is None:
            restoring = Restoring(self.kv, rows.seqs, pads, call.types)
        rows.by_column = call.positions is None and any(pads)
        if (shifts := call.shifts(pads)) is not None:
            rows.shifts = shifts[0, :, -1]
            if (shifts[:, :, -1] != rows.shifts).any():
                rows.disable_publishing()  # the prompt ends within an image
        rows.restoring, rows.uneven = restoring or None, bool(restoring)
        if call.wants_weights or (self.plan.stateful and any(pads)):
            rows.disable_publishing()
        if cache is None:
            paged = PagedCache(rows, self.plan, self)
        else:
            paged = PagedCache.take_over(cache, rows, self.plan, self)
            paged.fresh = True
        paged.options = {} if self.names.encoder else call.condition
        paged.load_states(found.states)
        self.hold(paged)
        return paged

    def _save_states(self) -> None:
        """Save the recurrent states of caches that are in no forward but still referenced."""
        for cache in self._held() if self.plan.stateful else ():
            with exclusive(cache):
                if self._rests(cache):
                    cache.recurrent.save()

    # ---- later forwards

    def _go_on(self, cache: PagedCache, given: dict[str, Any], *, training: bool) -> dict[str, Any]:
        """Begin a later forward over a paged cache; return the arguments to compute."""
        rows = cache.rows
        rows.alive()
        if rows.step is not None or not rows.forwards:
            cache.fail()
        cache.audits = cache.decoding = cache.answer = None
        steady = self.identity.steady(self._model())
        if not steady and not rows.blind:
            rows.disable_publishing()  # the model has changed: new pages would need another name
        self._watch(cache)
        call = ForwardCall(self.names, given, cache.form)
        cache.form = call.form
        if call.columns == 0:
            return given
        if self.names.encoder:
            check_paired(call)
        if rows.restoring is not None:
            fill = Fill([seq.tokens for seq in rows.seqs], {}, {})
            nested = Nested(self, call, rows.restoring.types, fill)
            rows.restoring.meet(nested, front=not training, columns=rows.base)
            cache.audits = nested if self.kv.config.audit else None
        if call.rows != len(rows.seqs):
            cache.expand(call.rows)
        if rows.forwards == 0:
            cache.follow()
        whole = departs = False
        if rows.lost or not rows.forwards:
            call, whole, departs = self._without_known(cache, call)
        # For a decode step, the result decides whether a graph's answer and full pages are used.
        compare = rows.compare if rows.forwards and call.columns == 1 else rows.padded_by
        padded = compare(call.mask, rows.base + call.columns)
        odd = (
            training
            or not steady
            or departs
            or call.wants_weights  # some models compute otherwise then
            or bool((call.types or self.plan.uncounted) and self._odd_tokens(call, rows.base))
            or not (call.form or call.continues)
            or (call.positions is None and not self.plan.from_0)
            or (call.positions is None and not self.names.counts and rows.base and not whole)
            or not (
                self.names.encoder
                or not (call.condition or cache.options)
                or call.conditioned(cache.options)
            )
            or bool(modes())
            or torch.is_autocast_enabled()
            or torch.is_autocast_enabled("cpu")
            or padded is False
        )
        if odd:
            rows.disable_publishing()
        if rows.thinning is not None and rows.thinning.due(rows, call):
            base = rows.base
            cache.thin()
            if rows.base > base:
                call = ForwardCall(self.names, call.skip(rows.base - base))
        if rows.forwards and rows.prefilling and not rows.blind:
            rows.prefilling = call.columns >= self.kv.page_size
            if rows.prefilling:
                call = ForwardCall(self.names, extend(cache, call))
        if call.ids is None:
            rows.disable_publishing()
        else:
            rows.record_ids(call.ids, call.positions, None if isinstance(padded, bool) else padded)
        begun = self._begin(cache, call, call.columns, whole=whole)
        if begun and not odd:
            self._replay(cache, call)
        return call.given if begun or not whole else given

    def _without_known(
        self, cache: PagedCache, call: ForwardCall
    ) -> tuple[ForwardCall, bool, bool]:
        """Remove known columns; return the forward, and whether it is whole, whether it departs.

        A whole prompt that is not the one that its cache was made for is computed from the start.
        """
        rows = cache.rows
        left, whole = without_known(rows, call)
        departs = not rows.forwards and (whole or not rows.base) and self._departs(rows, call)
        if departs and whole:
            cache.empty()
        return call if departs and whole else left, whole, departs

    def _departs(self, rows: Rows, call: ForwardCall) -> bool:
        """Return whether a prompt passed whole is not the one that its rows are named by."""
        pads = rows.pads.tolist()
        if self._obstacle(call, pads):
            return True
        with suppress(TypeError):  # an input without a digest
            prompts = call.prompts(pads, by_place=self.alike_rows(call.rows) != "alike")
            for seq, prompt in zip(rows.seqs, prompts, strict=False):
                told = {s for s in seq.salts if s.position < len(prompt.tokens)} - {_LONG}
                if told.symmetric_difference(prompt.salts):
                    return True
            return False
        return True

    # ---- captured decode steps

    def _repeats(self, cache: PagedCache, call: ForwardCall) -> bool:
        """Return whether a forward asks for the last logits of each row, and for nothing else."""
        rows, given = cache.rows, call.given
        alone = call.rows == 1 and not (rows.uneven or rows.pads.any())
        last = call.columns == 1 or (alone and call.keep == 1)
        if rows.taken and not all(place.in_pages for place in self.plan.placed.values()):
            self.kv.graphed["eager"] = "the model computes with keys and values itself"
        asked = call.asks("output_hidden_states", "output_router_logits")
        places = call.positions
        return not (
            not last
            or asked
            or False in (given.get("return_dict"), given.get("use_cache"))
            or rows.taken
            or rows.wants_weights
            or rows.thinning is not None
            or cache.skips
            or cache.audits is not None
            or call.form is None
            or not isinstance(given.get("logits_to_keep", 0), int)
            or not isinstance(call.ids, torch.Tensor)
            or not isinstance(places, torch.Tensor)
            or places.shape != call.ids.shape
        )

    def _replay(self, cache: PagedCache, call: ForwardCall) -> None:
        """Compute the logits of a beginning forward by a graph, or note its inputs for `_learn`."""
        if self.graphs is None or not isinstance(cache, PagedCache):  # the cache became native
            return
        if not self._repeats(cache, call):
            return
        rows = cache.rows
        assert rows.step is not None and call.ids is not None and call.positions is not None
        logits = self.graphs.replay(rows.step, call.ids, call.positions)
        if logits is None or self._answers is None:
            cache.decoding = call.ids, call.positions
        elif rows.agree():  # its result was requested before the graph was launched
            rows.updated = rows.layers
            found = self._answers(logits=logits.unsqueeze(1), **{self.names.cache: cache})
            cache.answer = rows.step, found

    def _learn(self, cache: PagedCache, output: Any) -> None:
        """Record a decode step that the model ran without a graph."""
        decoding, cache.decoding = cache.decoding, None
        if decoding is None or cache.rows.step is None or self.graphs is None:
            return
        said = {name for name, value in vars(output).items() if value is not None}
        if said != {"logits", self.names.cache} or output.logits.shape[1] != 1:
            return
        self._answers = type(output)
        self.graphs.record_step(cache.rows.step, *decoding, output.logits[:, 0])

    def _begin(
        self, cache: PagedCache, call: ForwardCall, columns: int, *, whole: bool = True
    ) -> bool:
        """Begin the rows' step; False if the cache is native and empty now.

        Args:
            cache: The cache.
            call: The forward.
            columns: Columns of the step.
            whole: The forward holds all tokens of its rows, so a native cache could serve it.
        """
        cache.rows.wants_weights = call.wants_weights
        try:
            try:
                cache.rows.plan(columns)
            except CapacityError:
                if not self.kv.config.overflow:
                    raise
                self.proof.finish()  # unproven pages may not be written to a disk
                cache.rows.plan(columns)
        except CapacityError as error:
            lacks = any(seq.away or seq.dropped for seq in cache.rows.seqs)
            if lacks and not whole:
                raise  # a native cache cannot continue without the tokens that are away or dropped
            kept = cache.rows.land() and not lacks
            if not whole:
                refuse_lost(cache.rows)
            self._refuse(error.problem, "capacity")
            if not kept:
                cache.empty()
            cache.give_up()
            return kept
        return True

    # ---- identity

    def refresh(self, *, private: bool = True) -> None:
        """Detect changes of the model, and from then on name its pages after the changed model.

        Args:
            private: Serve a foreign model from private pages, too: test whether that works.

        Raises:
            UnsupportedModelError: The changed model cannot be served.
        """
        if (model := self.model) is None:
            return
        self.retract()
        with self._lock:
            if self._untried or not self.identity.same(model):
                self._reread(model, anew=False)
            if not self.proof.read():
                self._reread(model, anew=True)
            if private and self.identity.foreign and not self.identity.compiled:
                self._try(model)
            if self._problem:
                raise UnsupportedModelError(self._problem, "Use the model without FlowKV")

    def _reread(self, model: torch.nn.Module, *, anew: bool) -> None:
        self._problem, fresh = "", Names(model)
        self.names.placeholders, self.names.configs = fresh.placeholders, fresh.configs
        drop_unproven(self.kv)  # the model may have changed between the forwards of a page
        untried, self._untried = self._untried, True  # until nothing can interrupt it any more
        try:
            moved = (placed := self.identity.places(model)) != self._planned
            if moved:
                self.plan, self._planned = self.planned(), placed
            changed = self.identity.read(model, anew=anew) or untried
        except UnsupportedModelError as error:
            self._problem = error.problem
            return
        # The time of an uncounted write is unknown, and after a counted one earlier uncounted
        # writes cannot be found any more: in both cases all unproven pages are dropped.
        if anew or untried or self.identity.weights_changed:
            self.proof.reject()
        if changed:
            self._rename()
        if (changed or moved) and not (self.identity.compiled or self.identity.foreign):
            self._try(model)
        self._untried = False

    def tried(self) -> None:
        """Record that the model was tested as it is now, and is served as planned."""
        self._reads = self.switch.reason
        self._judge("")

    def _judge(self, problem: str) -> None:
        """Record how the model can be served: why not at all, why dense, which layers in pages."""
        pages = frozenset(i for i, place in self.plan.placed.items() if place.in_pages)
        self._verdicts[self.identity.kind] = problem, self.switch.reason, pages

    def _try(self, model: torch.nn.Module) -> None:
        """Test the changed model as `attach` did, once for each kind of computation."""
        kind = self.identity.kind
        if kind not in self._verdicts:
            self.switch.reason, problem = self._reads, ""
            for place in self.plan.placed.values():
                place.in_pages, place.contradicted = not self._reads, False
            if self.identity.attends(model) != self._attends:
                self.read_dense("its attention functions have changed since FlowKV was attached")
            try:
                with unwritten(model):
                    with self.aside():
                        long = self.identity.suspect
                        found = probe(model, self.kv.page_size, in_pages=False, long=long)
                    self.plan.by_column |= found.plan.by_column
                    self.plan.uncounted |= found.plan.uncounted
                    settle(model, self.kv, found, self)
            except UnsupportedModelError as error:
                problem = error.problem
            self._judge(problem)
        self._problem, self.switch.reason, pages = self._verdicts[kind]
        for index, place in self.plan.placed.items():
            place.in_pages = index in pages

    def retract(self) -> None:
        """Erase the pages of a model that was seen to change during a forward.

        A change that was undone within an earlier forward left no trace, so all its names go.
        """
        if not self._doubted or self.kv.closed:
            return
        self._doubted = False
        with suppress(FlowKVError):  # pages that a tier cannot erase are not found by this door
            for name in self._names_used:
                forget_name(self.kv, name)

    def read_dense(self, note: str) -> None:
        """Read all layers as dense tensors from now on, for the reason `note`."""
        self.switch.reason = note
        for placed in self.plan.placed.values():
            placed.in_pages = False

    def _rename(self) -> None:
        name_pages(self.kv, self.plan, self.identity)
        self._names_used.add(self.kv.namespace)
        self.proof.watch()

    def planned(self) -> ModelPlan:
        """Return the layers of the model as it is now, read as they were."""
        in_pages = any(placed.in_pages for placed in self.plan.placed.values())
        with self.aside():
            return probe(self.model, self.kv.page_size, in_pages=in_pages).plan

    def unchanged(self, *, full: bool) -> bool:
        """Return whether the model still has the computation that its name covers."""
        return (self.identity.same if full else self.identity.steady)(self.model)

    def vouches(self) -> bool:
        """Return whether the model is still as it was named; may be called in a finalizer."""
        model, identity = self._model(), self.identity
        try:  # another thread may name the model anew meanwhile
            same = model is not None and identity.same(model) and identity.same_content()
            return same and not self._naming
        except Exception:
            return False

    def trusted(self, rows: Rows | None = None) -> bool:
        """Return whether the model still has the name under which pages will be published."""
        if (model := self.model) is None or self.identity.foreign:
            return False
        if not self.identity.same(model):
            if not self._lock.acquire(blocking=False):  # possibly in a finalizer
                return False
            try:
                self._naming = True  # until no open row has the old name
                blame = rows is None or not rows.forwards or bool(self.identity.own)
                kept = self.identity.kept(model, blame=blame)
                self._doubted |= not kept and bool(self.identity.foreign)
                self._untried |= not kept
                if not kept and not self.kv.closed:
                    self._rename()
            except UnsupportedModelError as error:
                self._problem, kept = error.problem, False
            finally:
                self._naming = False
                self._lock.release()
            if not kept:
                return False
        return self.identity.same_content()

    def _refuse(self, problem: str, code: str = "") -> None:
        warn(
            self.kv,
            f"native: {code or problem}",
            f"FlowKV leaves this call to the model's own cache: {problem}. The result is the same, "
            "nothing is reused.",
        )


def _wants_grad(door: ForwardHook, model: Any, given: Mapping[str, Any]) -> bool:
    """Return whether gradients may flow through a forward, if enabled: pages pass none on."""
    return (
        door.identity.suspect  # foreign code may hold parameters of its own
        or any(p.requires_grad for p in model.parameters())
        or any(isinstance(v, torch.Tensor) and v.requires_grad for v in given.values())
    )


def _answering(forward: Any, cache_name: str) -> Any:
    """Wrap a model's forward: return the answer of a graph if there is one, else call it."""

    @wraps(forward)
    def answered(*args: Any, **given: Any) -> Any:
        cache = given.get(cache_name)
        if isinstance(cache, PagedCache) and cache.answer is not None:
            (step, found), cache.answer = cache.answer, None
            if step is cache.rows.step:
                return found
        return forward(*args, **given)

    answered.__module__ = __name__
    answered.around, answered.captures = forward, True  # type: ignore[attr-defined]
    return answered


def _state(held: weakref.ref[ForwardHook], whole: bool) -> object:
    door = held()
    model = None if door is None else door._model()
    return None if door is None or model is None else door.identity.state(model, whole=whole)


def _packed(held: weakref.ref[ForwardHook], call: PackedCall, step: Step) -> Any:
    door = held()
    assert door is not None
    keep = step.last if isinstance(step, StaticStep) and step.shape.new > 1 else None
    return call(step, door.plan, keep)


def name_pages(kv: KV, plan: ModelPlan, identity: Identity) -> None:
    """Bind a cache to the name of a model; the pages of a foreign model stay private."""
    bind(kv, plan.geometry, identity.namespace, private=identity.foreign)
    if identity.foreign:
        warn(
            kv,
            "foreign",
            "FlowKV shares nothing of this model: its name cannot cover all that it computes with "
            f"({identity.foreign}). The result is the same, nothing is reused. Remove that from "
            'the model, or attach it with revision="...", a text that you change whenever it '
            "computes something else.",
        )


@contextmanager
def unwritten(model: torch.nn.Module) -> Iterator[None]:
    """Restore the attributes and buffers of all modules afterwards, for a test of the model."""
    spaces = [space for m in model.modules() for space in (m.__dict__, m._buffers)]
    before = [(space, dict(space)) for space in spaces]
    try:
        yield
    finally:
        for held, kept in before:
            # The hooks of this mark stay; scripted buffers do not iterate.
            for name in {*held.keys()} - {*kept, "_output_capturing_hooks_installed"}:
                del held[name]
            for name, value in kept.items():
                if name not in held or held[name] is not value:  # scripted buffers cannot `update`
                    held[name] = value


def warn_inherited(kv: KV) -> None:
    """Warn once, in a forked child, that the cache belongs to the parent process."""
    warn(
        kv,
        "native: forked",
        "FlowKV's cache belongs to the parent process; this child uses the model's own. The result "
        "is the same, nothing is reused. flowkv.attach(model, ...) in the child gives it a cache.",
    )
