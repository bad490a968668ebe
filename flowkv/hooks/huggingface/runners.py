"""Runners of an engine's rows over a Hugging Face model: packed, padded, or one at a time.

Rows that cannot be packed run over a `PagedCache`, which the model uses as in `generate`: with
recurrent states, chunked attention, or positions that it counts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache.kv import KV, PagedRow, open_row
from flowkv.cache.sequence import STOPS, Sequence
from flowkv.core.errors import ConfigError, StateError, TokenError, UnsupportedModelError
from flowkv.hooks.huggingface.attach import base_model, door_of
from flowkv.hooks.huggingface.attention import exact
from flowkv.hooks.huggingface.cache import PagedCache
from flowkv.hooks.huggingface.door import ForwardHook
from flowkv.hooks.huggingface.inputs import MODEL_INPUTS, Prompt
from flowkv.hooks.huggingface.packed import PackedForward, alone_reason, packed_way, try_rows
from flowkv.hooks.huggingface.restore import ReuseLimits, admit
from flowkv.hooks.huggingface.rows import closed_on_error
from flowkv.hooks.huggingface.versions import EosTokenCriteria, MaxLengthCriteria, PreTrainedModel

# Rows of models that cannot be packed run beside each other as left-padded rectangles.
#
# The padding is virtual: pages hold no column of it, and the model receives a mask and, where it
# takes them, each row's own positions. Rows with equally many new tokens share a rectangle, so that
# all decoding rows run together, and chunks of prompts run alone or with chunks of equal length.


class EngineCache(PagedCache):
    """Cache of some rows in a step of an engine, committed with the caches of all other rows.

    Attributes:
        damaged: A step failed while it wrote recurrent states, which cannot be rolled back.
    """

    damaged = False

    def give_up(self, *, private: bool = False) -> None:
        """Refuse to become native: rows of an engine have no other cache.

        Raises:
            StateError: Always; the step fails, and its rows are as before.
        """
        raise StateError(
            "the model's keys and values do not fit the pages of its rows any more",
            "Submit the requests again",
        )

    def finish(self) -> None:
        """Do nothing: `commit` ends the step, for all of its rows at once."""

    def commit(self) -> None:
        """End the step after the forwards of all of its rows."""
        super().finish()
        self.damaged = False


class ApartRow(PagedRow):
    """Row with a cache of its own, which keeps recurrent states in place during a suspension.

    Args:
        kv: The cache of its pages.
        cache: The row's own cache.

    Attributes:
        cache: The row's own cache.
    """

    def __init__(self, kv: KV, cache: EngineCache) -> None:
        super().__init__(kv, cache.rows.seqs[0])
        self.cache = cache

    def close(self, stop: str = "") -> None:
        """Release the row's pages; published pages stay known.

        Recurrent states are saved for prompts that continue this text.
        """
        if stop:
            self.seq.stop = STOPS[stop]
        self.cache.close()


class PaddedRunner:
    """Runner of rows in padded rectangles, or one by one, see `engine.runner.Runner`.

    Args:
        model: The model; without recurrent layers, unless rows run one by one.
        kv: The cache that it is attached to.
        door: The model's door; held by the model's hooks.
        together: Rows run in rectangles. Otherwise each has a cache of its own.
    """

    def __init__(self, model: Any, kv: KV, door: ForwardHook, *, together: bool = True) -> None:
        self._model, self._kv, self._door, self.together = model, kv, door, together

    def open(self, request: Any, tokens: NDArray[np.uint32], *, wait: bool) -> PagedRow:
        """Open a row with its known prefix in place, or (`wait=False`) being loaded.

        Rows with recurrent states always wait for their prefix.
        """
        door, kv = self._door, self._kv
        if self.together:
            return open_row(kv, request, tokens, wait=wait)
        stateful = door.plan.stateful
        care = {name: getattr(request, name) for name in ("tenant", "session", "lease", "retain")}
        wait, most = wait or stateful, len(tokens) - 1
        limits = ReuseLimits(most, stateful, care=care, wait=wait)
        found = admit(kv, [Prompt(np.asarray(tokens), 0, list(request.salts))], limits)
        with closed_on_error(found.seqs):
            cache = self._cache(found.seqs, found.seqs[0].length)
            cache.load_states(found.states)
            switch = door.identity.switch
            if stateful and not kv.private and (switch is None or len(tokens) < switch):
                with kv.lock:
                    kv.snapshots.plan_stops(found.seqs, found.seqs[0].length, most)
        return ApartRow(kv, cache)

    def step(self, rows: Items[Any], tokens: Items[Any]) -> torch.Tensor:
        """Run the model over the next tokens of some rows, of exactly one row unless `together`.

        Raises:
            StateError: An earlier step of the row failed while it wrote recurrent states.
        """
        given = [np.asarray(fresh, np.uint32) for fresh in tokens]
        if self.together:
            return self.run([row.seq for row in rows], given)
        (row,) = rows
        if row.cache.damaged:
            raise StateError(
                "a step of this row failed in the middle of its recurrent states",
                "Submit its request again",
            )
        own = row.cache.rows
        own.alive()
        if own.base != row.seq.length:
            own.rebase(row.seq.length)  # pages have been loaded since
        return self._run([row.cache], [[0]], given)

    def run(self, seqs: Items[Sequence], tokens: Items[NDArray[np.uint32]]) -> torch.Tensor:
        """Run the model over the next tokens of some sequences, in rectangles of equal lengths.

        Args:
            seqs: Sequences in no step.
            tokens: The next ids of each, one at least.

        Returns:
            `[B, V]`: logits behind the last token of each.
        """
        door, groups = self._door, dict[int, list[int]]()
        # Code may have come to the model since the trial.
        alone = door.plan.by_column or door.alike_rows(len(seqs)) != "alike"
        for row, fresh in enumerate(tokens):
            groups.setdefault(-row if alone else len(fresh), []).append(row)
        caches = []
        for some in groups.values():
            base = max(seqs[row].length for row in some)
            caches.append(self._cache([seqs[row] for row in some], base, owns=False))
        return self._run(caches, list(groups.values()), tokens)

    def _cache(self, seqs: list[Sequence], base: int, *, owns: bool = True) -> EngineCache:
        rows = self._door.rows(seqs, [base - seq.length for seq in seqs], base)
        return EngineCache(rows, self._door.plan, self._door, owns=owns)

    def _run(
        self, caches: list[EngineCache], groups: list[list[int]], tokens: Items[NDArray[np.uint32]]
    ) -> torch.Tensor:
        """Run a forward over each cache with the tokens of its rows, and commit all or none."""
        found: list[Any] = [None] * len(tokens)
        given = [np.stack([tokens[row] for row in some]) for some in groups]
        try:
            for cache, ids in zip(caches, given, strict=True):  # no forward before all pages fit
                step = cache.rows.plan(ids.shape[1])
                if self._model.training or not self._door.unchanged(full=step.fills):
                    cache.rows.disable_publishing()  # the model has changed before this step
                if self.together:
                    step.give(ids.reshape(-1))
                else:
                    cache.rows.record_ids(torch.from_numpy(ids.astype(np.int64)), None)
            for cache, some, ids in zip(caches, groups, given, strict=True):
                cache.damaged = bool(cache.recurrent)
                answers = self._last_logits(cache, torch.from_numpy(ids.astype(np.int64)))
                for row, logits in zip(some, answers, strict=True):
                    found[row] = logits
            for cache in caches:
                assert cache.rows.step is not None
                cache.rows.step.check()  # if one forward skipped a layer, no cache is committed
            for cache in caches:
                cache.commit()
        finally:
            for cache in caches:
                cache.rows.abandon()  # does nothing after a success
        return torch.stack(found)

    def _last_logits(self, cache: EngineCache, ids: torch.Tensor) -> Any:
        """Return logits `[B, V]` behind the tokens `[B, T]` of a cache with a begun step."""
        names, rows = self._door.names, cache.rows
        device = self._model.get_input_embeddings().weight.device
        left, end = torch.from_numpy(rows.pads).to(device)[:, None], rows.base + ids.shape[1]
        given = {names.ids: ids.to(device), "use_cache": True, names.cache: cache}
        if names.mask in names.parameters:
            given[names.mask] = (torch.arange(end, device=device) >= left).long()
        if names.positions in names.parameters:
            given[names.positions] = torch.arange(rows.base, end, device=device) - left
        if "logits_to_keep" in names.parameters:
            given["logits_to_keep"] = 1
        with self._door.aside(), torch.no_grad(), exact(device):
            return self._model(**given).logits[:, -1]


def choose_way(
    model: Any, kv: KV, door: ForwardHook
) -> tuple[PackedForward | None, PaddedRunner, str]:
    """Choose the fastest way in which rows that run together answer as each does alone.

    Args:
        model: The model.
        kv: The cache that it is attached to.
        door: The model's door.

    Returns:
        `forward`, `apart` and `reason` of `Parts`.

    Raises:
        CapacityError: The cache has no room for the trial; the model may be packable.
    """
    beside, names = PaddedRunner(model, kv, door), door.names
    forward, reason = packed_way(model, kv, door)
    if forward is not None:
        return forward, beside, ""
    fits = names.mask in names.parameters and not alone_reason(door.plan)
    fits = fits and not try_rows(model, kv, door, beside.run)
    return None, PaddedRunner(model, kv, door, together=fits), reason


# Facts about a Hugging Face model that an engine needs before it serves the model.

_CHOICES = frozenset({"use_cache", "output_attentions", "output_hidden_states", "return_dict"})
"""Arguments of a model that are options of generation, too."""


class Parts(NamedTuple):
    """Parts with which an engine runs a model.

    Attributes:
        model: The model itself; of an adapter-wrapped one, its base.
        forward: Forward over packed rows, for `engine.runner.PackedRunner`; None if that fails.
        apart: Runner of other rows, an `engine.runner.Runner`: in rectangles, or one by one.
        reason: Why rows cannot be packed; "" if they can.
        positions: Most tokens of a request, prompt and answer; None if the model names no bound.
        vocabulary: Size of the vocabulary: token ids are smaller.
        refresh: Function to call before rows are opened, which detects changes of the model.
        check: Function that refuses a prompt if its tokens and options need more inputs.
        blend: Function that puts known documents of a prompt in place, see `blend.Blending.one`;
            None without `reuse="blend"`.
    """

    model: Any
    forward: PackedForward | None
    apart: PaddedRunner
    reason: str
    positions: int | None
    vocabulary: int
    refresh: Callable[[], None]
    check: Callable[[NDArray[np.uint32], Mapping[str, Any]], None]
    blend: Callable[[Sequence, int], object] | None


def make_runner_parts(model: Any, kv: KV) -> Parts:
    """Make the parts with which an engine runs an attached model, by a trial over a few tokens.

    Args:
        model: The model that was passed to `flowkv.attach`.
        kv: The cache that `attach` returned.

    Raises:
        CapacityError: The cache has no room to try how rows run together.
        ConfigError: The model is not attached to this cache.
        UnsupportedModelError: The model needs more inputs than token ids, or is compiled.
    """
    model = base_model(model)
    door = door_of(model)
    if door is None or door.kv is not kv or not door.installed:
        raise ConfigError(
            f"this {type(model).__name__} is not attached to this cache",
            "Attach it: kv = flowkv.attach(model, ...), and see what flowkv.verify(model) says",
        )
    if door.sparsifier is not None:
        raise ConfigError(
            "an engine keeps all tokens, and the model was attached with sparsify=",
            "Attach it without sparsify=, or call its generate",
        )
    if door.names.encoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} needs an encoder's input, not token ids alone",
            "Call its generate",
        )
    door.refresh()
    if door.identity.compiled:
        raise UnsupportedModelError(
            "parts of the model are compiled", "Serve the model that torch.compile was given"
        )
    return Parts(
        model,
        *choose_way(model, kv, door),
        _positions(door, model),
        int(model.config.get_text_config(decoder=True).vocab_size),
        door.refresh,
        partial(_check, door),
        None if door.blending is None else door.blending.one,
    )


def _positions(door: ForwardHook, model: Any) -> int | None:
    """Return the most positions of a row, up to which the positions of all rows encode alike."""
    text = model.config.get_text_config(decoder=True)
    trained = getattr(text, "max_position_embeddings", None)
    switch = door.identity.switch
    bounds = [int(trained)] if trained else []
    return min([*bounds, *([] if switch is None else [switch - 1])], default=None)


def _check(door: ForwardHook, tokens: NDArray[np.uint32], options: Mapping[str, Any]) -> None:
    """Refuse a request with K and V that depend on more than token ids.

    Raises:
        TokenError: A token stands for an image, audio, or the like.
        UnsupportedModelError: A request has inputs of the model beside token ids.
    """
    for name, token in door.names.placeholders.items():
        if (tokens == token).any():
            raise TokenError(
                f"the prompt holds token {token} ({name}), a placeholder for another input",
                "Call generate for prompts with images, audio or video",
            )
    inputs = (MODEL_INPUTS | frozenset(door.names.parameters)) - _CHOICES
    more = sorted(inputs & options.keys())
    if more:
        raise UnsupportedModelError(
            f"a request has inputs beside token ids: {', '.join(more)}", "Call generate for it"
        )


# Sampling by transformers itself: the model's own processors and criteria, one set a request.
#
# A request's options have the same meaning as for `model.generate`, with the defaults of the
# model's generation config, and are read by the same code. Drawn tokens are those that `generate`
# draws for that prompt alone after `torch.manual_seed(seed)`.

_LENGTHS = ("max_length", "max_new_tokens")
_APART = (  # arguments of `generate` that are no part of a generation config
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "tokenizer",
)
_UNSERVED: Mapping[str, tuple[Any, ...]] = {  # option: values that change nothing
    "guidance_scale": (None, 1, 1.0),  # runs the model a second time
    "num_return_sequences": (None, 1),
    "token_healing": (None, False),  # rewrites the prompt
}


class GeneratedChoice:
    """Processors and criteria of a request, and the text that they work on.

    Args:
        prompt: Tokens of the prompt.
        limit: Most new tokens.
        processors: See `LogitsProcessorList`.
        criteria: Stopping criteria beside lengths and end tokens.
        stops: End tokens.
        seed: Seed of the draws; None for greedy choices.
        device: Device of the processors.
        ahead: No code of the user's takes part, so it may run before the last token is read.
    """

    def __init__(
        self,
        prompt: NDArray[np.uint32],
        limit: int,
        processors: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
        criteria: Callable[[torch.Tensor, None], torch.Tensor] | None,
        stops: frozenset[int],
        seed: int | None,
        device: torch.device,
        *,
        ahead: bool = False,
    ) -> None:
        self.greedy, self.ahead = processors is None and seed is None, ahead
        self._processors, self._criteria, self._stops = processors, criteria, stops
        self._prompt, self._limit, self._seed, self._device = prompt, limit, seed, device
        self._ids: torch.Tensor | None = None
        self._length = self._taken = prompt.size
        self._draws: torch.Generator | None = None

    def choose(self, logits: torch.Tensor) -> int:
        """Choose the next token and return its id."""
        return int(self.draw(logits))

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token on its device, and add it to the text."""
        scores = logits[None].to(self._device, torch.float32, copy=True)
        if self._processors is not None:
            scores = self._processors(self._text(), scores)
        if self._seed is None:
            token = scores.argmax(dim=-1)
        else:
            if self._draws is None:
                self._draws = torch.Generator(self._device).manual_seed(self._seed)
            token = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._draws)
        self._note(token.view(()))
        return token.view(())

    def take(self, token: int) -> bool:
        """Record a chosen token; return whether the request ends with it."""
        self._taken += 1
        if self._taken > self._length:  # else `draw` has added it, maybe with later ones
            self._note(token)
        if token in self._stops:
            return True
        return self._criteria is not None and bool(self._criteria(self._text(), None).all())

    def _note(self, token: int | torch.Tensor) -> None:
        if self._processors is not None or self._criteria is not None:
            self._text()
            assert self._ids is not None
            self._ids[0, self._length] = token
        self._length += 1

    def _text(self) -> torch.Tensor:
        """Return `[1, S]`: the prompt and the tokens chosen so far."""
        if self._ids is None:
            self._ids = torch.empty(
                (1, self._prompt.size + self._limit), dtype=torch.int64, device=self._device
            )
            self._ids[0, : self._prompt.size] = torch.from_numpy(self._prompt.astype(np.int64))
        return self._ids[:, : self._length]


