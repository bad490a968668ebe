"""`attach(reuse="blend")`: a trial of the rotation of a model's keys, and blended prompts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache.kv import KV, follow, warn
from flowkv.cache.sequence import Sequence
from flowkv.core.errors import CapacityError, ConfigError
from flowkv.hooks.blend import Advance, Blender, EditBlender
from flowkv.hooks.huggingface.packed import packed_way
from flowkv.hooks.huggingface.probe import execution_device, native_cache, ordinary_tokens, quiet
from flowkv.hooks.huggingface.restore import AdmittedRows, Nested, Part
from flowkv.kvt.basis import KeyTurn
from flowkv.policy.blend import BlendRule

_TOKENS, _FAR = 8, (1, 37, 301)
"""Tokens of a trial, and the distances by which they are moved."""
_BY_LENGTH = frozenset(("dynamic", "longrope", "mrope"))
"""Kinds of RoPE in which a key depends on more than its position."""
_REMEDY = "Leave reuse= out: exact reuse serves every model that attach does"


def make_blender(
    door: Any, rule: BlendRule, kind: type[Blender] = Blender, max_kl: float | None = None
) -> Blender:
    """Make the blender of an attached model's prompts.

    Raises:
        ConfigError: The model's keys cannot be moved, or its rows cannot be packed.
    """
    model, kv, config = door.model, door.kv, door.model.config.get_text_config(decoder=True)
    kinds = {group.kind for group in door.plan.geometry.groups} - {"full"}
    problem = ""
    if door.names.encoder:
        problem = "an encoder-decoder is not covered"
    elif door.plan.stateful or kinds:
        problem = f"layers that are {' or '.join(sorted(kinds) or ['recurrent'])} are not covered"
    elif kv.config.overflow or door.sparsifier is not None:
        problem = "overflow=True and sparsify= keep their own tokens"
    elif kind is EditBlender and kv.config.audit:
        problem = "audit= computes pages exactly, and would take edited ones for wrong"
    elif kv.config.max_rows < 4:
        problem = f"max_rows={kv.config.max_rows} leaves no rows for documents beside a prompt"
    forward = None
    if not problem:
        forward, problem = packed_way(model, kv, door)
    if problem or forward is None:
        raise _refused(model, problem)
    with door.aside(), quiet(model):
        turns = key_turns(model, door, config)
    compute = partial(_compute, weakref.ref(door))
    return kind(kv, forward, turns, next(_leads(model, config)), rule, compute, max_kl=max_kl)


def _compute(door: weakref.ref[Any], ids: NDArray[np.uint32], tenant: str | None) -> None:
    """Compute a text as any prompt of the model, with all checks of the model's hooks."""
    own: Any = door()
    names = own.names
    shown = torch.from_numpy(ids.astype(np.int64))[None].to(execution_device(own.model))
    asked: dict[str, Any] = {names.ids: shown, "tenant": tenant}
    cache = own.kv.cache(**asked)
    known = cache.get_seq_length()
    positions = torch.arange(known, len(ids), device=shown.device)[None]
    given = {names.ids: shown[:, known:], names.positions: positions, names.cache: cache}
    try:
        with torch.no_grad():
            own.model(**given, use_cache=True)
    finally:
        cache.close()


def _refused(model: Any, problem: str) -> ConfigError:
    return ConfigError(
        f"approximate reuse does not fit this {type(model).__name__}: {problem}", _REMEDY
    )


