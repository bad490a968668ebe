"""Sampling: choose the next token of a request, and decide whether a token ends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.digest import STEP, random_words
from flowkv.core.errors import ConfigError, NonFiniteError
from flowkv.engine.request import Request, is_number, is_whole, yours
from flowkv.kernels.operands import GPUS, Later


class Choice(Protocol):
    """Sampling rule of one request, with its state; it outlives rows that are dropped.

    A choice with a true `ahead` has a method `draw`, too: like `choose`, but it returns int64 `[]`
    on the device without waiting. The next `draw` may then come before `take` gets the previous
    token, and even after the last one.

    Attributes:
        greedy: The choice is the largest logit, the first of equals; `choose` is not called.
    """

    greedy: bool

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token.

        Args:
            logits: `[V]`, any float dtype.
        """

    def take(self, token: int) -> bool:
        """Record the chosen token; return True if the request ends with it."""


class Sampler(Protocol):
    """Interface of an object that makes a `Choice` for each request."""

    def start(self, request: Request, prompt: NDArray[np.uint32], seed: int) -> Choice:
        """Read a request's options at submission, and return its choice.

        Args:
            request: The request.
            prompt: Its tokens.
            seed: Seed of the draws, which depend on nothing else.

        Raises:
            ConfigError: An option is unknown, out of range or not served by an engine.
        """


class Drawn(NamedTuple):
    """Result of sampling for one row.

    Attributes:
        token: The next token; -1 with an error.
        over: The request ends with this token.
        error: Error that the row's choice raised; the other rows go on.
    """

    token: int
    over: bool
    error: BaseException | None = None


def draw(choices: Items[Choice], logits: torch.Tensor) -> Iterator[Drawn]:
    """Choose the next token of every row, one after the other; greedy rows in one pass.

    Args:
        choices: One a row.
        logits: `[B, V]`.
    """
    tokens, best = _largest(logits)
    for row, choice in enumerate(choices):
        yield _one(choice, logits, row, tokens[row], best[row])


def _one(choice: Choice, logits: torch.Tensor | None, row: int, largest: int, best: float) -> Drawn:
    if math.isnan(best):
        problem = "the model returned NaN"
        return Drawn(-1, True, NonFiniteError(problem, "Check its weights and its dtype"))
    try:
        token = largest if logits is None or choice.greedy else choice.choose(logits[row])
        return Drawn(token, choice.take(token))
    except BaseException as error:
        if not yours(error):
            raise
        return Drawn(-1, True, error)  # the error fails its request, not the step


class UnreadTokens:
    """Next tokens of some rows, chosen on their device and not read yet.

    Args:
        choices: One a row, each with a true `ahead`.
        logits: `[B, V]`.

    Attributes:
        ids: The tokens after `draw`, int64 `[B]` on the device.
    """

    def __init__(self, choices: Items[Any], logits: torch.Tensor) -> None:
        self._choices, self._logits = choices, logits
        self._best, self.ids = logits.max(dim=-1)
        self._drawn: dict[int, torch.Tensor | BaseException] = {}
        self._copy: Later | None = None

    def draw(self) -> None:
        """Choose the tokens, and start their copy to the host. Draws before an interrupt stay."""
        for row, choice in enumerate(self._choices):
            if not choice.greedy:
                self._drawn[row] = self._draw(choice, row)
        self._send()

    def _draw(self, choice: Any, row: int) -> torch.Tensor | BaseException:
        try:
            # NaN probabilities break a device for good; the row fails when its token is read.
            logits = self._logits[row].nan_to_num(0.0, posinf=math.inf, neginf=-math.inf)
            return choice.draw(logits)  # type: ignore[no-any-return]
        except BaseException as error:
            if not yours(error):
                raise
            return error

    @property
    def sent(self) -> bool:
        """Return whether all tokens are chosen: only then may a step run over them."""
        return self._copy is not None

    def _send(self) -> Later:
        for row, token in self._drawn.items():
            if isinstance(token, torch.Tensor):
                self.ids[row] = token
        self._copy = Later(self.ids, self._best)
        return self._copy

    def select(self, rows: list[int]) -> torch.Tensor:
        """Return the tokens of some rows, int64 `[n]` on the device."""
        if rows == [*range(len(self.ids))]:
            return self.ids
        return torch.cat([self.ids[row : row + 1] for row in rows])

    def read(self) -> list[Drawn | None]:
        """Wait for the tokens and return them; None for a row interrupted before it had one."""
        tokens, best = (
            part.tolist() for part in (self._copy or self._send()).result() if part is not None
        )
        return [self._read(row, token, best[row]) for row, token in enumerate(tokens)]

    def _read(self, row: int, token: int, best: float) -> Drawn | None:
        choice, drawn = self._choices[row], self._drawn.get(row)
        if isinstance(drawn, BaseException):
            return Drawn(-1, True, drawn)
        return _one(choice, None, row, token, best) if choice.greedy or row in self._drawn else None


