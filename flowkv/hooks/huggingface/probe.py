"""Learns a model's geometry from a few tokens, and tests that pages give what its own cache gives.

The geometry comes from the native cache after one short forward (DESIGN D15). Then the same tokens
run through pages, in several forwards. That makes a list of supported models unnecessary: a model
whose attention is not what it seems is read dense, and one that does not go on from a cached prefix
at all never has anything reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from transformers.modeling_outputs import BaseModelOutput

from flowkv.cache.kv import KV
from flowkv.core.errors import FlowKVError, UnsupportedModelError
from flowkv.hooks.huggingface.cache import (
    ModelPlan,
    PagedCache,
    PagedLayer,
    configured_layers,
    place_layers,
    read_layers,
)
from flowkv.hooks.huggingface.inputs import Names
from flowkv.hooks.huggingface.versions import DynamicCache, EncoderDecoderCache

_PARTS, _LONG_PARTS = (7, 4, 1), (53, 42, 1)
"""Tokens of the forwards of a trial; the long ones where code of others takes part, which may do
something from some position on."""
_TOLERANCE, _HALF_TOLERANCE = 1e-2, 0.25
"""Relative L2 distance of logits: a wrong key or mask gives about 1, another order of additions
1e-6. In half precision near ties between experts fall otherwise, so there the median counts."""


_ROW_TOLERANCE, _HALF_ROW_TOLERANCE = 1e-5, 1e-2
"""The same between rows of one batch, which differ by the order of additions at most."""


Alike = Literal["alike", "by place", "mixed"]
"""Rows of a batch are answered as each alone, otherwise in another place or number of them, or they
look at each other."""


class Probe(NamedTuple):
    """The findings of a short forward.

    Attributes:
        plan: The layers.
        ids: `[1, T]` the tokens.
        logits: What the model answered with its own cache.
        parts: Tokens of each of the forwards that are to answer the same.
    """

    plan: ModelPlan
    ids: torch.Tensor
    logits: torch.Tensor
    parts: tuple[int, ...] = _PARTS


def probe(
    model: Any,
    page_size: int,
    *,
    in_pages: bool,
    long: bool = False,
    share_of: Callable[[int], float] | None = None,
) -> Probe:
    """Runs a few tokens through a model with its own cache.

    Args:
        model: The model.
        page_size: Tokens per page.
        in_pages: FlowKV's attention may read its layers in pages.
        long: Code of others takes part.
        share_of: See `place_layers`.

    Raises:
        UnsupportedModelError: It cannot be run so, or its layers cannot be paged.
    """
    specs = read_layers(model.config)
    names, parts = Names.of(model), _parts(model, long=long)
    try:
        with quiet(model):
            cache = native_cache(model)
            ids = ordinary_tokens(model, names, sum(parts))
            logits = _forward(model, names, ids, pair(names, cache))
    except FlowKVError:
        raise
    except Exception as error:  # whatever the model raises: it cannot be probed
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run a few tokens by themselves "
            f"({type(error).__name__}: {error})",
            "Use the model without FlowKV",
        ) from error
    if len(cache.layers) != len(specs):
        raise UnsupportedModelError(
            f"its cache has {len(cache.layers)} layers, its configuration {len(specs)}",
            "Use the model without FlowKV",
        )
    plan = place_layers(specs, cache.layers, page_size, in_pages=in_pages, share_of=share_of)
    plan.count = configured_layers(model.config)
    return Probe(plan, ids, logits, parts)


def _parts(model: Any, *, long: bool) -> tuple[int, ...]:
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    fits = not isinstance(most, int) or most > sum(_LONG_PARTS)
    return _LONG_PARTS if long and fits else _PARTS


def settle(model: Any, kv: KV, found: Probe, door: Any) -> None:
    """Tests pages on the model and takes back what does not hold.

    Raises:
        UnsupportedModelError: Nothing holds.
    """
    name, placed = type(model).__name__, door.plan.placed.values()
    agrees = paged_agrees(model, kv, found, door)
    if any(place.contradicted for place in placed):
        problem = f"the masks of {name} show other windows than its cache keeps"
    elif agrees:
        return
    else:
        with door.aside():
            continues = _continues(model, found, native_cache(model))
        problem = f"{name} does not continue from a cache as it answers in one pass"
        if continues and any(place.in_pages for place in placed):
            door.read_dense("its attention computes otherwise than it says")
            if paged_agrees(model, kv, found, door):
                return
            problem = f"{name} does not answer the same through pages"
    raise UnsupportedModelError(problem, "Use the model without FlowKV")


def paged_agrees(model: Any, kv: KV, found: Probe, door: Any) -> bool:
    """Whether the model answers the same through pages; its hooks must hang."""
    rows = door.rows([kv.open(found.ids[0], reuse=False)], [0], 0)
    rows.disable_publishing()
    cache = PagedCache(rows, door.plan, door)
    try:
        agrees = _continues(model, found, cache)
        layer = next((one for one in cache.layers if type(one) is PagedLayer), None)
        if agrees and layer is not None:
            layer.gather(layer.columns)  # compiled here, not in the first forward behind a prefix
        return agrees
    finally:
        cache.close()


def _continues(model: Any, found: Probe, cache: Any) -> bool:
    try:
        with quiet(model):
            names, first = Names.of(model), found.parts[0]
            whole = pair(names, cache)
            parts = found.ids.split(found.parts, dim=1)
            logits = torch.cat([_forward(model, names, part, whole) for part in parts], dim=1)
            # What the first one answered is not in question.
            return close(logits[:, first:], found.logits[:, first:], model.dtype)
    except Exception:  # some models accept single tokens only
        return False


def rows_alike(model: Any, names: Names, rows: int) -> Alike:
    """How a model treats the rows of a batch, where code of others takes part.

    The same prompt in every row is to be answered alike, as by itself, and whatever stands beside
    it. What raises is told by its place: it may want another number of rows.
    """
    try:
        with quiet(model):
            count = sum(_parts(model, long=True))
            ids = ordinary_tokens(model, names, count).expand(rows, -1).contiguous()
            beside = ids.roll(7, 1)
            beside[0] = ids[0]
            alike = _forward(model, names, ids)
            company = _forward(model, names, beside)
            alone = _forward(model, names, ids[:1])
    except Exception:
        return "by place"
    exact = model.dtype in (torch.float32, torch.float64)
    most = _ROW_TOLERANCE if exact else _HALF_ROW_TOLERANCE

    def far(found: torch.Tensor) -> bool:
        distance = (found - alike[:1]).flatten(1).norm(dim=1)
        return bool(distance.max() > most * alike[0].norm().clamp_min(1e-9))

    if far(company[:1]):
        return "mixed"
    return "by place" if far(alike) or far(alone) else "alike"


def native_cache(model: Any) -> DynamicCache:
    """The cache that the model would make itself."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def pair(names: Names, cache: Any) -> Any:
    """The cache as the model wants it: beside one for cross attention, if it has an encoder."""
    return EncoderDecoderCache(cache, DynamicCache()) if names.encoder else cache


