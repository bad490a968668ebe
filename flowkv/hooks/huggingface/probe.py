"""Probe of a model's geometry, and a test that pages give the results of the model's own cache.

The geometry comes from the native cache after one short forward (DESIGN D15). Then the same tokens
run through pages, in several forwards. That makes a list of supported models unnecessary: a model
with any other attention than it declares is read dense, and a model that cannot continue from a
cached prefix is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
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
    repeated,
)
from flowkv.hooks.huggingface.inputs import Names
from flowkv.hooks.huggingface.versions import DynamicCache, EncoderDecoderCache

_PARTS, _STATE_PARTS, _LONG_PARTS = (7, 5, 4, 1), (7, 4, 3, 2, 1), (53, 42, 4, 3, 2, 1)
"""Tokens of the forwards of a trial; the long ones for models with foreign code, which may change
its behaviour at some position. Recurrent layers fail most easily on few tokens behind a state:
their convolutions look a few tokens back."""
_PAD = 3
"""Columns of padding in a trial."""
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 0.25
"""Distance of logits, in single precision relative to the largest logit: another order of additions
gives 1e-6. In half precision the relative L2 distance, where a wrong key or mask gives about 1;
near ties between experts may be broken otherwise, so that the median counts."""
_LOSSY_TOLERANCE = 1e-2
"""Distance of logits in single precision over pages that a lossy codec encodes."""
_ROW_TOLERANCE, _HALF_ROW_TOLERANCE = 1e-5, 1e-2
"""Relative L2 distance between rows of one batch: the order of additions at most differs."""


Alike = Literal["alike", "by place", "mixed"]
"""How a model treats the rows of a batch: as each alone; by their place or number; or so that a
row depends on the others."""


class EncoderOutput(BaseModelOutput):
    """Output of an encoder, with what models' own outputs have beside it."""

    router_logits = attention_mask = None


class Probe(NamedTuple):
    """Findings of a short forward.

    Attributes:
        plan: The layers.
        ids: `[1, T]` the tokens.
        logits: Logits of the model with its own cache.
        parts: Tokens of each of the forwards that must give the same logits.
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
    """Run a few tokens through a model with its own cache, and plan its layers.

    Args:
        model: The model.
        page_size: Tokens per page.
        in_pages: FlowKV's attention may read the layers in pages.
        long: Run more tokens, for a model with foreign code.
        share_of: See `place_layers`.

    Raises:
        UnsupportedModelError: The model cannot be run so, or its layers cannot be paged.
    """
    specs = read_layers(model.config)
    names, parts = Names(model), _parts(model, long=long)
    try:
        with quiet(model):
            cache = native_cache(model)
            ids = ordinary_tokens(model, names, sum(parts))
            logits = _forward(model, names, ids, pair(names, cache))
        specs += repeated(specs, cache.layers)
        if len(cache.layers) != len(specs):
            raise UnsupportedModelError(
                f"its cache has {len(cache.layers)} layers, its configuration {len(specs)}",
                "Use the model without FlowKV",
            )
        plan = place_layers(specs, cache.layers, page_size, in_pages=in_pages, share_of=share_of)
        plan.count = configured_layers(model.config)
        with_positions = _try_positions(model, plan, names, ids, cache)
    except FlowKVError:
        raise
    except Exception as error:  # a model may raise anything: then it cannot be probed
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run a few tokens by themselves "
            f"({type(error).__name__}: {error})",
            "Use the model without FlowKV",
        ) from error
    parts = _STATE_PARTS if parts == _PARTS and plan.stateful else parts
    return Probe(plan, ids, logits if with_positions is None else with_positions, parts)


def _try_positions(
    model: Any, plan: ModelPlan, names: Names, ids: torch.Tensor, plain: Any
) -> torch.Tensor | None:
    """Note in a plan whether a model counts positions from 0, and whether padding changes its keys.

    Args:
        model: The model.
        plan: Its layers.
        names: The names of its arguments.
        ids: `[1, T]` tokens.
        plain: Cache of the tokens, without positions unless the model needs them.

    Returns:
        The logits of a forward with positions, if there was one.
    """
    takes = names.positions in names.parameters
    asked, masks = takes and names.counts, names.mask in names.parameters
    names.counts &= not asked  # the forwards below pass positions
    padded = None if plan.stateful or not masks else _padded(model, names, ids, _PARTS[:1])
    exact = asked and not _is_half(model.dtype)
    if padded and exact and _same_keys(plan, plain, padded):
        return None
    given, logits = plain, None
    if asked:
        given = native_cache(model)
        with quiet(model):  # which draws the same random numbers again
            logits = _forward(model, names, ids, pair(names, given))
        plan.from_0 = _same_keys(plan, plain, given)  # no addition differs
    if not plan.stateful:  # no padded row of these is reused
        if not takes:  # rows share pages with rows of equal padding
            given = padded and _padded(model, names, ids)
        alike = padded and given and _same_keys(plan, given, padded, model.dtype)
        plan.by_column |= not alike
    if not takes:
        plan.uncounted = frozenset(
            token for token in _pad_tokens(model) if not _counted(model, plan, names, ids, token)
        )
    return logits


def _pad_tokens(model: Any) -> set[int]:
    """Return the pad tokens that a model's settings name."""
    found = (getattr(c, "pad_token_id", None) for c in (model.config, model.generation_config))
    text = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    return {token for token in (*found, text) if isinstance(token, int) and token >= 0}