def runs_behind(logits: torch.Tensor) -> bool:
    """Return whether logits may still be in computation, so that reading them would wait."""
    return logits.device.type in GPUS


def _largest(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return place and value of the largest logit of each row, the first of equals; NaN wins."""
    if logits.is_cpu and logits.dtype is torch.float32:  # ten times as fast as torch's
        array = logits.detach().numpy()
        places = array.argmax(-1)
        return places.tolist(), array[np.arange(len(places)), places].tolist()
    best, places = logits.max(dim=-1)
    return places.tolist(), best.tolist()


def seed_of(seed: int, number: int) -> int:
    """Derive the seed of a request that has none from the engine's and its number (splitmix64)."""
    return int(random_words(1, int(seed) + number * STEP)[0])


Chooser = Callable[[torch.Tensor, list[int]], int]
"""Your own rule: (float32 logits `[V]`, the new tokens so far) -> the next token."""


class Largest:
    """Choice of the most likely token.

    Args:
        stops: Tokens that end the request.
    """

    greedy = ahead = True

    def __init__(self, stops: Collection[int] = ()) -> None:
        self._stops = frozenset(stops)

    def choose(self, logits: torch.Tensor) -> int:
        """Return the most likely token."""
        return int(logits.argmax())

    def take(self, token: int) -> bool:
        """Record the chosen token; return True if the request ends with it."""
        return token in self._stops


class Weighted(Largest):
    """Choice of a random token by its probability, among the likeliest.

    The filters have the order and the rules of transformers, so that a seed draws the same tokens
    as there.

    Args:
        seed: Seed of the draws.
        stops: Tokens that end the request.
        temperature: Divides the logits.
        top_k: Draws among the k likeliest; 0 for all.
        top_p: Draws among the fewest tokens with probabilities that add up to it.
    """

    greedy = False

    def __init__(
        self,
        seed: int,
        stops: Collection[int] = (),
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> None:
        super().__init__(stops)
        self._seed = seed
        self._draws: torch.Generator | None = None
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token, drawn at random."""
        return int(self.draw(logits))

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw the next token; return it on its device."""
        scores = logits.float()[None] / self._temperature
        if self._top_k:
            least = scores.topk(min(self._top_k, scores.shape[-1])).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self._top_p < 1.0:
            rising, places = scores.sort(descending=False)
            spare = rising.softmax(-1).cumsum(-1) <= 1.0 - self._top_p
            spare[..., -1] = False
            scores = scores.masked_fill(spare.scatter(-1, places, spare), -torch.inf)
        if self._draws is None:  # equal to `torch.manual_seed(seed)` on that device
            self._draws = torch.Generator(logits.device).manual_seed(self._seed)
        return torch.multinomial(scores.softmax(-1), 1, generator=self._draws).view(())


class Chosen(Largest):
    """Choice by a function of the user's own.

    Args:
        choose: See `Chooser`.
        stops: Tokens that end the request.
    """

    greedy = ahead = False

    def __init__(self, choose: Chooser, stops: Collection[int] = ()) -> None:
        super().__init__(stops)
        self._choose, self._made = choose, list[int]()

    def choose(self, logits: torch.Tensor) -> int:
        """Return the token that the function chooses."""
        token = int(self._choose(logits.float(), self._made))
        if not 0 <= token < logits.shape[-1]:
            raise ConfigError(
                f"choose returned token {token} of a vocabulary of {logits.shape[-1]}",
                "Return an id in it",
            )
        return token

    def take(self, token: int) -> bool:
        """Record the chosen token; return True if the request ends with it."""
        self._made.append(token)
        return super().take(token)


class OwnSampler:
    """Sampler for your own models.

    Options of a request: `do_sample` (False), `temperature` (1.0), `top_k` (0: all), `top_p` (1.0),
    `eos_token_id` (one or several) and `choose` (a `Chooser`, in place of the others).

    Args:
        **options: Defaults of every request.

    Raises:
        ConfigError: See `start`.
    """

    def __init__(self, **options: Any) -> None:
        self._defaults = options
        _own(options, 0)

    def start(self, request: Request, prompt: NDArray[np.uint32], seed: int) -> Choice:
        """Read a request's options at submission, and return its choice."""
        return _own({**self._defaults, **request.options}, seed)


_NAMES = ("choose", "do_sample", "eos_token_id", "temperature", "top_k", "top_p")
_SHAPING = ("temperature", "top_k", "top_p")


def _own(options: Mapping[str, Any], seed: int) -> Choice:
    options = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(set(options) - set(_NAMES)):
        raise ConfigError(f"unknown options {', '.join(unknown)}", f"Use {', '.join(_NAMES)}")
    stops = _stops(options.get("eos_token_id", ()))
    shaping = {name: options[name] for name in _SHAPING if name in options}
    if "choose" in options:
        if shaping or options.get("do_sample") or not callable(options["choose"]):
            raise ConfigError("`choose` takes a function and no other rule", "Leave them out")
        return Chosen(options["choose"], stops)
    if not options.get("do_sample", False):
        if shaping:
            raise ConfigError(
                f"{', '.join(shaping)} without `do_sample`", "Add do_sample=True, or leave it out"
            )
        return Largest(stops)
    temperature, top_p = shaping.get("temperature", 1.0), shaping.get("top_p", 1.0)
    if not is_number(temperature) or not temperature > 0.0:
        raise ConfigError(
            "`temperature` must be a number above 0", "Use do_sample=False for the likeliest"
        )
    if not is_number(top_p) or not 0.0 < top_p <= 1.0:
        raise ConfigError("`top_p` must be a number above 0, at most 1", "Use 1.0 for all tokens")
    top_k = shaping.get("top_k", 0)
    if not is_whole(top_k) or top_k < 0:
        raise ConfigError("`top_k` must be a whole number, at least 0", "Use 0 for all tokens")
    return Weighted(seed, stops, **shaping)


def _stops(ids: Any) -> frozenset[int]:
    ids = ids.tolist() if isinstance(ids, torch.Tensor | np.ndarray) else ids
    several = list(ids) if np.iterable(ids) else [ids]
    if not all(map(is_whole, several)):
        raise ConfigError(f"eos_token_id={ids!r}", "Pass a token id or several")
    return frozenset(map(int, several))


# Elementwise functions, computed for all elements by the same instructions.
#
# On a CPU, most elements of a tensor go through vector instructions, and the rest at the end of
# each thread's part through the C library, where `exp` rounds differently. The number of elements
# decides which ones are the rest. A tensor that is padded to whole vectors has no rest.

UNEVEN = frozenset(
    {"celu", "elu", "exp2", "gelu", "glu", "mish", "pow", "rsqrt", "selu", "sigmoid", "silu"}
    | {"softplus", "swish"}
)
"""Functions that round differently in the two ways; all others were seen to agree."""
EXACT_POWERS = (1, 2, 3, 0.5, -1, -2)
"""Powers that are products, quotients and square roots."""
VECTORS = 64
"""Elements that a vector loop takes at once, at most."""
GRAIN = 32768
"""Elements that one thread processes before torch adds another."""
GELU_GRAIN = 16000
"""Elements from which `gelu` is shared by all threads."""


def evenly(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return `func(*args, **kwargs)`, with bits of each element that do not depend on the others.

    Args:
        func: Function of one tensor, or of one tensor and numbers.
        name: Its name, one of `UNEVEN`; with "_" appended if it works in place.
        args: Its arguments, the tensor first.
        kwargs: Its keyword arguments; the tensor may be `input`.
    """
    given = dict(kwargs)
    x, *others = (given.pop("input"), *args) if "input" in given else args
    if _is_even(x, name, others, given):
        return func(*args, **kwargs)
    if name == "glu":
        left, right = x.chunk(2, *others, **given)
        return left * evenly(torch.sigmoid, "sigmoid", (right,), {})
    inplace = given.pop("inplace", False) or name.endswith("_")
    if name.endswith("_"):
        func = getattr(torch, name[:-1], None) or getattr(torch.nn.functional, name[:-1])
    n_elements = x.numel()
    flat = x.new_zeros(_filled(n_elements, name))
    flat[:n_elements].view(x.shape).copy_(x)
    out = func(flat, *others, **given)[:n_elements].view(x.shape)
    return x.copy_(out) if inplace else out


def _is_even(x: Any, name: str, others: list[Any], given: dict[str, Any]) -> bool:
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu" or not x.is_floating_point():
        return True
    if any(isinstance(other, torch.Tensor) for other in (*others, *given.values())):
        return True  # a function of several tensors
    if name == "pow" and (others or [given.get("exponent")])[0] in EXACT_POWERS:
        return True
    if name == "rsqrt" and x.dtype is torch.float32:
        return True
    even = x.is_contiguous() and _filled(x.numel(), name) == x.numel()
    return even and name != "glu"


def _filled(n_elements: int, name: str) -> int:
    """Return the next number of elements that gives each thread whole vectors."""
    while True:
        step = VECTORS * _threads(n_elements, name)
        filled = -(-n_elements // step) * step
        if VECTORS * _threads(filled, name) == step:
            return filled
        n_elements = filled


def _threads(n_elements: int, name: str) -> int:
    """Return how many threads torch uses for so many elements."""
    most = torch.get_num_threads()
    if name.startswith("gelu"):
        return most if n_elements > GELU_GRAIN else 1
    return min(most, max(1, -(-n_elements // GRAIN)))