class GenerateSampler:
    """Sampler that chooses tokens as `generate` of a model does.

    Args:
        model: The model.
        options: Defaults of every request, over those of the model's generation config.

    Raises:
        ConfigError: See `read`.
        UnsupportedModelError: The model is an encoder-decoder.
    """

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                "an encoder-decoder does not continue its prompts", "Use model.generate"
            )
        self._model, self._defaults = model, options
        self.read(np.zeros(1, np.uint32), 1, {}, 0)

    def start(self, request: Any, prompt: NDArray[np.uint32], seed: int) -> GeneratedChoice:
        """Read a request's options when it is submitted; raises as `read`."""
        return self.read(prompt, request.max_new_tokens, request.options, seed)

    def read(
        self, prompt: NDArray[np.uint32], limit: int, options: Mapping[str, Any], seed: int
    ) -> GeneratedChoice:
        """Read options as `generate(prompt, max_new_tokens=limit, **options)` would.

        Args:
            prompt: Token ids.
            limit: Most new tokens.
            options: Options of one request.
            seed: Seed of its draws.

        Raises:
            ConfigError: An option is unknown, out of range or not served by an engine.
        """
        options = {**self._defaults, **options}
        if given := [name for name in _LENGTHS if options.get(name) is not None]:
            raise ConfigError(f"{given[0]} is no option here", "Pass Request(max_new_tokens=...)")
        try:
            return self._read(prompt, limit, options, seed)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"these options are invalid: {str(error).rstrip('.')}",
                "See GenerationConfig of transformers",
            ) from error

    def _read(
        self, prompt: NDArray[np.uint32], limit: int, options: dict[str, Any], seed: int
    ) -> GeneratedChoice:
        model, device = self._model, self._model.device
        apart = {name: options.pop(name, None) for name in _APART}
        config, unknown = model._prepare_generation_config(
            options.pop("generation_config", None), **options
        )
        _refuse(config, unknown)
        model._prepare_special_tokens(config, True, device=device, batch_size=1)
        config.max_new_tokens, config.max_length = limit, prompt.size + limit
        if config.min_new_tokens is not None:
            config.min_length = prompt.size + config.min_new_tokens
        ids = torch.from_numpy(prompt.astype(np.int64))[None].to(device)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=prompt.size,
            encoder_input_ids=ids,
            prefix_allowed_tokens_fn=apart["prefix_allowed_tokens_fn"],
            logits_processor=apart["logits_processor"] or [],
            device=device,
            model_kwargs={},
        )
        criteria = model._get_stopping_criteria(
            generation_config=config,
            stopping_criteria=apart["stopping_criteria"] or [],
            tokenizer=apart["tokenizer"],
        )
        stops = frozenset[int]()
        for ends in [each for each in criteria if type(each) is EosTokenCriteria]:
            stops |= set(ends.eos_token_id.tolist())
            criteria.remove(ends)
        for most in [each for each in criteria if type(each) is MaxLengthCriteria]:
            if most.max_length >= config.max_length:  # the engine counts those itself
                criteria.remove(most)
        drawn = seed if config.do_sample else None
        ahead = not criteria and not any(apart.values())
        rules = processors or None, criteria or None
        return GeneratedChoice(prompt, limit, *rules, stops, drawn, device, ahead=ahead)


def _refuse(config: Any, unknown: Mapping[str, Any]) -> None:
    if unknown:
        raise ConfigError(
            f"an engine does not know the options {', '.join(sorted(unknown))}",
            "Leave them out, or use model.generate",
        )
    mode = str(getattr(config.get_generation_mode(), "value", ""))
    if mode not in ("greedy_search", "sample"):
        raise ConfigError(
            f"an engine does not do {mode.replace('_', ' ')}", "Use model.generate for it"
        )
    for name, plain in _UNSERVED.items():
        if getattr(config, name, None) not in plain:
            raise ConfigError(f"an engine does not do {name}", "Use model.generate for it")