def _counted(model: Any, plan: ModelPlan, names: Names, ids: torch.Tensor, token: int) -> bool:
    """Return whether tokens behind an unmasked pad token have the same keys over a cache.

    Some models make positions from the tokens of one forward (Fairseq's, as SeamlessM4T). Tested in
    single precision: a step of one position is near the rounding of half precision.
    """
    ids = ids.clone()
    ids[:, 1] = token
    with in_single_precision(model):
        whole, cut = (_cached(model, names, ids, cuts) for cuts in ((), _PARTS[:1]))
    return bool(whole and cut and _same_keys(plan, whole, cut))


def _same_keys(plan: ModelPlan, some: Any, others: Any, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether two caches have the same last keys: positions show in them, if not in logits.

    Some models count from another number than `generate` (RoBERTa, Kosmos-2.5).
    """
    for index in plan.placed:
        a, b = (c.layers[index].keys.float().transpose(1, 2).flatten(2) for c in (some, others))
        n = max(min(a.shape[1], b.shape[1]) - _PAD, 1)  # padding may have any keys
        if not close(a[:, -n:], b[:, -n:], dtype):
            return False
    return True


def _padded(model: Any, names: Names, ids: torch.Tensor, cuts: tuple[int, ...] = ()) -> Any:
    """Return a cache of tokens behind padding, as `_cached`."""
    ids = torch.cat([ids[:, :_PAD], ids], 1)
    return _cached(model, names, ids, tuple(_PAD + cut for cut in cuts), _PAD)


def _cached(
    model: Any, names: Names, ids: torch.Tensor, cuts: tuple[int, ...] = (), pad: int = 0
) -> Any:
    """Return a cache of tokens after a forward up to each cut and to the end.

    None if the model raises. The first `pad` columns are padding.
    """
    with quiet(model), suppress(Exception):  # a model may raise anything
        cache, at = native_cache(model), 0
        whole = pair(names, cache)
        for part in ids.tensor_split(list(cuts), dim=1):
            _forward(model, names, part, whole, at, pad=pad)
            at += part.shape[1]
        return cache
    return None


def _parts(model: Any, *, long: bool) -> tuple[int, ...]:
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    fits = not isinstance(most, int) or most > sum(_LONG_PARTS)
    return _LONG_PARTS if long and fits else _PARTS


def settle(model: Any, kv: KV, found: Probe, door: Any) -> None:
    """Test the model through pages, and read its layers dense if attention over pages fails.

    Raises:
        UnsupportedModelError: The model does not give the same logits in any way.
    """
    name, placed = type(model).__name__, door.plan.placed.values()
    door.names.counts &= found.plan.from_0
    problem = f"{name} does not continue from a cache as it answers in one pass"
    with door.aside():
        proven = _states_go_on(model, found, door.names)
    if proven is False:
        raise UnsupportedModelError(problem, "Use the model without FlowKV")
    agrees = paged_agrees(model, kv, found, door)
    if any(place.contradicted for place in placed):
        problem = f"the masks of {name} have other windows than its cache"
    elif agrees:
        return
    else:
        counts = door.names.counts
        with door.aside():
            continues = _goes_on(model, found, door.names)
        if counts and not door.names.counts and paged_agrees(model, kv, found, door):
            return
        if continues and any(place.in_pages for place in placed):
            door.read_dense("its attention differs from the one that its layers declare")
            if paged_agrees(model, kv, found, door):
                return
            problem = f"{name} does not give the same answers through pages"
    raise UnsupportedModelError(problem, "Use the model without FlowKV")


def _states_go_on(model: Any, found: Probe, names: Names) -> bool | None:
    """Return whether recurrent layers continue from their state, tested in single precision.

    In half precision a lost end of a convolution is as small as rounding. None if the test is not
    needed, or cannot be run.
    """
    if not found.plan.stateful or not _is_half(model.dtype):
        return None
    with quiet(model), in_single_precision(model):
        try:
            found = found._replace(logits=_forward(model, names, found.ids))
        except Exception:  # parts of the model are bound to a dtype
            return None
        return _goes_on(model, found, names)


def _goes_on(model: Any, found: Probe, names: Names) -> bool:
    """Return whether a model continues from its own cache; note whether it needs positions."""
    if _continues(model, found, native_cache(model), names):
        return True
    told = names.positions in names.parameters and names.counts
    if told:  # some models count from 0 again behind a cache; `generate` passes positions
        names.counts = False
        told = _continues(model, found, native_cache(model), names)
        names.counts = not told
    return told


def paged_agrees(model: Any, kv: KV, found: Probe, door: Any) -> bool:
    """Return whether the model gives the same logits through pages; its hooks must be installed."""
    rows = door.rows([kv.open(found.ids[0], reuse=False)], [0], 0)
    rows.disable_publishing()
    cache = PagedCache(rows, door.plan, door)
    release = cache.close  # the cache loses this method if it becomes native
    try:
        most = _TOLERANCE if kv.config.codec == "raw" else _LOSSY_TOLERANCE
        agrees = _continues(model, found, cache, door.names, most)
        layer = next((one for one in cache.layers if type(one) is PagedLayer), None)
        if agrees and layer is not None:
            layer.gather(layer.columns)  # compiles it before the first forward behind a prefix
        return agrees
    finally:
        release()


def _continues(
    model: Any, found: Probe, cache: Any, names: Names, most: float = _TOLERANCE
) -> bool:
    first, at, logits = found.parts[0], 0, []
    try:
        with quiet(model):
            whole = pair(names, cache)
            for part in found.ids.split(found.parts, dim=1):
                logits.append(_forward(model, names, part, whole, at))
                at += part.shape[1]
            # The logits of the first forward do not depend on a cache.
            return close(torch.cat(logits[1:], dim=1), found.logits[:, first:], model.dtype, most)
    except Exception:  # some models accept single tokens only
        return False


@contextmanager
def in_single_precision(model: torch.nn.Module) -> Iterator[None]:
    """Replace half-precision parameters by float32 copies, those of a block while it runs.

    Args:
        model: The model, which has its own parameters again afterwards, the same objects.
    """
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    blocks = [block for one in lists for block in one]
    inner = {id(m) for block in blocks for m in block.modules() if m is not block}
    blocks = list({id(block): block for block in blocks if id(block) not in inner}.values())
    inside = {id(m) for block in blocks for m in block.modules()}
    kept = dict[int, list[Any]]()

    def widen(block: Any, *_: Any) -> None:
        kept[id(block)] = _widened(block.modules())

    def restore(block: Any, *_: Any) -> None:
        for space, name, value in kept.pop(id(block), ()):
            space[name] = value

    rest = _widened([m for m in model.modules() if id(m) not in inside])
    handles = [block.register_forward_pre_hook(widen, prepend=True) for block in blocks]
    handles += [block.register_forward_hook(restore, always_call=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        kept[0] = [*rest, *(item for items in kept.values() for item in items)]
        for space, name, value in kept[0]:
            space[name] = value


def _widened(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Replace half-precision parameters and buffers by float32 copies; return the originals."""
    kept, copies = [], dict[int, torch.Tensor]()
    for module in modules:
        spaces: tuple[Any, ...] = module._parameters, module._buffers
        for space in spaces:
            for name, value in space.items():
                if type(value) in (torch.Tensor, torch.nn.Parameter) and _is_half(value.dtype):
                    if id(value) not in copies:
                        wide = value.detach().float()
                        is_weight = isinstance(value, torch.nn.Parameter)
                        copies[id(value)] = torch.nn.Parameter(wide, False) if is_weight else wide
                    kept.append((space, name, value))
    for space, name, value in kept:
        space[name] = copies[id(value)]
    return kept


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype not in (torch.float32, torch.float64)


def rows_alike(model: Any, names: Names, rows: int) -> Alike:
    """Return how a model with foreign code treats the rows of a batch, by a trial.

    The same prompt must give the same logits in every row, alone, and beside other prompts. A model
    that raises counts as "by place": it may need another number of rows.
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


def odd_type(model: Any, names: Names, name: str, kind: int, *, apart: bool) -> str:
    """Return why pages of tokens of a type cannot be shared, by a trial; "" if they can.

    Args:
        model: The model.
        names: The names of its arguments.
        name: The argument with the types.
        kind: The type.
        apart: Tokens of another type, 0, lie between them.
    """
    with suppress(Exception), quiet(model):  # a model may raise anything
        ids = ordinary_tokens(model, names, sum(_PARTS))
        types = torch.full_like(ids, kind)
        if apart:
            types[:, 1:-1] = 0
        given: dict[str, Any] = {name: types}
        found = _forward(model, names, ids, **given)
        # Forwards of one form differ by no rounding, whatever the dtype.
        if not kind and not close(found, _forward(model, names, ids), torch.float32):
            return f"`{name}` of 0 is not the same as none"
        ids[:, -1] = ids[:, 0]
        if not close(found[:, 0], _forward(model, names, ids, **given)[:, 0], torch.float32):
            return "tokens of one type see later ones"
        if apart:
            return _try_types(model, names, ids, name, kind)
    return ""


def _try_types(model: Any, names: Names, ids: torch.Tensor, name: str, kind: int) -> str:
    """Note in the names whether types behind a cache are those of all tokens or of new ones only.

    Returns:
        The problem if the model answers with neither as in one pass; "" otherwise.
    """
    at, types = _PARTS[0], torch.zeros_like(ids)
    types[:, at + 1 : -1] = kind
    given, before = dict[str, Any]({name: types}), dict[str, Any]({name: types[:, :at]})
    wanted, far = _forward(model, names, ids, **given)[:, at:], dict[int, float]()
    for first in (at, 0):
        cache, given[name] = native_cache(model), types[:, first:]
        _forward(model, names, ids[:, :at], cache, **before)
        with suppress(Exception):  # the shape may not fit
            found = _forward(model, names, ids[:, at:], cache, at, **given)
            far[first] = float((found - wanted).norm() / wanted.norm())
    best = min(far, key=far.__getitem__)
    if best < at:
        names.whole.add(name)
    most = _HALF_TOLERANCE if _is_half(model.dtype) else _TOLERANCE
    return "" if far[best] <= most else f"it reads `{name}` in another way behind a cache"


def native_cache(model: Any) -> DynamicCache:
    """Make the cache that the model itself would make."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def pair(names: Names, cache: Any) -> Any:
    """Return the model's cache argument, with a cache for cross attention if it has an encoder."""
    return EncoderDecoderCache(cache, DynamicCache()) if names.encoder else cache


def _forward(
    model: Any,
    names: Names,
    ids: torch.Tensor,
    cache: Any = None,
    at: int = 0,
    pad: int = 0,
    **given: Any,
) -> torch.Tensor:
    """Return the model's float32 logits, behind the `at` columns of a cache if one is given.

    The first `pad` columns are padding.
    """
    given |= {names.ids: ids, "use_cache": cache is not None}
    if cache is not None:
        given[names.cache] = cache
    places = torch.arange(at + ids.shape[1], device=ids.device)[None]
    if pad:
        given[names.mask] = (places >= pad).long()
    if not names.counts:
        given[names.positions] = (places[:, at:] - pad).clamp_min(0)
    out = model(**given, **encoder_inputs(model, names, len(ids)))
    logits = out.logits if getattr(out, "logits", None) is not None else out[0]
    return logits.detach().float()  # type: ignore[no-any-return]


def encoder_inputs(model: Any, names: Names, rows: int) -> dict[str, Any]:
    """Return an encoder output as argument of an encoder-decoder's decoder, {} for other models."""
    if not names.encoder:
        return {}
    config = getattr(model.get_encoder(), "config", model.config).get_text_config()
    width = getattr(config, "d_model", None) or config.hidden_size
    weight = model.get_input_embeddings().weight
    ramp = torch.linspace(-1, 1, 4 * width, device=execution_device(model)).view(1, 4, width)
    hidden = ramp.expand(rows, -1, -1).to(weight.dtype)
    return {"encoder_outputs": EncoderOutput(last_hidden_state=hidden)}


def ordinary_tokens(model: Any, names: Names, count: int) -> torch.Tensor:
    """Return `[1, count]` ordinary token ids that do not repeat soon."""
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
    """Return the device of a model's token ids, also if its weights are offloaded."""
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


def close(
    found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, most: float = _TOLERANCE
) -> bool:
    """Return whether logits `[1, T, V]` are the same, but for the order of additions.

    Args:
        found: float32.
        wanted: float32.
        dtype: Dtype of the model.
        most: Distance in single precision, relative to the largest logit.
    """
    if not _is_half(dtype):
        return bool((found - wanted).abs().max() <= most * wanted.abs().max())
    distance = (found - wanted)[0].norm(dim=-1)
    relative = distance / wanted[0].norm(dim=-1).clamp_min(1e-9)
    return bool(relative.median() <= _HALF_TOLERANCE)


@contextmanager
def quiet(model: Any) -> Iterator[None]:
    """Run a model in evaluation mode without gradients; restore each module's mode afterwards.

    Random numbers that the model draws are not used up.
    """
    # Modules of frozen TorchScript have no mode.
    modes = [(m, m.training) for m in model.modules() if hasattr(m, "training")]
    modes = modes if any(training for _, training in modes) else []
    try:
        if modes:
            model.eval()
        gpus = {tensor.device.index for tensor in model.parameters() if tensor.is_cuda}
        with torch.random.fork_rng(gpus), torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
