"""`Press`: keeps of a prompt what a press of kvpress keeps, in pages with a name of their own.

A press runs on a plain prefill of the prompt, by its own hooks. What it leaves of keys and values
is written to pages that are named by model, press, release, settings and prompt; so they are
shared, stored and found again by other processes, and never by another press or an exact request.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch

from flowkv.cache.kv import KV, count_tokens, plan, warn
from flowkv.cache.sequence import Sequence
from flowkv.cache.step import stand_for
from flowkv.core.errors import ConfigError, FlowKVError, StateError
from flowkv.core.keys import Salt, as_tokens
from flowkv.hooks.huggingface.probe import (
    execution_device,
    native_cache,
    ordinary_tokens,
    quiet,
)
from flowkv.hooks.huggingface.rows import closed_on_error, goes_on, replace_all
from flowkv.hooks.huggingface.thin import Thinning
from flowkv.naming.computation import code_of
from flowkv.naming.identity import drawn

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
Kept = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values `[n, Hk, D]` that are left, by layer."""


class PressError(FlowKVError):
    """A press did not prune a prompt, or left what pages cannot hold."""


class Press:
    """A press of kvpress, or any object of its protocol, as the sparsifier of an attached model.

    Args:
        given: The press: called with a model, it gives the context manager of a prefill.

    Attributes:
        name: Name of its class.
        queries: 0: no attention of a prompt's last tokens is asked for.
        share: 1.0: all layers keep equally many tokens, and are paged together.
        contexts: Tokens of the prompts that were pruned or found here, as bytes.

    Raises:
        ConfigError: It cannot be named, or drops tokens in a way that pages cannot hold.
    """

    queries, share = 0, 1.0

    def __init__(self, given: Any) -> None:
        self.given, self.name = copy.deepcopy(given), type(given).__name__
        for one in _nested(self.given):
            if why := _MOVED.get(type(one).__name__):
                raise ConfigError(f"{type(one).__name__} {why}", _REMEDY)
        self.contexts: dict[bytes, None] = {}
        self._words = _words_of(self.given)

    def share_of(self, layer: int) -> float:
        """Return 1.0, see `share`."""
        return self.share

    def settle(self, door: Any) -> None:
        """Check by a trial that a press and a model fit, and name what the press loads for it.

        Raises:
            ConfigError: They do not, or what it loads cannot be named.
        """
        most = getattr(door.model.config.get_text_config(), "max_position_embeddings", None)
        ids = ordinary_tokens(door.model, door.names, min(_TRIAL_TOKENS, most or _TRIAL_TOKENS))
        try:
            kept, _ = self.prefill(door, ids)
        except PressError as error:
            raise ConfigError(error.problem, error.remedy) from error
        if len(next(iter(kept.values()))[0]) == ids.shape[1]:
            raise ConfigError(f"{self.name} drops no token of a prompt of {ids.shape[1]}", _REMEDY)
        settled = copy.deepcopy(self.given)
        with settled(_twin(door.model)):
            self._words = _words_of(settled)

    def prefill(self, door: Any, ids: torch.Tensor) -> tuple[Kept, bool]:
        """Return what is left of a prompt, and whether the same prompt would leave the same.

        Args:
            door: The door of the model.
            ids: `[1, S]`.

        Raises:
            PressError: The press failed, or left what pages cannot hold.
        """
        names, cache, before, drew = door.names, native_cache(door.model), drawn(), False
        given = {names.ids: ids, names.cache: cache, "use_cache": True}
        if "logits_to_keep" in names.parameters:
            given["logits_to_keep"] = 1
        try:
            model = _twin(door.model)
            with quiet(model), with_positions(model):
                with copy.deepcopy(self.given)(model):
                    model(**given)
                drew = drawn() != before
            masked = any(getattr(m, _MASKS, None) is not None for m in model.modules())
        except Exception as error:  # such as an assertion on the length of the prompt
            text = f"{self.name} failed on {ids.shape[1]} tokens: {type(error).__name__}: {error}"
            raise PressError(text, _REMEDY) from error
        layers = {layer: cache.layers[layer] for layer in door.plan.placed}
        found = {i: (one.keys[0], one.values[0]) for i, one in layers.items()}
        counts = sorted({x.shape[1] for pair in found.values() for x in pair})
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
        return {i: (k.transpose(0, 1), v.transpose(0, 1)) for i, (k, v) in found.items()}, not drew

    def salt(self, tokens: Any) -> Salt:
        """Return the salt that names what the press leaves of a prompt."""
        state = hashlib.sha256(b"flowkv.press/1\0" + len(self._words).to_bytes(8, "little"))
        state.update(self._words)
        state.update(tokens.astype("<u4").tobytes())
        return Salt(0, state.digest())

    def unlearn(self, kv: KV, tokens: Any, tenant: str | None) -> int:
        """Erase what is left of a prompt, and of those known here that go on from it; count it."""
        start = as_tokens(tokens).tobytes()
        found = [key for key in self.contexts if key.startswith(start)]
        every = [np.frombuffer(key, np.uint32) for key in dict.fromkeys([start, *found])]
        return sum(kv.forget(ids, tenant=tenant, salts=[self.salt(ids)]) for ids in every)


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
            StateError: It has tokens of the prompt, too, and wants their logits, or they differ.
        """
        behind, remedy = rows.base + call.columns - self.columns, ""
        if 0 < behind < call.columns:
            if not (call.skippable and call.keep <= behind):
                remedy = "Pass logits_to_keep=1, as generate does, or the context by itself"
            elif not goes_on(rows, call.ids.detach().cpu().numpy(), rows.base):
                remedy = "Give kv.cache(...) and generate the same context"
        if remedy:
            raise StateError(
                f"a forward over {self.columns} tokens of a context that {self.policy.name} prunes "
                "asks for their results, or has others, and goes on behind them",
                remedy,
            )
        return behind > 0

    def apply(self, cache: Any) -> None:
        """Replace the rows of a cache by what the press leaves; warn of rows that stay whole."""
        rows, pruned = cache.rows, list[Sequence]()
        rows.flush()
        try:
            more = rows.blind or rows.by_column or rows.shifts.any() or bool(cache.options)
            if more or any(seq.salts for seq in rows.seqs):
                raise PressError("the prompt depends on more than its tokens", _REMEDY)
            with closed_on_error(pruned):
                for seq, pad in rows.padded:
                    pruned.append(self._prune(cache, seq, self.columns - pad))
        except FlowKVError as error:
            text = f"FlowKV keeps all tokens of {len(rows.seqs)} prompts: {error.problem}."
            warn(rows.kv, f"press: {error.problem}", text)
            return
        replace_all(rows, pruned, self.columns)

    def _prune(self, cache: Any, seq: Sequence, length: int) -> Sequence:
        """Return a sequence that stands for the first `length` tokens of a prompt.

        Its pages are found by their name, up to the state that ends them, or else computed.
        """
        kv, door, ids = cache.rows.kv, cache.door, seq.tokens[:length].copy()
        self.policy.contexts[ids.tobytes()] = None
        name, lease = [self.policy.salt(ids)], cache.care.get("lease", "")
        found = kv.open(ids, tenant=seq.owner, salts=name, limit=length, state=True, lease=lease)
        with closed_on_error([found]):
            # What is left was counted as a part of the prompt.
            taken = length - seq.length if found.length else 0
            count_tokens(kv, -length, taken - found.reused)
            if not found.length:
                device = execution_device(door.model)
                kept, again = self.policy.prefill(
                    door, torch.from_numpy(ids.astype(np.int64))[None].to(device)
                )
                count = len(next(iter(kept.values()))[0])
                with torch.no_grad(), plan(kv, [found], [count]) as step:
                    step.audits = True  # its time is no measure of computing prompts
                    step.give(ids[:count])
                    for layer, (k, v) in kept.items():
                        step.write(layer, k.contiguous(), v.contiguous())
                    found.publishable = step.vouched = again and door.trusted()
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
        except (AttributeError, TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"sparsify={given!r} makes no press: {error}",
                'Write "kvpress.CLASS:SHARE", the kept part, or pass a press of your own making',
            ) from error
    if callable(given) and callable(getattr(given, "compress", None)):
        return Press(given)
    return None


def _twin(model: Any) -> Any:
    """Return a copy of a model's modules around the same tensors: presses write to modules."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


