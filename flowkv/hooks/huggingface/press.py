"""Dropping of tokens of a computed prompt: by a policy (`Thinning`), a press, or a second reading.

A `Press` is one of kvpress. It runs on a plain prefill of the prompt, by its own hooks. What it
leaves of keys and values is written to pages that are named by model, press, release, settings and
prompt; so those of kvpress itself are shared, stored and found again by other processes, and never
by another press or an exact request. Other presses publish nothing: no name could cover what they
compute with.

A `Repetition` is a rule that reads the prompt by a plain prefill, and then once more behind itself,
part by part. What the queries of the second reading look at is what a model needs to reproduce the
prompt. What stays is paged, named, stored and shared as what a press leaves.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import random
from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakMethod, ref

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from flowkv.cache.block_table import Planner
from flowkv.cache.erasure import forget_prompt
from flowkv.cache.kv import KV, count_tokens, plan, warn
from flowkv.cache.sequence import Sequence
from flowkv.cache.step import stand_for
from flowkv.core.errors import CapacityError, ConfigError, FlowKVError, GeometryError, StateError
from flowkv.core.keys import Salt, as_tokens
from flowkv.hooks.huggingface.attention import OBSERVER, Switch
from flowkv.hooks.huggingface.probe import execution_device, native_cache, ordinary_tokens, quiet
from flowkv.hooks.huggingface.rows import Rows, closed_on_error, goes_on, replace_all, same_encoding
from flowkv.naming.computation import code_of
from flowkv.naming.fingerprint import bytes_of
from flowkv.naming.identity import drawn
from flowkv.policy.sparsify import Sparsifier, make_sparsifier


class Thinning:
    """Policy and observed queries with which one cache drops tokens, until that is done.

    Args:
        policy: The policy that selects the tokens that stay.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self._seen: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}

    def fork(self) -> Thinning:
        """Return a copy, for a copy of the rows."""
        twin = copy.copy(self)
        twin._seen = dict(self._seen)
        return twin

    def select(self, indices: list[int]) -> None:
        """Reorder the rows: the former row `indices[i]` becomes row i."""
        self._seen = {layer: (q[indices], how) for layer, (q, how) in self._seen.items()}

    def observe(self, layer: int, query: torch.Tensor, arguments: dict[str, Any]) -> None:
        """Store the latest queries of a layer, `[B, Hq, T, D]`, and their attention arguments."""
        most = self.policy.queries
        if not most:
            return
        before = self._seen.get(layer, (query[:, :, :0], {}))[0]
        latest = torch.cat([before, query.detach()[:, :, -most:]], 2)[:, :, -most:]
        how = {name: arguments.get(name) for name in ("scaling", "softcap", "s_aux")}
        self._seen[layer] = latest.clone(), how

    def forget(self) -> None:
        """Drop the stored queries after a rollback of their tokens."""
        self._seen.clear()

    def due(self, rows: Rows, call: Any) -> bool:
        """Return whether the prompt is computed, and the answer begins with a forward."""
        return bool(rows.forwards) and call.columns == 1

    def apply(self, cache: Any) -> None:
        """Drop tokens of all rows, between two forwards; warn of rows that must keep all of them.

        Args:
            cache: The cache, of which nothing is published from now on.
        """
        rows, layers = cache.rows, {layer.index: layer for layer in cache.paged}
        for index, layer in layers.items():
            if not layer.placed.in_pages or (self.policy.queries and index not in self._seen):
                self._refuse(rows, f"the attention of layer {index} is not over pages")
                return
        groups = [group.layers for group in rows.kv.geometry.groups]  # type: ignore[union-attr]
        kept: list[list[NDArray[np.int32]]] = [[] for _ in rows.seqs]
        try:
            for group in groups:
                parts = [self._kept(rows, index, layers[index]) for index in group]
                for row, of_layers in enumerate(zip(*parts, strict=True)):
                    counts = sorted({part.shape[1] for part in of_layers})
                    if len(counts) > 1:
                        raise GeometryError(
                            f"layers of one share keep {counts} tokens",
                            "Let share_of() return a different share for each number",
                        )
                    kept[row].append(np.stack(of_layers))
            rows.thin(kept)
        except CapacityError as error:
            self._refuse(rows, f"{error.problem} to copy the other tokens; pass a larger gpu=")
        except FlowKVError as error:  # such as NaN among scores or keys
            self._refuse(rows, error.problem)

    @staticmethod
    def _refuse(rows: Rows, problem: str) -> None:
        whole = sum(not seq.dropped for seq in rows.seqs)
        text = f"FlowKV keeps all tokens of {whole} of {len(rows.seqs)} prompts: {problem}."
        warn(rows.kv, f"sparsify: {problem}", text)

    def _kept(self, rows: Rows, index: int, layer: Any) -> list[NDArray[np.int32]]:
        """Return the slots of a layer that stay, for each row."""
        k, v = layer.gather(rows.base)
        mass = self._mass(index, k, rows) if self.policy.queries else None
        found = []
        for row, seq in enumerate(rows.seqs):  # behind its padding
            own = [
                None if x is None else x[row, :, rows.base - seq.length :].float().cpu().numpy()
                for x in (k, v, mass)
            ]
            found.append(self.policy.keep(index, own[0], own[1], own[2]))  # type: ignore[arg-type]
        return found

    def _mass(self, index: int, k: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the mean attention of the latest queries over them and heads, f32 `[B, Hk, S]`."""
        q, how = self._seen[index]
        return attention(q, k, how, rows.pads).mean((2, 3))


def attention(
    q: torch.Tensor, k: torch.Tensor, how: dict[str, Any], pads: ArrayLike
) -> torch.Tensor:
    """Return the weights that the latest queries give to keys, f32 `[B, Hk, Hq / Hk, T, S]`.

    Args:
        q: `[B, Hq, T, D]`, of the last T of the keys' columns.
        k: `[B, Hk, S, D]`.
        how: The scaling, softcap and sinks ("s_aux") of the attention, as far as it has them.
        pads: Padding columns of each row, which get no weight.
    """
    batch, _, new, dim = q.shape
    scale, cap, sinks = how.get("scaling"), how.get("softcap"), how.get("s_aux")
    grouped = q.float().reshape(batch, k.shape[1], -1, new, dim)
    logits = torch.einsum("bhgtd,bhsd->bhgts", grouped, k.float())
    logits *= dim**-0.5 if scale is None else scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    columns = torch.arange(k.shape[2], device=k.device)
    first = torch.as_tensor(pads, device=k.device)[:, None, None]
    seen = (columns >= first) & (columns <= columns[-new:, None])  # [B, T, S]
    logits.masked_fill_(~seen[:, None, None], float("-inf"))
    if sinks is not None:  # sinks take a share of each query's weight
        parked = sinks.float().reshape(1, k.shape[1], -1, 1, 1).expand(*logits.shape[:4], 1)
        logits = torch.cat([logits, parked], -1)
    return torch.nan_to_num(logits.softmax(-1))[..., : k.shape[2]]  # 0 for padding


def check_thinnable(door: Any, policy: Any, reads: str) -> None:
    """Check that a policy can drop tokens from the cache of an attached model.

    Raises:
        ConfigError: The model or its configuration does not allow it.
    """
    plan, problem, share = door.plan, "", policy.share
    kinds = {group.kind for group in plan.geometry.groups} - {"full"}
    if door.names.encoder:
        problem = "an encoder-decoder is not covered"
    elif plan.stateful or kinds:
        odd = sorted(kinds) or ["recurrent"]
        problem = f"layers that are {' or '.join(odd)} have no tokens to choose among"
    elif door.kv.config.overflow:
        problem = "overflow=True keeps all of a prompt, wherever it lies"
    elif door.kv.config.audit and not isinstance(policy, Sparsifier):
        problem = "audit= computes pages exactly, and would take pruned ones for wrong"
    elif reads != "auto":
        problem = f"reads={reads!r} gathers K and V of all columns, dropped ones included"
    elif not all(placed.in_pages for placed in plan.placed.values()):
        problem = door.switch.reason or "the model computes with keys and values itself"
    elif not isinstance(share, float) and len(share) != len(plan.specs):
        raise ConfigError(
            f"shares of {len(share)} layers for a {type(door.model).__name__} of {len(plan.specs)}",
            "Pass one for each layer of the model, or one number for all",
        )
    if problem:
        raise ConfigError(
            f"sparsify= does not fit this {type(door.model).__name__}: {problem}",
            "Leave sparsify out; it is for models with layers that all see the whole context and "
            "attend by 'sdpa' or 'eager'",
        )


_TRIAL_TOKENS = 256
"""Tokens of a trial: most presses need more than the 64 of their windows."""
_MASKS = "masked_key_indices"
"""Attribute in which kvpress names the keys that attention skips, head by head."""
_MOVED = {
    "FinchPress": "needs a delimiter between a context and its question",
    "KeyRerotationPress": "gives keys new positions, which those of later tokens do not follow",
    "PrefillDecodingPress": "drops tokens while it decodes",
    "RestoreKVPress": "gives keys new positions, which those of later tokens do not follow",
}
"""Presses whose prefill does not show that more than its keys and values are changed."""
_REMEDY = (
    "Pass a press that keeps equally many tokens in all layers and heads, such as "
    'ExpectedAttentionPress, KeyDiffPress or SnapKVPress, or a rule of FlowKV, such as "snapkv:0.5"'
)
_NAMED = "kvpress.", "flowkv.policy."
"""Beginnings of the names of classes whose code a name covers."""
Kept = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values `[n, Hk, D]` that are left, by layer."""


class PressError(FlowKVError):
    """A press did not prune a prompt, or left a cache that pages cannot hold."""


class Press:
    """A press of kvpress, or any object of its protocol, as the sparsifier of an attached model.

    Args:
        given: The press: called with a model, it gives the context manager of a prefill.

    Attributes:
        name: Name of its class.
        queries: 0: no attention of a prompt's last tokens is asked for.
        share: 1.0: all layers keep equally many tokens, and are paged together.
        words: Its name, once it is settled; b"" if nothing that it leaves is shared.

    Raises:
        ConfigError: It cannot be copied, or drops tokens in a way that pages cannot hold.
    """

    queries, share = 0, 1.0

    def __init__(self, given: Any) -> None:
        self.name, self.words = type(given).__name__, b""
        try:
            self.given = copy.deepcopy(given)
            kinds = [kind for one in _nested(self.given) for kind in type(one).__mro__]
        except Exception as error:  # such as a lock, or a press within itself
            text = f"{self.name} cannot be copied: {type(error).__name__}: {error}"
            raise ConfigError(text, _REMEDY) from error
        for kind in kinds:
            if why := _MOVED.get(kind.__name__):
                raise ConfigError(f"{kind.__name__} {why}", _REMEDY)

    def share_of(self, layer: int) -> float:
        """Return 1.0, see `share`."""
        return self.share

    def settle(self, door: Any) -> None:
        """Check by a trial that a press and a model fit, and name its loaded settings, too.

        Raises:
            ConfigError: They do not.
        """
        most = getattr(door.model.config.get_text_config(), "max_position_embeddings", None)
        ids = ordinary_tokens(door.model, door.names, min(_TRIAL_TOKENS, most or _TRIAL_TOKENS))
        try:
            kept, self.words = self.prefill(door, ids)
        except PressError as error:
            raise ConfigError(error.problem, error.remedy) from error
        if len(next(iter(kept.values()))[0]) == ids.shape[1]:
            raise ConfigError(f"{self.name} drops no token of a prompt of {ids.shape[1]}", _REMEDY)
        if not self.words:
            text = "no name covers its code, its settings, what it loads or what it draws."
            warn(door.kv, "press", f"FlowKV shares nothing that {self.name} leaves: {text}")

    def prefill(self, door: Any, ids: torch.Tensor) -> tuple[Kept, bytes]:
        """Return the pruned cache of a prompt, and the words that name the press, b"" if none do.

        Args:
            door: The door of the model.
            ids: `[1, S]`.

        Raises:
            PressError: The press failed, or left a cache that pages cannot hold.
        """
        names, cache, before = door.names, native_cache(door.model), _drawn()
        given = {names.ids: ids, names.cache: cache, "use_cache": True}
        if not names.counts:
            given[names.positions] = torch.arange(ids.shape[1], device=ids.device)[None]
        if "logits_to_keep" in names.parameters:
            given["logits_to_keep"] = 1
        try:
            model, press = _twin(door.model), copy.deepcopy(self.given)
            with quiet(model):
                self.run(door, model, press, given)
                words = self.words_of(press) if _drawn() == before else b""
            masked = any(getattr(m, _MASKS, None) is not None for m in model.modules())
            layers = {layer: cache.layers[layer] for layer in door.plan.placed}
            found = {i: (one.keys[0], one.values[0]) for i, one in layers.items()}
            counts = sorted({x.shape[1] for pair in found.values() for x in pair})
        except Exception as error:  # such as an assertion on the length of the prompt
            text = f"{self.name} failed on {ids.shape[1]} tokens: {type(error).__name__}: {error}"
            raise PressError(text, _REMEDY) from error
        problem = ""
        if masked:
            problem = f"{self.name} masks other keys in each head"
        elif len(counts) > 1:
            problem = f"{self.name} keeps {counts[0]} to {counts[-1]} tokens, by layer"
        elif not 0 < counts[0] <= ids.shape[1]:
            problem = f"{self.name} leaves {counts[0]} of {ids.shape[1]} tokens"
        elif not all(bool(x.isfinite().all()) for pair in found.values() for x in pair):
            problem = f"{self.name} leaves keys or values that are not finite"
        if problem:
            raise PressError(problem, _REMEDY)
        return {i: (k.transpose(0, 1), v.transpose(0, 1)) for i, (k, v) in found.items()}, words

    def run(self, door: Any, model: Any, press: Any, given: dict[str, Any]) -> None:
        """Run a prefill of a copy of the model under a copy of the press.

        Args:
            door: The door of the model itself.
            model: The copy, with the same tensors.
            press: The copy of the press.
            given: Arguments of the forward: the prompt, `[1, S]`, an empty native cache, which is
                pruned afterwards, and others.
        """
        with with_positions(model), press(model):
            model(**given)

    def words_of(self, press: Any) -> bytes:
        """Return the words that name a press; b"" if none do."""
        return words_of(press)

    def salt(self, tokens: Any) -> Salt:
        """Return the salt that names the pruned pages of a prompt."""
        state = hashlib.sha256(b"flowkv.press/2\0" + len(self.words).to_bytes(8, "little"))
        state.update(self.words)
        state.update(tokens.astype("<u4").tobytes())
        return Salt(0, state.digest())

    def unlearn(self, kv: KV, tokens: Any, tenant: str | None) -> int:
        """Erase the pruned pages of exactly this prompt; return their number."""
        given = as_tokens(tokens)
        with kv._probe(given, tenant, [self.salt(given)]) as seq:
            return forget_prompt(Planner.of(seq).store, seq)


class Pressing(Thinning):
    """Press of one cache, until the tokens behind its prompt come.

    Args:
        policy: The press.
        columns: Columns of the prompt; the tokens behind them are not pressed.
    """

    def __init__(self, policy: Press, columns: int) -> None:
        super().__init__(policy)
        self.columns = columns

    def due(self, rows: Any, call: Any) -> bool:
        """Return whether a forward goes on behind the prompt.

        Raises:
            StateError: It has tokens of the prompt, too, and wants their logits, or they differ, or
                have other positions.
        """
        behind, problem = rows.base + call.columns - self.columns, ""
        if not 0 < behind < call.columns or call.ids is None:
            return behind > 0 and call.ids is not None
        known = all(len(seq.tokens) + pad >= self.columns for seq, pad in rows.padded)
        if not (call.skippable and call.keep <= behind):
            problem, remedy = "asks for their results", "Pass logits_to_keep=1, as generate does"
        elif not (known and goes_on(rows, call.ids.detach().cpu().numpy(), rows.base)):
            problem, remedy = "has others", "Give kv.cache(...) and generate the same context"
        elif not (rows.by_column or rows.usual(call.columns, call.positions)):
            problem, remedy = "moves them", "Pass position_ids that count the tokens, or none"
        if problem:
            raise StateError(
                f"a forward goes on behind the {self.columns} tokens of a context that "
                f"{self.policy.name} prunes, and {problem}",
                f"{remedy}, or pass the context by itself",
            )
        return True

    def apply(self, cache: Any) -> None:
        """Replace the rows of a cache by pruned ones; warn of rows that stay whole."""
        rows, pruned = cache.rows, list[Sequence]()
        rows.flush()
        other = cache.options or rows.shifts.any() or any(seq.salts for seq in rows.seqs)
        try:
            for problem, found in (
                ("the padding of the prompt has no position_ids", rows.by_column),
                ("K and V of the prompt depend on more than its tokens", rows.blind),
                ("positions depend on length", not same_encoding(rows, self.columns)),
                ("the pages of the prompt are named by more than its tokens", other),
            ):
                if found:
                    raise PressError(problem, _REMEDY)
            with closed_on_error(pruned):
                for seq, pad in rows.padded:
                    pruned.append(self._prune(cache, seq, self.columns - pad))
        except FlowKVError as error:
            text = f"FlowKV keeps all tokens of {len(rows.seqs)} prompts: {error.problem}."
            warn(rows.kv, f"press: {error.problem}", text)
            return
        except BaseException:  # an interrupt: the next forward begins again
            rows.thinning = self
            raise
        replace_all(rows, pruned, self.columns)

    def _prune(self, cache: Any, seq: Sequence, length: int) -> Sequence:
        """Return a sequence that stands for the first `length` tokens of a prompt.

        Its pages are found by their name, up to the state that ends them, or else computed.
        """
        kv, door, ids = cache.rows.kv, cache.door, seq.tokens[:length].copy()
        door.refresh(private=False)
        if seq.namespace != kv.namespace:
            raise PressError("the model changed after the cache was opened", _REMEDY)
        if len(ids) != length:
            raise PressError(f"{len(ids)} of {length} tokens of the prompt are known", _REMEDY)
        name, lease = [self.policy.salt(ids)], cache.care.get("lease", "")
        most = length if self.policy.words and self.policy.words_of(self.policy.given) else 0
        found = kv.open(ids, tenant=seq.owner, salts=name, limit=most, state=True, lease=lease)
        with closed_on_error([found]):
            found.in_place = False  # so that no cold tier codes its pages
            for block in filter(None, chain(*found.blocks)):
                block.placed = False
            # What is left was counted as a part of the prompt.
            taken = length - seq.length if found.length else 0
            count_tokens(kv, -length, taken - found.reused)
            if not found.length:
                shown = torch.from_numpy(ids.astype(np.int64))[None]
                kept, words = self.policy.prefill(door, shown.to(execution_device(door.model)))
                count = len(next(iter(kept.values()))[0])
                with torch.no_grad(), plan(kv, [found], [count]) as step:
                    step.audits = True  # its time is no measure of computing prompts
                    step.give(ids[:count])
                    for layer, (k, v) in kept.items():
                        step.write(layer, k.contiguous(), v.contiguous())
                    step.vouched = most > 0 and words == self.policy.words and door.trusted()
                    found.publishable &= step.vouched  # it may have been forgotten meanwhile
                kv.save_state(found, {"tokens": length})
            with kv.lock:
                stand_for(found, seq, length)
            found.reused += taken
        return found


def make_press(given: Any) -> Press | None:
    """Make a press from "kvpress.CLASS:SHARE", or from an object of its protocol.

    Returns:
        None for any other object, such as a rule of FlowKV.

    Raises:
        ConfigError: kvpress is missing or has no such press, or the press cannot be used.
    """
    if isinstance(given, str) and given.startswith("kvpress."):
        kind, _, share = given.removeprefix("kvpress.").partition(":")
        try:
            given = getattr(importlib.import_module("kvpress"), kind)(
                compression_ratio=1 - float(share)
            )
        except ImportError as error:
            raise ConfigError(
                f"kvpress cannot be imported: {error}",
                "pip install --no-deps 'kvpress>=0.5.5,<0.6', and the packages that it names",
            ) from error
        except Exception as error:
            raise ConfigError(
                f"sparsify={given!r} makes no press: {error}",
                'Write "kvpress.CLASS:SHARE", the kept part, or pass a press of your own making',
            ) from error
    if _is_press(given) and callable(given):
        return Press(given)
    return None


def _twin(model: Any) -> Any:
    """Return a copy of a model's modules around the same tensors: presses write to modules."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


class _Given(dict[str, Any]):
    """Arguments of an attention layer, whose cache presses read as `past_key_values`."""

    def __missing__(self, name: str) -> Any:
        if name != "past_key_values":
            raise KeyError(name)
        return self["cache"]  # its name from transformers 5.24 on


@contextmanager
def with_positions(model: Any) -> Iterator[None]:
    """Pass `cache_position` to attention layers: kvpress 0.5 reads it, transformers dropped it."""

    def give(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = _Given(given)
        hidden, cache = given.get("hidden_states"), given.get("past_key_values", given.get("cache"))
        if hidden is not None and cache is not None and given.get("cache_position") is None:
            past = cache.get_seq_length(module.layer_idx)
            columns = torch.arange(past, past + hidden.shape[1], device=hidden.device)
            given["cache_position"] = columns
        return args, given

    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    handles = [module.register_forward_pre_hook(give, with_kwargs=True) for module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_press(value: Any) -> bool:
    return callable(getattr(value, "compress", None)) and not isinstance(value, type)


def _nested(held: Any) -> Iterator[Any]:
    """Yield a press, or those in a container, and all that they hold."""
    if _is_press(held):
        yield held
        held = vars(held)
    if isinstance(held, (list, tuple, dict)):
        for one in held.values() if isinstance(held, dict) else held:
            yield from _nested(one)


def _drawn() -> list[bytes]:
    """Return the states of the generators that all code shares."""
    return [*drawn(), repr((random.getstate(), np.random.get_state())).encode()]


def words_of(press: Any) -> bytes:
    """Return the words that name a press; b"" if none do."""
    try:
        return json.dumps(_words(press), sort_keys=True).encode()
    except Exception:  # it holds what has no name
        return b""


def _words(value: Any) -> Any:
    """Return a press, or a setting of one, as JSON that differs from that of any other.

    Raises:
        TypeError: It has settings that cannot be named, or is not kvpress's own.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        content = hashlib.sha256(bytes_of(value.detach()).cpu().numpy().tobytes()).hexdigest()
        return ["tensor", str(value.dtype), list(value.shape), content]
    if type(value) in (list, tuple):
        return [type(value).__name__, *map(_words, value)]
    if type(value) is dict:
        return ["dict", *sorted(([_words(k), _words(v)] for k, v in value.items()), key=json.dumps)]
    kinds = [kind for kind in type(value).__mro__[:-1] if kind is not ABC]
    made = [[f"{kind.__module__}.{kind.__qualname__}", code_of(kind)] for kind in kinds]
    if not all(name.startswith(_NAMED) and code for name, code in made):
        raise TypeError(type(value).__name__)
    return [made, _words(vars(value))]


_PART = 128
"""Tokens of the prompt that are read again at a time."""


class Repetition(Press):
    """A rule of FlowKV with `repeats`, as the sparsifier of an attached model.

    Args:
        given: The rule.
    """

    def __init__(self, given: Sparsifier) -> None:
        super().__init__(given)
        self.name = given.name or self.name

    def run(self, door: Any, model: Any, press: Any, given: dict[str, Any]) -> None:
        """Read a prompt twice, and leave in its cache what the rule keeps; see `Press.run`."""
        names = door.names
        ids, cache = given[names.ids], given[names.cache]
        length, mass = ids.shape[1], dict[int, torch.Tensor]()  # [Hk, Hq / Hk, S]
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if (
            most and length + min(length, _PART) > most
        ):  # a lookup beyond them breaks a GPU's stream
            raise ValueError(f"of {most} positions too few are left for a second reading")
        model(**given)

        def observe(index: int, keys: Any, query: torch.Tensor, how: dict[str, Any]) -> None:
            most = attention(query, keys(), how, [0])[0, ..., :length].amax(2)
            mass[index] = torch.maximum(most, mass.get(index, most))

        Switch(model).on()  # the copy attends by a function that gives queries to observers
        layers = {index: cache.layers[index] for index in door.plan.placed}
        for index, layer in layers.items():
            layer.update = partial(_update, WeakMethod(layer.update), partial(observe, index))
        for part in ids.split(_PART, 1):
            at = torch.arange(length, length + part.shape[1], device=ids.device)[None]
            model(**given | {names.ids: part} | ({} if names.counts else {names.positions: at}))
            cache.crop(-part.shape[1])
        for index, layer in layers.items():
            read = layer.keys[0], layer.values[0], mass[index].mean(1)
            own = [x.float().cpu().numpy() for x in read]
            slots = torch.from_numpy(press.keep(index, *own)).to(layer.keys.device, torch.int64)
            layer.keys, layer.values = (
                x.take_along_dim(slots[None, ..., None], 2) for x in (layer.keys, layer.values)
            )

    def words_of(self, press: Any) -> bytes:
        """Return the words that name the rule and what runs it; b"" if none do."""
        code = code_of(Repetition)
        return super().words_of([code, press]) if code else b""


def made_pruner(given: Any) -> Press | Sparsifier:
    """Make what drops tokens: a press, or a rule by its name or object.

    Raises:
        ConfigError: There is none of that name, or it cannot be used.
    """
    rule = make_press(given) or make_sparsifier(given)
    return Repetition(rule) if isinstance(rule, Sparsifier) and rule.repeats else rule


def _update(update: Any, observe: Any, *args: Any, **kwargs: Any) -> Any:
    """Update a layer of a cache, whose keys then give their queries to an observer.

    Neither holds itself, so that their memory is free at once, without a collection of cycles.
    """
    keys, values = update()(*args, **kwargs)
    setattr(keys, OBSERVER, partial(observe, ref(keys)))
    return keys, values
