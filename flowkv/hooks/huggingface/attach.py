"""`attach` gives a Hugging Face model a FlowKV cache; `verify` compares it with the model's own."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal, get_args

import torch
import transformers

from flowkv.cache import ahead
from flowkv.cache.kv import KV, bind, follow, warn
from flowkv.core.config import format_size
from flowkv.core.errors import (
    ConfigError,
    FlowKVError,
    StateError,
    UnsupportedModelError,
    experimental,
)
from flowkv.core.progress import during
from flowkv.hooks.huggingface.attention import Switch
from flowkv.hooks.huggingface.blend import Blending
from flowkv.hooks.huggingface.cache import BY_COLUMN
from flowkv.hooks.huggingface.calibrate import calibrating
from flowkv.hooks.huggingface.door import COMPILED, ForwardHook, name_pages, warn_inherited
from flowkv.hooks.huggingface.inputs import Names
from flowkv.hooks.huggingface.press import Press, check_thinnable, made_pruner
from flowkv.hooks.huggingface.probe import (
    encoder_inputs,
    native_cache,
    ordinary_tokens,
    pair,
    probe,
    quiet,
    rows_alike,
    settle,
)
from flowkv.hooks.huggingface.remember import remember
from flowkv.hooks.huggingface.restore import NOTHING
from flowkv.hooks.huggingface.versions import DynamicCache, PreTrainedModel
from flowkv.naming.identity import Identity
from flowkv.observe.events import Bus, RowsRead, WeightsRead
from flowkv.policy.blend import BlendRule, make_blend_rule
from flowkv.policy.sparsify import Sparsifier
from flowkv.tensors.embedding import AttachedEmbedding
from flowkv.tensors.weights import StreamedWeights

Reads = Literal["auto", "dense"]

_log = logging.getLogger("flowkv")

_LOCK = threading.Lock()
_ATTACHED: weakref.WeakKeyDictionary[torch.nn.Module, ForwardHook] = weakref.WeakKeyDictionary()
_DOORS: weakref.WeakKeyDictionary[KV, weakref.ref[ForwardHook]] = weakref.WeakKeyDictionary()


def attach(
    model: Any,
    *,
    reads: Reads = "auto",
    revision: str = "",
    memo: str | Sequence[str] | None = None,
    sparsify: str | Sparsifier | Any | None = None,
    reuse: Literal["exact", "blend", "edits"] = "exact",
    recompute: str | float | BlendRule = "values",
    max_kl: float | None = None,
    **config: Any,
) -> KV:
    """Attach a prefix cache to a model. `model.generate(...)` and everything else stay as they are.

    Prompts that begin like earlier ones, of this process or (with a disk) of another, are not
    computed again. In fp32 with `codec="raw"` the tokens are those of the model's own cache. Calls
    that cannot be served (see `flowkv.verify`) use the model's own cache, with one warning.

    Args:
        model: A transformers model, possibly wrapped by adapters or by `torch.compile`.
        reads: "auto" reads pages in place, wherever the model's attention allows it; "dense"
            gathers K and V for the model's own attention.
        revision: Your name for everything in the model that FlowKV cannot name: modules, hooks and
            functions of your own, patched functions, objects. Without it, such a model shares no
            pages. Change it whenever the model computes something else.
        memo: Places, as "host:256MiB", that keep the results of the model's encoders (of images, of
            sound, or of an encoder-decoder): known rows are not computed again (`flowkv.memo`).
        sparsify: Experimental: which tokens of a prompt stay once it is computed, as "snapkv:0.5",
            or a `flowkv.policy.sparsify.Sparsifier`, which may keep another share in each layer, or
            a press of kvpress, also by name, as "kvpress.SnapKVPress:0.5".
            Dropped tokens are lost to the answer: see the guide on dropping tokens.
        reuse: "exact", or, experimental, "blend": documents that were passed to `KV.learn` are
            reused at any position in a prompt. The answer is near the exact one: see the guide
            on documents. Or "edits": spans of earlier prompts and answers of the same tenant are,
            as in conversations with cleared tool results.
        recompute: With these, which of their tokens are computed again: a share, as 0.15, or a
            rule by name, as "first:16".
        max_kl: Largest estimated divergence of such a prompt, in nats; above it, it is computed.
        **config: Fields of `flowkv.Config`, `tiers=` and `policy=` as `flowkv.KV` takes them.

    Returns:
        The cache. `kv.detach()` restores the model.

    Raises:
        ConfigError: A field is unknown, `model` is no transformers model, or its tokens cannot be
            dropped.
        StateError: The model has a cache already.
        StoreError: A directory cannot be used.

    Example:
        >>> kv = flowkv.attach(model, disk="./kv:1GiB")
        >>> answer = model.generate(**inputs)
    """
    compiled, model = hasattr(model, "_orig_mod"), base_model(model)
    sparsifier = None if sparsify is None else made_pruner(sparsify)
    if sparsifier is not None:
        experimental("attach(sparsify=)", "it is new, and approximate by nature")
    if reads not in get_args(Reads):
        raise ConfigError(f"reads={reads!r}", 'Pass "auto" or "dense"')
    if reuse not in ("exact", "blend", "edits"):
        raise ConfigError(f"reuse={reuse!r}", 'Pass "exact", "blend" (documents) or "edits"')
    rule = None if reuse == "exact" else make_blend_rule(recompute)
    if rule is not None:
        experimental(f'attach(reuse="{reuse}")', "it is new, and approximate by nature")
    if max_kl is not None and not (rule and max_kl > 0):
        raise ConfigError(f"max_kl={max_kl}", 'Pass nats above 0, with reuse="blend" or "edits"')
    if config.get("cold"):
        experimental("attach(cold=)", "it is new, and approximate by nature")
    begun_s = time.monotonic()
    with _LOCK:
        if model in _ATTACHED and _ATTACHED[model].kv.inherited:
            _ATTACHED[model].kv.detach()
        if model in _ATTACHED:
            raise StateError("the model has a FlowKV cache already", "Call kv.detach() before")
        kv = KV(**config)
        try:
            if memo is not None:
                remember(model, kv, memo)
            share_of = None if sparsifier is None else sparsifier.share_of
            door = install(model, kv, reads=reads, share_of=share_of, revision=revision)
            if sparsifier is not None:
                check_thinnable(door, sparsifier, reads)
                door.sparsifier = sparsifier
            if isinstance(sparsifier, Press):
                sparsifier.settle(door)
                follow(kv, unlearn=partial(sparsifier.unlearn, kv))
            if rule is not None:
                door.blending = Blending(door, rule, edits=reuse == "edits", max_kl=max_kl)
                door.blending.follow(kv)
            if kv.config.cold:
                follow(kv, calibrate=calibrating(door))
            _hear(model, kv)
            follow(kv, detach=partial(_forget, weakref.ref(model)))
            _ATTACHED[model] = door
            _log.info(
                "%s attached in %.1f s: %s of weights, layers read by %s, pages %s",
                type(model).__name__,
                time.monotonic() - begun_s,
                format_size(door.identity.n_bytes),
                " and ".join(sorted(set(_ways(door)))),
                "not shared" if door.identity.foreign else "shared",
            )
            ahead.begin(kv.geometry, kv.config.codec, _query_heads(model))
            if compiled:
                door.warn_compiled("torch.compile(model), called in place of the model,")
        except UnsupportedModelError as error:
            warn(kv, "unsupported", f"FlowKV leaves the model to its own cache: {error}")
        except BaseException:
            kv.close()
            raise
        return kv


def _query_heads(model: Any) -> int:
    """Return the number of query heads that a model's configuration states, or 0 without one."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 0)
    return heads if isinstance(heads, int) else 0