@contextmanager
def with_positions(model: Any) -> Iterator[None]:
    """Pass `cache_position` to attention layers: kvpress 0.5 reads it, transformers dropped it."""

    def give(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden, cache = given.get("hidden_states"), given.get("past_key_values")
        if hidden is not None and cache is not None and given.get("cache_position") is None:
            past = cache.get_seq_length(module.layer_idx)
            columns = torch.arange(past, past + hidden.shape[1], device=hidden.device)
            given = {**given, "cache_position": columns}
        return args, given

    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    handles = [module.register_forward_pre_hook(give, with_kwargs=True) for module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nested(given: Any) -> Iterator[Any]:
    """Yield a press and all that it holds."""
    yield given
    for held in vars(given).values():
        for one in held if isinstance(held, (list, tuple)) else (held,):
            if callable(getattr(one, "compress", None)):
                yield from _nested(one)


def _words_of(press: Any) -> bytes:
    return json.dumps(_words(press), sort_keys=True).encode()


def _words(value: Any) -> Any:
    """Return a press, or a setting of one, as JSON that differs from that of any other.

    Raises:
        ConfigError: It has settings, or code, that cannot be named.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return ["tensor", str(value.dtype), list(value.shape), hashlib.sha256(content).hexdigest()]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_words, value)]
    if isinstance(value, dict):
        return ["dict", *sorted(([_words(k), _words(v)] for k, v in value.items()), key=json.dumps)]
    kinds = type(value).__mro__[:-1]
    if not callable(getattr(value, "compress", None)) or not all(map(code_of, kinds)):
        raise ConfigError(
            f"a press with a {type(value).__name__} has no name for its pages",
            "Define its class in a file, with numbers, text, tensors and presses as attributes",
        )
    made = [[f"{kind.__module__}.{kind.__qualname__}", code_of(kind)] for kind in kinds]
    return [made, _words(vars(value))]
