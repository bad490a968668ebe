"""`KV.calibrate`: how a model's pages are coded on cold tiers, learned from a text.

Each window of the text is a prompt and what follows. The gradients of the following tokens by the
prompt's keys and values are the price of errors there; what coded pages cost is measured on windows
that nothing was learned from.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from flowkv.cache.kv import KV, warn
from flowkv.core.errors import ConfigError, StateError
from flowkv.core.keys import as_tokens
from flowkv.hooks.huggingface.blend import key_turns
from flowkv.hooks.huggingface.load import ENCODERS
from flowkv.hooks.huggingface.probe import execution_device, quiet
from flowkv.hooks.huggingface.versions import DynamicCache
from flowkv.kvt.codec import PageCoder
from flowkv.kvt.learning import MOST_BITS, GroupLearner, Scores, coded_pages, search
from flowkv.kvt.tier import PageBases

MOST_WINDOWS, FEW_WINDOWS, LEAST_WINDOWS = 16, 6, 4
LONGEST, SHORTEST = 1024, 256
"""Tokens of a window; shorter ones than the longest where the text has fewer than six of those."""
LEAST_DISTINCT = 0.5
"""Least share of different runs of four tokens: what is learned from repetition holds for nothing
else."""
_SHARE = 4  # a window's last quarter is predicted
_LEAST_PREDICTED = 8
_JUDGED = 3  # every third window is judged, and not learned from
_SAMPLES = 3  # the tables are filled from the coefficients of so many windows
_SEED = 2027


_Exact = tuple[torch.Tensor, Any, torch.Tensor]


class Calibrator:
    """Learns bases for the pages of an attached model.

    Args:
        door: The model's door.
    """

    def __init__(self, door: Any) -> None:
        self._door, self._model, self._names = door, door.model, door.names
        self._kv: KV = door.kv
        self._config = self._model.config.get_text_config(decoder=True)
        self.prompt = self.window = 0

    def _cut(self, count: int) -> int:
        """Set the lengths of windows for so many tokens; return the number of windows."""
        positions = getattr(self._config, "max_position_embeddings", None) or LONGEST
        whole = min(positions, LONGEST, max(count // FEW_WINDOWS, SHORTEST))
        size = self._kv.page_size
        self.prompt = max(whole * (_SHARE - 1) // _SHARE // size, 1) * size
        self.window = min(self.prompt * _SHARE // (_SHARE - 1), positions)
        if self.window - self.prompt < _LEAST_PREDICTED:
            raise ConfigError(
                f"pages of {size} tokens leave too few of the model's {positions} positions",
                "Attach the model with a smaller page_size=",
            )
        return min(count // self.window, MOST_WINDOWS)

    def _refuse(self, bases: PageBases) -> None:
        """Refuse models and caches whose pages cannot be coded."""
        name, codec = type(self._model).__name__, self._kv.config.codec
        if codec != "raw":
            raise ConfigError(f"pages in codec={codec!r} are coded already", "Leave cold= out")
        why = ""
        if self._names.encoder:
            why = "answers depend on an encoder's input, too"
        elif self._door.plan.stateful:
            why = "it has layers other than attention"
        elif not bases.forms:
            why = "no layer keeps all keys and values in 16 or 32 bits"
        if why:
            raise ConfigError(
                f"the pages of this {name} cannot be coded: {why}", "Attach it without cold="
            )

    @torch.inference_mode(False)
    def calibrate(self, tokens: Any, bases: PageBases, bound: float) -> dict[str, float]:
        """Learn bases from token ids or texts, and use them if they keep to a divergence.

        Raises:
            ConfigError: There are too few tokens, or they repeat; or pages cannot be coded.
            StateError: The model was forgotten, or changed, meanwhile.
        """
        self._refuse(bases)
        since = bases.dropped
        ids = _ids(self._model, bases.kept_tokens() if tokens is None else tokens)
        count = self._cut(len(ids))
        if count < LEAST_WINDOWS:
            raise ConfigError(
                f"{len(ids)} tokens are too few to calibrate pages",
                f"Give {LEAST_WINDOWS * self.window} or more, of the kind that the cache will hold",
            )
        starts = np.linspace(0, len(ids) - self.window, count).astype(np.int64)
        cut = np.stack([ids[start : start + self.window] for start in starts])
        runs = np.lib.stride_tricks.sliding_window_view(cut, 4, 1).reshape(-1, 4)
        distinct = len(np.unique(runs, axis=0))
        if distinct < LEAST_DISTINCT * len(runs):
            raise ConfigError(
                f"the text repeats itself: {distinct} of {len(runs)} runs of four tokens differ,"
                " and what is learned from them holds for no other text",
                "Give a text of the kind that the cache will hold, each passage once",
            )
        windows = [*torch.from_numpy(cut)]
        with self._door.aside(), quiet(self._model):
            return self._learn(windows, bases, bound, since)

    def _learn(
        self, windows: list[torch.Tensor], bases: PageBases, bound: float, since: int
    ) -> dict[str, float]:
        turns = key_turns(self._model, self._door, self._config, strict=False)
        learners = {
            group: GroupLearner(form.layout, [turns.get(layer) for layer in self._layers(group)])
            for group, form in bases.forms.items()
        }
        judged = windows[_JUDGED - 1 :: _JUDGED]
        generator = torch.Generator().manual_seed(_SEED)
        samples = 0
        for number, window in enumerate(windows):
            if number % _JUDGED == _JUDGED - 1:
                continue
            cache = self._prompt_cache(window)
            gradients = self._gradients(window, cache, sorted(learners), generator)
            for group, learner in learners.items():
                sides = self._sides(cache, group)
                learner.add(sides, gradients[group], sample=samples < _SAMPLES)
            samples += 1
        exact = self._exact(judged)
        score, first = partial(self._score, learners, exact), self._first(learners, bound)
        found = search(score, bound, first)
        good = {s: one for s, one in found.items() if one.kl <= bound and one.bits <= MOST_BITS}
        if not good:
            least = min(found.values(), key=lambda one: one.kl)
            warn(
                self._kv,
                "cold",
                "pages of cold tiers stay as they are: no setting tried keeps to a divergence of"
                f" {bound:g} (the best costs {least.kl:.3g} at {least.bits:.2f} bits a value)."
                " Calibrate with more text, or name a larger divergence: cold='kvt:kl=...'.",
            )
            return {"kept": 0.0, **_shown(min(found), least, exact)}
        step = max(good)
        measured = _shown(step, good[step], exact)
        coders = {}
        for group, learner in learners.items():
            coders[group] = bases.add(learner.coder(step, measured))
        self._door.refresh(private=False)  # a model that changed has other bases
        if self._kv.bases is not bases or not bases.use(coders, since):
            raise StateError(
                "the model was forgotten, or changed, while it was learned from", "Calibrate again"
            )
        return {"kept": 1.0, **measured}

    def judge(self, tokens: Any, coders: dict[int, PageCoder]) -> Scores:
        """Return what coded pages, by layer group, change in another text."""
        ids = torch.from_numpy(as_tokens(tokens).astype(np.int64))
        count = self._cut(len(ids))
        windows = [ids[n * self.window : (n + 1) * self.window] for n in range(count)]
        with self._door.aside(), quiet(self._model):
            return self._judged(coders, self._exact(windows))

    def _exact(self, windows: list[torch.Tensor]) -> list[_Exact]:
        """Return windows with the caches of their prompts and the predictions behind them."""
        caches = [self._prompt_cache(window) for window in windows]
        tails = [self._tail(*pair) for pair in zip(windows, caches, strict=True)]
        return list(zip(windows, caches, tails, strict=True))

    def _layers(self, group: int) -> tuple[int, ...]:
        return tuple(self._door.plan.geometry.groups[group].layers)

    def _first(self, learners: dict[int, GroupLearner], bound: float) -> float:
        """Return the step at which all axes would cost the bound, if none were left out."""
        values = sum(learner.values for learner in learners.values())
        tail = self.window - self.prompt
        return math.sqrt(24 * bound * tail / (self.prompt * values))

    def _forward(self, ids: torch.Tensor, cache: Any, at: int) -> torch.Tensor:
        ids = ids[None].to(execution_device(self._model))
        given = {self._names.ids: ids, self._names.cache: cache, "use_cache": True}
        if not self._names.counts:
            places = torch.arange(at, at + ids.shape[1], device=ids.device)
            given[self._names.positions] = places[None]
        return self._model(**given).logits[0]  # type: ignore[no-any-return]

    def _prompt_cache(self, window: torch.Tensor) -> Any:
        cache = DynamicCache()  # without a configuration, sliding layers keep all tokens too
        with torch.no_grad():
            self._forward(window[: self.prompt], cache, 0)
        return cache

    def _tail(self, window: torch.Tensor, cache: Any) -> torch.Tensor:
        with torch.no_grad():
            logits = self._forward(window[self.prompt :], copy.deepcopy(cache), self.prompt)
            return functional.log_softmax(logits.float(), -1).cpu()

    def _sides(self, cache: Any, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[layers, heads, tokens, dim]` of a group on the CPU."""
        some = [cache.layers[layer] for layer in self._layers(group)]
        keys, values = (
            [getattr(one, name)[0].cpu() for one in some] for name in ("keys", "values")
        )
        return torch.stack(keys), torch.stack(values)

    def _gradients(
        self, window: torch.Tensor, cache: Any, groups: list[int], generator: torch.Generator
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the gradients of sampled log-probabilities by keys and values, by group."""
        own = copy.deepcopy(cache)
        layers = [own.layers[layer] for group in groups for layer in self._layers(group)]
        for one in layers:
            one.keys = one.keys.detach().requires_grad_()
            one.values = one.values.detach().requires_grad_()
        leaves = [side for one in layers for side in (one.keys, one.values)]
        try:
            with torch.enable_grad():
                logits = self._forward(window[self.prompt :], own, self.prompt).float()
                said = functional.log_softmax(logits, -1)
                drawn = torch.multinomial(said.detach().exp().cpu(), 1, generator=generator)
                total = said.gather(1, drawn.to(said.device)).sum()
                found = iter(torch.autograd.grad(total, leaves))
        except RuntimeError as error:
            raise ConfigError(
                f"the gradients of this {type(self._model).__name__} cannot be computed ({error})",
                "Leave cold= out: without them no divergence can be kept to",
            ) from None
        for one in layers:
            one.keys, one.values = next(found), next(found)
        return {group: self._sides(own, group) for group in groups}

    def _score(self, learners: dict[int, GroupLearner], exact: list[_Exact], step: float) -> Scores:
        return self._judged({g: one.coder(step, {}) for g, one in learners.items()}, exact)

    def _judged(self, coders: dict[int, PageCoder], exact: list[_Exact]) -> Scores:
        """Measure what coded pages change behind the prompts of windows."""
        kl = same = nll = 0.0
        coded_bytes = raw_bytes = tokens = 0
        for window, cache, wanted in exact:
            own = copy.deepcopy(cache)
            for group, coder in coders.items():
                sides, coded, raw = coded_pages(coder, self._sides(cache, group))
                coded_bytes, raw_bytes = coded_bytes + coded, raw_bytes + raw
                for n, layer in enumerate(self._layers(group)):
                    one = own.layers[layer]
                    one.keys = sides[0][n][None].to(one.keys.device)
                    one.values = sides[1][n][None].to(one.values.device)
            got = self._tail(window, own)
            kl += float((wanted.exp() * (wanted - got)).sum())
            same += float((wanted.argmax(-1) == got.argmax(-1)).sum())
            text = window[self.prompt + 1 :, None]
            nll += float((wanted[:-1] - got[:-1]).gather(1, text).sum())
            tokens += len(wanted)
        item = next(iter(coders.values())).item_bytes
        bits = 8 * item * coded_bytes / raw_bytes
        return Scores(kl / tokens, same / tokens, nll / tokens, bits)


def _ids(model: Any, given: Any) -> NDArray[np.int64]:
    """Return token ids, or those of texts."""
    texts = [given] if isinstance(given, str) else given
    if not (isinstance(texts, list) and texts and all(isinstance(one, str) for one in texts)):
        return as_tokens(given).astype(np.int64)
    if (encode := ENCODERS.get(model)) is None:
        raise ConfigError(
            "the tokenizer of this model is unknown: flowkv.load did not load it",
            "Pass token ids: kv.calibrate(tokenizer(text).input_ids)",
        )
    return np.concatenate([np.array(encode(one), np.int64) for one in texts])


def _shown(step: float, scores: Scores, exact: list[Any]) -> dict[str, float]:
    return {
        "step": step,
        "bits": scores.bits,
        "kl": scores.kl,
        "same_token": scores.same_token,
        "perplexity": math.exp(scores.nll) - 1,
        "tokens": float(sum(len(one[2]) for one in exact)),
    }


def calibrating(door: Any) -> Callable[[Any, float], dict[str, float]]:
    """Return the function behind `KV.calibrate` for an attached model."""

    def calibrate(tokens: Any, bound: float) -> dict[str, float]:
        door.refresh(private=False)
        if door.identity.foreign:
            raise StateError(
                f"the pages of this model are not shared: {door.identity.foreign}",
                'Remove that from the model, or attach it with revision="..."',
            )
        return Calibrator(door).calibrate(tokens, door.kv.bases, bound)

    return calibrate