def _hear(model: torch.nn.Module, kv: KV) -> None:
    """Forward reads of the model's attached weights and embeddings to the event bus of a cache."""
    found = dict[int, Bus]()
    for module in model.modules():
        for called in map(vars(module).get, ("forward", "_call_impl")):
            by = getattr(getattr(called, "func", called), "__self__", None)
            if isinstance(by, (AttachedEmbedding, StreamedWeights)) and by.bus is not kv.bus:
                found[id(by.bus)] = by.bus
    for bus in found.values():
        follow(kv, close=bus.subscribe(kv.bus.emit, RowsRead, WeightsRead).close)


def install(
    model: Any,
    kv: KV,
    *,
    reads: Reads = "auto",
    share_of: Callable[[int], float] | None = None,
    revision: str = "",
) -> ForwardHook:
    """Probe a model, bind the cache to it, and install the door's hooks.

    Args:
        model: The model.
        kv: The cache.
        reads: See `attach`.
        share_of: Share of a prompt that a layer keeps; layers of one share form groups.
        revision: See `attach`.

    Raises:
        UnsupportedModelError: The model cannot be served from pages.
    """
    if model._compiled_call_impl is not None:
        remedy = "Use the model without FlowKV, or attach one that is not compiled"
        raise UnsupportedModelError(f"model.compile() {COMPILED}", remedy)
    switch = Switch(model)
    in_pages = not switch.reason
    for _ in range(2):
        with during("naming the model by its weights and code"):
            identity = Identity(model, kv.config.namespace, revision)
        modules, long = list(model.modules()), identity.suspect
        found = probe(model, kv.page_size, in_pages=in_pages, long=long, share_of=share_of)
        if list(map(id, modules)) == list(map(id, model.modules())):
            break  # else its first forward replaced modules, as BigBird's does: probe once more
    bind(kv, found.plan.geometry, identity.namespace)
    door = ForwardHook(model, kv, found.plan, identity, switch)
    follow(kv, detach=door.remove)
    door.install()
    identity.read(model)  # the first forward may have made attributes, which are settings, too
    try:
        with during("comparing answers through pages with the model's own"):
            settle(model, kv, found, door)
    except BaseException:
        door.remove()
        raise
    if reads == "dense" and in_pages:
        door.read_dense("reads='dense' was asked for")
    if kv.config.overflow:
        _check_overflow(door)
    _DOORS[kv] = weakref.ref(door)  # the model's hooks keep it
    identity.kept(model)
    name_pages(kv, found.plan, identity)
    door.tried()
    follow(kv, model=weakref.ref(model), prove=door.proof.finish, vouch=door.vouches)
    return door


