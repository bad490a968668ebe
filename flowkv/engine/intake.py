"""What a request has to be before an engine takes it: wrong ones are refused at submit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import fields as fields_of
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import CapacityError, ConfigError, TokenError, did_you_mean
from flowkv.core.keys import Salt, as_tokens
from flowkv.engine.answer import Answer, Desk
from flowkv.engine.invariant import marked
from flowkv.engine.live import Live
from flowkv.engine.numbers import is_number, whole
from flowkv.engine.request import Request
from flowkv.engine.sampling import seed_of
from flowkv.engine.served import Served
from flowkv.engine.settings import Settings
from flowkv.runtime.opening import Tokens, plain
from flowkv.runtime.retention import make_care

_NUMBERS = count()  # of all engines: whoever watches a cache of several tells them apart
_FIELDS = [one.name for one in fields_of(Request) if one.name != "prompt"]


def make_request(prompt: Tokens | Request, fields: Mapping[str, Any]) -> Request:
    """A request from a prompt, or another request, and further fields.

    Raises:
        ConfigError: There is no such field, or its value is none.
    """
    for name in fields:
        if name not in _FIELDS:
            hint = did_you_mean(name, _FIELDS)
            raise ConfigError(
                f"a request has no field {name!r}",
                f"{hint}How tokens are chosen goes into options={{...}}, see flowkv.Request",
            )
    if isinstance(prompt, Request):
        request = replace(prompt, **fields) if fields else prompt
    else:
        request = Request(prompt=prompt, **fields)
    whole("max_new_tokens", request.max_new_tokens, 1)
    whole("priority", request.priority)
    if request.seed is not None:
        whole("seed", request.seed, 0)
        if request.seed >= 1 << 64:
            raise ConfigError(f"seed={request.seed}", "Use a whole number below 2**64")
    late = request.deadline_s
    if late is not None and (not is_number(late) or not late >= 0):
        raise ConfigError(f"deadline_s={late!r}", "Use seconds from submission, 0 or more")
    if not isinstance(request.options, Mapping):
        raise ConfigError(f"options={request.options!r}", "Pass a dictionary")
    _check_identity(request)
    return request


def _check_identity(request: Request) -> None:
    tenant, salts = request.tenant, request.salts
    if tenant is not None and not isinstance(tenant, str):
        raise ConfigError(f"tenant={tenant!r}", "Use text")
    if not all(isinstance(salt, Salt) for salt in salts):
        raise ConfigError(f"salts={salts!r}", "Pass flowkv.Salt objects")
    try:
        make_care(request.session, request.lease, request.retain, (tenant or "").encode()[:64])
    except UnicodeEncodeError as error:
        raise ConfigError(f"a name that is no text: {error}", "Use valid Unicode") from None


class Intake:
    """Checks requests against the model and the device, and numbers them. Thread-safe.

    Args:
        served: The model.
        settings: Of the engine.
        longest: Says of how many tokens the longest request is that the device has pages for.
        desk: Where answers are made.
    """

    def __init__(
        self, served: Served, settings: Settings, longest: Callable[[], int], desk: Desk
    ) -> None:
        self._served, self._settings, self._desk = served, settings, desk
        self._longest = longest
        self._places = count()

    def take(self, request: Request) -> Live:
        """What the engine makes of a request.

        Raises:
            CapacityError: It can never fit.
            ConfigError: An option of it is wrong.
            TokenError: Its prompt is empty, or holds what are no token ids of the model.
            UnsupportedModelError: It needs more than token ids.
        """
        prompt = self._prompt(request)
        if self._settings.invariant:
            request = marked(request)
        place, seed = next(self._places), request.seed
        seed = seed_of(self._settings.seed, place) if seed is None else int(seed)
        choice = self._served.sampler.start(request, prompt, seed)
        answer = Answer(self._desk, next(_NUMBERS))
        return Live(request, prompt, choice, answer, time.perf_counter(), copy_context())

    def _prompt(self, request: Request) -> NDArray[np.uint32]:
        given: object = request.prompt  # callers may pass anything
        if isinstance(given, str | Mapping):
            kind = "text" if isinstance(given, str) else "a mapping"
            raise TokenError(
                f"the prompt is {kind}", "Pass token ids, as in tokenizer(text).input_ids"
            )
        prompt = as_tokens(plain(request.prompt), self._served.vocabulary)
        if not prompt.size:
            raise TokenError("the prompt is empty", "Begin with one token at least")
        self._served.check(prompt, request.options)
        total = len(prompt) + request.max_new_tokens
        bounds = {
            "settings allow": self._settings.context_tokens,
            "model allows": self._served.positions,
            "device has pages for": self._longest(),
        }
        for name, most in bounds.items():
            if most is not None and total > most:
                raise CapacityError(
                    f"{len(prompt)} tokens and {request.max_new_tokens} new ones, where the "
                    f"engine's {name} {most}",
                    "Shorten the prompt, or lower max_new_tokens",
                )
        return prompt