def _forward(model: Any, names: Names, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    """What the model answers, without a cache unless one is given."""
    given = {names.ids: ids, "use_cache": cache is not None}
    if cache is not None:
        given[names.cache] = cache
    out = model(**given, **encoder_inputs(model, names, len(ids)))
    logits = out.logits if getattr(out, "logits", None) is not None else out[0]
    return logits.detach().float()  # type: ignore[no-any-return]


def encoder_inputs(model: Any, names: Names, rows: int) -> dict[str, Any]:
    """Something for a decoder to look at, if it looks at an encoder's output."""
    if not names.encoder:
        return {}
    width = getattr(model.config, "d_model", None) or model.config.hidden_size
    weight = model.get_input_embeddings().weight
    ramp = torch.linspace(-1, 1, 4 * width, device=execution_device(model)).view(1, 4, width)
    hidden = ramp.expand(rows, -1, -1).to(weight.dtype)
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden)}


def ordinary_tokens(model: Any, names: Names, count: int) -> torch.Tensor:
    """`[1, count]` ordinary token ids that do not repeat soon."""
    config = model.config.get_text_config(decoder=True)
    special = {
        value
        for source in (config, model.config)
        for name, value in vars(source).items()
        if name.endswith("_token_id") and isinstance(value, int)
    }
    size = int(config.vocab_size)
    ordinary = (n for n in range(size) if n not in special and n not in names.placeholders.values())
    pool = [n for n, _ in zip(ordinary, range(211), strict=False)]
    ids = [pool[(7 * i + i // len(pool) + 3) % len(pool)] for i in range(count)]
    return torch.tensor([ids], device=execution_device(model))


def execution_device(model: Any) -> torch.device:
    """Where a model takes its tokens: weights may be kept elsewhere until they are needed."""
    device: torch.device = model.get_input_embeddings().weight.device
    if device.type != "meta":
        return device
    for module in (model.get_input_embeddings(), *model.modules()):
        hook = getattr(module, "_hf_hook", None)  # of accelerate
        for one in getattr(hook, "hooks", (hook,)):
            found = getattr(one, "execution_device", None)
            if found is not None and torch.device(found).type != "meta":
                return torch.device(found)
    return torch.device("cpu")


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits `[1, T, V]` are the same, but for the order of additions.

    Args:
        found: float32.
        wanted: float32.
        dtype: What the model computes in.
    """
    distance = (found - wanted)[0].norm(dim=-1)
    relative = distance / wanted[0].norm(dim=-1).clamp_min(1e-9)
    if dtype in (torch.float32, torch.float64):
        return bool(relative.max() <= _TOLERANCE)
    return bool(relative.median() <= _HALF_TOLERANCE)


@contextmanager
def quiet(model: Any) -> Iterator[None]:
    """Inference, and afterwards every module in the mode that it was in."""
    # frozen TorchScript has no mode any more
    modes = [(m, m.training) for m in model.modules() if hasattr(m, "training")]
    modes = modes if any(training for _, training in modes) else []
    try:
        if modes:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