def _check_overflow(door: ForwardHook) -> None:
    """Check that all layers of a model read pages in place, as `overflow=True` needs.

    Raises:
        ConfigError: Some layers do not.
    """
    dense = [index for index, placed in door.plan.placed.items() if not placed.in_pages]
    problem = door.switch.reason or (f"layers {_ranges(dense)} are read dense" if dense else "")
    if door.plan.stateful:
        problem = "some of its layers are recurrent"
    if problem:
        door.remove()
        raise ConfigError(
            f"overflow=True does not fit a model that cannot go on past its pool: {problem}",
            "Leave overflow out, or give the device pool enough bytes for the longest context",
        )


def make_cache(kv: KV, *args: Any, care: Mapping[str, Any] = NOTHING, **inputs: Any) -> Any:
    """Make a cache for one call of `generate`: an argument beside `**inputs`.

    This does what happens by itself in a forward of the attached model, for a tenant of choice. In
    a forked child it is a `DynamicCache`.

    Args:
        kv: The cache.
        *args: `input_ids`, if not by name.
        care: `tenant`, `session`, `lease` and `retain` for `KV.open`, as far as they are set.
        **inputs: The arguments of `generate`.

    Raises:
        ConfigError: The cache is attached to no model.
        StateError: The prompt cannot be named by its token ids.
    """
    found = _DOORS.get(kv)
    door = found() if found is not None else None
    if kv.inherited:
        warn_inherited(kv)
        model = None if door is None else door.model
        return DynamicCache() if model is None else native_cache(model)
    if door is None or not door.installed:
        raise ConfigError(
            "the cache is attached to no model",
            "Call flowkv.attach(model), or generate without a cache",
        )
    if args:
        inputs = {door.names.ids: args[0], **inputs}
    cache = door.open(inputs, care)
    cache.care = care
    return cache


def base_model(model: Any) -> Any:
    """Return the transformers model inside the wrappers of adapters and `torch.compile`.

    Raises:
        ConfigError: The object wraps no transformers model.
    """
    model = getattr(model, "_orig_mod", model)
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
    """Return the door of a model; None if it is not attached."""
    return _ATTACHED.get(model)