def _leads(model: Any, config: Any) -> Iterator[int]:
    """Yield candidates for the first token of a text, which all later tokens attend to."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for source in (config, getattr(model, "generation_config", None)):
            token = getattr(source, name, None)
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                yield token
    yield 0


def key_turns(model: Any, door: Any, config: Any, *, strict: bool = True) -> dict[int, KeyTurn]:
    """Return the rotation of each layer's keys by position, as a trial shows it.

    Args:
        model: The model.
        door: Its door.
        config: Its text configuration.
        strict: Whether all layers must rotate; else those that do not are left out.

    Raises:
        ConfigError: The keys of a layer do not rotate as any RoPE of the model.
    """
    names = "rope_parameters", "rope_scaling"
    said = [one for name in names for one in _dicts(getattr(config, name, None))]
    kinds = {str(one.get("rope_type", one.get("type", ""))) for one in said}
    kinds |= {"mrope"} if any("mrope_section" in one for one in said) else set()
    if (odd := sorted(kinds & _BY_LENGTH)) and not strict:
        return {}
    if odd:
        raise _refused(model, f"keys depend on more than their position with RoPE {odd[0]!r}")
    frequencies = {
        tuple(x.detach().double().flatten().tolist()): None
        for module in model.modules()
        for name, x in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    }
    tried = [
        KeyTurn(np.array(one), interleaved) for one in frequencies for interleaved in (False, True)
    ]
    ids = ordinary_tokens(model, door.names, _TOKENS)[:1]
    here, *moved = (_kv(model, door, ids, by) for by in (0, *_FAR))
    found: dict[int, KeyTurn] = {}
    for layer in door.plan.placed:
        k, v = here[layer]
        for turn in tried:
            if 2 * len(turn.inv_freq) <= k.shape[-1] and all(
                _near(turn.moved(k, *_angles(turn, len(k), by, k.device)), there[layer][0])
                and _near(v, there[layer][1])
                for by, there in zip(_FAR, moved, strict=True)
            ):
                found[layer] = turn
                break
        else:
            if strict:
                raise _refused(model, f"keys of layer {layer} do not rotate with their position")
    return found


def _dicts(said: Any) -> Iterator[dict[str, Any]]:
    """Yield a mapping and those in it, as layers of different kinds have RoPE of their own."""
    if isinstance(said, dict):
        yield said
        for value in said.values():
            yield from _dicts(value)


def _angles(turn: KeyTurn, count: int, by: int, device: Any) -> Iterator[torch.Tensor]:
    return (x.to(device) for x in turn.angles(np.full(count, by, np.int64)))


def _kv(model: Any, door: Any, ids: torch.Tensor, by: int) -> dict[int, Any]:
    """Return K and V `[T, Hk, D]` of each layer, for tokens at positions from `by` on."""
    names, cache = door.names, native_cache(model)
    positions = torch.arange(by, by + ids.shape[1], device=ids.device)[None]
    given = {names.ids: ids, names.positions: positions, names.cache: cache, "use_cache": True}
    with torch.no_grad():
        model(**given)
    found = {}
    for index in door.plan.placed:
        layer = cache.layers[index]
        found[index] = [x[0].transpose(0, 1) for x in (layer.keys, layer.values)]
    return found


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not other.numel():  # latents without a rotary part
        return True
    # In 16 bits, each layer amplifies the rounding errors of keys.
    least = 2e-4 if other.dtype in (torch.float32, torch.float64) else 5e-2
    scale = float(other.float().abs().max()) or 1.0
    return float((one.float() - other.float()).abs().max()) <= least * scale


class Blending:
    """Blender of an attached model's prompts, made again whenever the model changes.

    Args:
        door: The model's door.
        rule: Which tokens of documents or spans are computed again.
        edits: Look for spans of earlier texts instead of documents.
        max_kl: See `Blender`.

    Raises:
        ConfigError: See `make_blender`.
    """

    def __init__(
        self, door: Any, rule: BlendRule, *, edits: bool = False, max_kl: float | None = None
    ) -> None:
        self._door: Any = weakref.ref(door)  # which refers to this object
        self._rule = rule
        self._kind, self._max_kl = EditBlender if edits else Blender, max_kl
        self._blender = self._make()
        self._name = door.kv.namespace

    def _make(self) -> Blender:
        return make_blender(self._door(), self._rule, self._kind, self._max_kl)

    @property
    def private(self) -> bool:
        """Return whether blended sequences publish no pages."""
        return self._kind is Blender

    def now(self) -> Blender:
        """Return the blender for the model as it is, a new one if the model's name has changed.

        Raises:
            ConfigError: Prompts of the model cannot be blended any more.
        """
        door = self._door()
        if door.identity.foreign:
            raise ConfigError(
                f"the pages of this model are not shared: {door.identity.foreign}",
                'Remove that from the model, or attach it with revision="..."',
            )
        if self._name != door.kv.namespace:
            fresh = self._make()
            fresh.adopt(self._blender)
            self._blender, self._name = fresh, door.kv.namespace
        return self._blender

    def learn(self, documents: Items[Any], tenant: str | None) -> int:
        """Compute documents for reuse, see `KV.learn`."""
        self._door().refresh()
        return self.now().learn(documents, tenant)

    def unlearn(self, tokens: Any, tenant: str | None) -> int:
        """Erase a document, see `Blender.unlearn`."""
        return self._blender.unlearn(tokens, tenant)

    def follow(self, kv: KV) -> None:
        """Register what a cache calls: for documents to learn, or texts that end."""
        if self.private:
            follow(kv, learn=self.learn, unlearn=self.unlearn)
        else:
            follow(kv, record=self.remember, unlearn=self.unlearn, forget=self.forget)

    def remember(self, seq: Sequence) -> None:
        """Remember a text that ends, see `EditBlender.remember`."""
        self._blender.remember(seq)

    def forget(self, owner: str) -> int:
        """Forget the texts of a tenant."""
        return self._blender.forget(owner)

    def one(self, seq: Sequence, most: int, advance: Advance | None = None) -> bool:
        """Put known documents of a sequence's prompt in place; return whether there were any.

        Args:
            seq: The sequence, for which no pages are being loaded.
            most: Tokens of its prompt that may be put in place; a forward computes the rest.
            advance: See `Blender.blend`.
        """
        try:
            with self._door().aside():
                return self.now().blend(seq, most, advance) > 0
        except (CapacityError, ConfigError) as error:
            warn(self._door().kv, f"blend: {error.problem}", f"FlowKV blends nothing: {error}")
            return False

    def apply(
        self, found: AdmittedRows, nested: Nested, pads: list[int], most: int
    ) -> tuple[AdmittedRows, bool]:
        """Put known documents of a batch's prompts in place; return the rows, and whether any was.

        A batch is not blended if one row has no document: the tokens of all rows are then computed
        with that row in any case.

        Args:
            found: Its rows, for which no pages are being loaded.
            nested: Runner that computes the tokens before documents.
            pads: Padding columns of each row.
            most: Columns that need not be computed by the forward that follows.
        """
        rows = list(enumerate(zip(found.seqs, pads, strict=True)))
        if len(rows) > 1:
            ends = [pad + self._blender.reach(seq, most - pad) for _, (seq, pad) in rows]
            if min(ends) <= found.base:
                return found, False
        blended = False
        for row, (seq, pad) in rows:

            def advance(own: Sequence, count: int, row: int = row, pad: int = pad) -> None:
                nested.compute([Part(row, own, pad, count)])

            blended |= self.one(seq, most - pad, advance)
        base = min(pad + seq.length for _, (seq, pad) in rows)
        return found._replace(base=max(base, found.base)), blended
