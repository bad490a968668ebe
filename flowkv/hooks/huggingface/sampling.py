"""Sampling by transformers itself: the model's own processors and criteria, one set a request.

A request's options mean what they mean to `model.generate`, defaults of the model's generation
config included, and are read by the same code. What is drawn is what `generate` draws for that
prompt alone after `torch.manual_seed(seed)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, UnsupportedModelError
from flowkv.hooks.huggingface.versions import EosTokenCriteria, MaxLengthCriteria, PreTrainedModel

_LENGTHS = ("max_length", "max_new_tokens")
_APART = (  # arguments of `generate` that are no part of a generation config
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "tokenizer",
)
_UNSERVED: Mapping[str, tuple[Any, ...]] = MappingProxyType(  # option: values that change nothing
    {
        "guidance_scale": (None, 1, 1.0),  # runs the model a second time
        "num_return_sequences": (None, 1),
        "token_healing": (None, False),  # rewrites the prompt
    }
)


class GeneratedChoice:
    """A request's processors and criteria, and the text that they look at.

    Args:
        prompt: Its tokens.
        limit: Most new tokens.
        processors: See `LogitsProcessorList`.
        criteria: Stopping criteria beside lengths and end tokens.
        stops: End tokens.
        seed: None if nothing is drawn.
        device: Where the processors work.
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
    ) -> None:
        self.greedy = processors is None and seed is None
        self._processors, self._criteria, self._stops = processors, criteria, stops
        self._prompt, self._limit, self._seed, self._device = prompt, limit, seed, device
        self._ids: torch.Tensor | None = None
        self._length = prompt.size
        self._draws: torch.Generator | None = None

    def choose(self, logits: torch.Tensor) -> int:
        """See `flowkv.engine.sampling.Choice.choose`."""
        scores = logits[None].to(self._device, torch.float32, copy=True)
        if self._processors is not None:
            scores = self._processors(self._text(), scores)
        if self._seed is None:
            return int(scores.argmax(dim=-1))
        if self._draws is None:
            self._draws = torch.Generator(self._device).manual_seed(self._seed)
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=self._draws))

    def take(self, token: int) -> bool:
        """See `flowkv.engine.sampling.Choice.take`."""
        if self._processors is not None or self._criteria is not None:
            self._text()
            assert self._ids is not None
            self._ids[0, self._length] = token
        self._length += 1
        if token in self._stops:
            return True
        return self._criteria is not None and bool(self._criteria(self._text(), None).all())

    def _text(self) -> torch.Tensor:
        """`[1, S]`: the prompt and what was made of it."""
        if self._ids is None:
            self._ids = torch.empty(
                (1, self._prompt.size + self._limit), dtype=torch.int64, device=self._device
            )
            self._ids[0, : self._prompt.size] = torch.from_numpy(self._prompt.astype(np.int64))
        return self._ids[:, : self._length]


class GenerateSampler:
    """Choices as `generate` of a model makes them.

    Args:
        model: The model.
        options: Defaults of every request, over those of the model's generation config.

    Raises:
        ConfigError: See `start`.
        UnsupportedModelError: The model encodes one text and decodes another.
    """

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                "prompts of an encoder-decoder are not what it continues", "Use model.generate"
            )
        self._model, self._defaults = model, options
        self.read(np.zeros(1, np.uint32), 1, {}, 0)

    def start(self, request: Any, prompt: NDArray[np.uint32], seed: int) -> GeneratedChoice:
        """See `flowkv.engine.sampling.Sampler.start`."""
        return self.read(prompt, request.max_new_tokens, request.options, seed)

    def read(
        self, prompt: NDArray[np.uint32], limit: int, options: Mapping[str, Any], seed: int
    ) -> GeneratedChoice:
        """Reads options as `generate(prompt, max_new_tokens=limit, **options)` would.

        Args:
            prompt: Token ids.
            limit: Most new tokens.
            options: Of one request.
            seed: Of its draws.

        Raises:
            ConfigError: An option is unknown, out of range or not served by an engine.
        """
        options = {**self._defaults, **options}
        if given := [name for name in _LENGTHS if options.get(name) is not None]:
            raise ConfigError(f"{given[0]} among the options", "Pass Request(max_new_tokens=...)")
        apart = {name: options.pop(name, None) for name in _APART}
        try:
            return self._read(prompt, limit, options, apart, seed)
        except (TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"these options make no processors: {str(error).rstrip('.')}",
                "See GenerationConfig of transformers",
            ) from error

    def _read(
        self,
        prompt: NDArray[np.uint32],
        limit: int,
        options: dict[str, Any],
        apart: dict[str, Any],
        seed: int,
    ) -> GeneratedChoice:
        model, device = self._model, self._model.device
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
        return GeneratedChoice(
            prompt, limit, processors or None, criteria or None, stops, drawn, device
        )


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