def _in_child() -> None:
    global _LOCK  # noqa: PLW0603 - the thread that held it does not exist in the child
    _LOCK = threading.Lock()
    if _ATTACHED:  # their probes began threads of OpenMP, for which torch would wait here
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_in_child)


# `verify`: does FlowKV give the same results on *this* model as the model's own cache?

_NEW = 8
_POOL = "512MiB"
_PAGE = 16


@dataclass(frozen=True)
class Comparison:
    """Comparison of one case with the model's own cache.

    Attributes:
        name: Name of the case.
        identical: Whether the tokens are the same.
        max_difference: Largest difference of any logit.
        reused: Tokens that were not computed again.
        tokens: Tokens of the prompts.
    """

    name: str
    identical: bool
    max_difference: float
    reused: int
    tokens: int


@dataclass(frozen=True)
class Report:
    """Result of `verify`. `print(report)` shows it as a small table.

    Attributes:
        model: Class of the model.
        layers: "pages", "dense", "state" or "none" for each decoder layer: how it is read.
        cases: The comparisons.
        reasons: Why the model is refused, or read otherwise than in pages.
        ok: Whether FlowKV serves the model and gives the same tokens.
    """

    model: str
    layers: tuple[str, ...] = ()
    cases: tuple[Comparison, ...] = ()
    reasons: tuple[str, ...] = ()
    ok: bool = False
    version: str = field(default_factory=lambda: transformers.__version__)

    @property
    def verdict(self) -> str:
        """Return the result as one sentence."""
        if not self.cases:
            return "refused: the model keeps its own cache"
        if not self.ok:
            return "NOT the same as the model's own cache: do not attach"
        reused = "reuses prefixes" if any(case.reused for case in self.cases) else "reuses nothing"
        ways = sorted({way for way in self.layers if way in ("pages", "dense")})
        return f"same tokens as the model's own cache; {reused}, reads {' and '.join(ways)}"

    @property
    def max_difference(self) -> float:
        """Return the largest difference of any logit, over all cases."""
        return max((case.max_difference for case in self.cases), default=0.0)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [f"{self.model}, transformers {self.version}"]
        for way in dict.fromkeys(self.layers):
            which = [i for i, found in enumerate(self.layers) if found == way]
            lines.append(f"  {way:<12} layers {_ranges(which)}")
        for case in self.cases:
            same = "same tokens" if case.identical else "OTHER TOKENS"
            lines.append(
                f"  {case.name:<12} {same}, {case.reused} of {case.tokens} tokens reused, "
                f"logits differ by at most {case.max_difference:.1e}"
            )
        lines += [f"  because {reason}" for reason in self.reasons]
        return "\n".join([*lines, f"  {self.verdict}"])


def verify(model: Any, *, tokens: int = 64) -> Report:
    """Run a short conversation and a padded pair through the model's own cache and through FlowKV.

    Works on attached models and on others, which are left as they were. Safe beside running
    generations.

    Args:
        model: A transformers model.
        tokens: Length of the first prompt.

    Returns:
        A report, which is true if FlowKV serves the model.

    Raises:
        ConfigError: `model` is no transformers model.

    Example:
        >>> bool(flowkv.verify(model))
        True
    """
    model = base_model(model)
    name = type(model).__name__
    with KV(gpu=_POOL, page_size=_PAGE) as kv:
        try:
            with _door(model, kv) as door:
                cases = tuple(_cases(model, door, max(tokens, 2 * _PAGE)))
                same = all(case.identical for case in cases)
                return Report(name, _ways(door), cases, tuple(_reasons(model, door)), same)
        except UnsupportedModelError as error:
            return Report(name, reasons=(error.problem,))
        except FlowKVError as error:
            return Report(name, reasons=(str(error),))


@contextmanager
def _door(model: Any, kv: KV) -> Iterator[ForwardHook]:
    """Yield a door for `kv`, beside the one that an attached model has."""
    with _LOCK:  # no other thread may attach the model meanwhile
        other = door_of(model)
        if other is None:
            yield install(model, kv)
            return
    plan = other.planned()
    identity = Identity(model)  # the temporary cache needs no user revision
    bind(kv, plan.geometry, identity.namespace, private=identity.foreign)
    yield ForwardHook(model, kv, plan, identity, other.switch)


def _ways(door: ForwardHook) -> tuple[str, ...]:
    ways = ["state" if spec.stateful else "none" for spec in door.plan.specs]
    for index, placed in door.plan.placed.items():
        ways[index] = "pages" if placed.was_read and placed.in_pages else "dense"
    return tuple(ways)


def _reasons(model: Any, door: ForwardHook) -> Iterator[str]:
    if door.identity.foreign:
        yield f"its pages are not shared: {door.identity.foreign}"
    if door.switch.reason:
        yield door.switch.reason
    elif any(not placed.was_read for placed in door.plan.placed.values()):
        yield "its attention needs more than keys, values and a causal mask"
    if door.plan.by_column:
        yield f"{BY_COLUMN}, so that padded batches are left to its own cache"
    with (door_of(model) or door).aside():
        alike = rows_alike(model, door.names, 2)
    if alike == "mixed":
        yield "the rows of a batch depend on each other, so that batches share no pages"
    if alike == "by place":
        yield (
            "its answer to a prompt depends on the row of the batch, so that pages are shared with "
            "the same row of equally large batches only"
        )


def _cases(model: Any, door: ForwardHook, tokens: int) -> Iterator[Comparison]:
    ids = ordinary_tokens(model, door.names, tokens + 2 * _NEW)
    first = ids[:, :tokens]
    with quiet(model):
        answer, case = _compare(model, door, "turn 1", first)
        yield case
        second = torch.cat([first, answer, ids[:, -_NEW:]], dim=1)
        _, case = _compare(model, door, "turn 2", second)
        yield case
        if not (door.names.encoder or door.plan.by_column):
            short = tokens // 2 + 3
            pad = second.shape[1] - short
            rows = torch.cat([second, second.roll(pad, 1)])
            mask = torch.ones_like(rows)
            mask[1, :pad] = 0
            yield _compare(model, door, "padded pair", rows, mask)[1]


def _compare(
    model: Any, door: ForwardHook, name: str, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, Comparison]:
    mask = torch.ones_like(ids) if mask is None else mask
    with (door_of(model) or door).aside():
        wanted, logits = _answer(model, door.names, ids, mask, native_cache(model), None)
    cache = door.open(_inputs(model, door.names, ids, mask))
    cache.care = {}
    try:
        with door.generating():
            found, others = _answer(model, door.names, ids, mask, cache, wanted)
        reused = cache.reused
    finally:
        cache.close()
    difference = float((logits - others).abs().max())
    return wanted, Comparison(name, torch.equal(wanted, found), difference, reused, int(mask.sum()))


def _answer(
    model: Any,
    names: Names,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: Any,
    forced: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return greedy tokens `[B, n]` and their logits; continue with `forced` tokens if given."""
    found, logits = [], []
    whole = pair(names, cache)
    more = {names.cache: whole, "use_cache": True, "logits_to_keep": 1}
    for step in range(_NEW):
        out = model(**_inputs(model, names, ids, mask, cache.get_seq_length(), **more))
        last = out.logits[:, -1].float()
        token = last.argmax(-1, keepdim=True)
        found.append(token)
        logits.append(last)
        chosen = token if forced is None else forced[:, step : step + 1]
        ids, mask = torch.cat([ids, chosen], 1), torch.cat([mask, torch.ones_like(chosen)], 1)
    return torch.cat(found, 1), torch.stack(logits, 1)


def _inputs(
    model: Any, names: Names, ids: torch.Tensor, mask: torch.Tensor, past: int = 0, **more: Any
) -> dict[str, Any]:
    """Return the arguments of a forward over the columns of a prompt behind the `past` ones."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, past:]
    given = {names.ids: ids[:, past:], names.mask: mask, names.positions: positions, **more}
    given |= encoder_inputs(model, names, len(ids))
    return {name: value for name, value in given.items() if name in names.parameters}


def _ranges(numbers: list[int]) -> str:
    """Return numbers as text with ranges, as "0-3, 7"."""
    spans = [list(span) for _, span in groupby(enumerate(numbers), lambda at: at[1] - at[0])]
    ends = [dict.fromkeys((span[0][1], span[-1][1])) for span in spans]
    return ", ".join("-".join(map(str, each)) for each in ends)
