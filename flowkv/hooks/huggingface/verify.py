"""`verify`: does FlowKV give on *this* model what the model's own cache gives?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from flowkv.cache.kv import KV, bind
from flowkv.core.errors import FlowKVError, UnsupportedModelError
from flowkv.hooks.huggingface.attach import base_model, door_of, install, installing
from flowkv.hooks.huggingface.door import ForwardHook
from flowkv.hooks.huggingface.identity import Identity
from flowkv.hooks.huggingface.inputs import Names
from flowkv.hooks.huggingface.probe import (
    encoder_inputs,
    ordinary_tokens,
    pair,
    probe,
    quiet,
    rows_alike,
)
from flowkv.hooks.huggingface.versions import DynamicCache

_NEW = 8
_POOL = "512MiB"
_PAGE = 16


@dataclass(frozen=True)
class Comparison:
    """One comparison.

    Attributes:
        name: What was run.
        identical: The tokens are the same.
        max_difference: Largest difference of any logit.
        reused: Tokens that were not computed again.
        tokens: Tokens of the prompts.
    """

    name: str
    identical: bool
    max_difference: float
    reused: int
    tokens: int


@dataclass(frozen=True)
class Report:
    """What `verify` found. `print(report)` shows it as a small table.

    Attributes:
        model: Class of the model.
        layers: "pages", "dense", "state" or "none" for each decoder layer: how it is read.
        cases: The comparisons.
        reasons: Why the model is refused, or read otherwise than in pages.
        ok: FlowKV serves the model and gives the same tokens.
    """

    model: str
    layers: tuple[str, ...] = ()
    cases: tuple[Comparison, ...] = ()
    reasons: tuple[str, ...] = ()
    ok: bool = False
    version: str = field(default_factory=lambda: transformers.__version__)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.cases:
            return "refused: the model keeps its own cache"
        if not self.ok:
            return "NOT the same as the model's own cache: do not attach"
        reused = "reuses prefixes" if any(case.reused for case in self.cases) else "reuses nothing"
        ways = sorted({way for way in self.layers if way in ("pages", "dense")})
        return f"same tokens as the model's own cache; {reused}, reads {' and '.join(ways)}"

    @property
    def max_difference(self) -> float:
        """Largest difference of any logit, over all cases."""
        return max((case.max_difference for case in self.cases), default=0.0)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [f"{self.model}, transformers {self.version}"]
        for way in dict.fromkeys(self.layers):
            which = [str(i) for i, found in enumerate(self.layers) if found == way]
            lines.append(f"  {way:<12} layers {_ranges(which)}")
        for case in self.cases:
            same = "same tokens" if case.identical else "OTHER TOKENS"
            lines.append(
                f"  {case.name:<12} {same}, {case.reused} of {case.tokens} tokens reused, "
                f"logits differ by at most {case.max_difference:.1e}"
            )
        lines += [f"  because {reason}" for reason in self.reasons]
        return "\n".join([*lines, f"  {self.verdict}"])


def verify(model: Any, *, tokens: int = 64) -> Report:
    """Runs a short conversation and a padded pair through the model's own cache and through FlowKV.

    Works on attached models and on others, which are left as they were. Safe beside running
    generations.

    Args:
        model: A transformers model.
        tokens: Length of the first prompt.

    Returns:
        What was found; true if FlowKV serves the model.

    Raises:
        ConfigError: `model` is no transformers model.

    Example:
        >>> print(flowkv.verify(model))  # doctest: +SKIP
    """
    model = base_model(model)
    name = type(model).__name__
    with KV(gpu=_POOL, page_size=_PAGE) as kv:
        try:
            with _door(model, kv) as door:
                cases = tuple(_cases(model, door, max(tokens, 2 * _PAGE)))
                reasons = (*_reasons(door), *_by_place(model, door))
                same = all(case.identical for case in cases)
                return Report(name, _ways(door), cases, reasons, same)
        except UnsupportedModelError as error:
            return Report(name, reasons=(error.problem,))
        except FlowKVError as error:
            return Report(name, reasons=(str(error),))


@contextmanager
def _door(model: Any, kv: KV) -> Iterator[ForwardHook]:
    """A door of its own, beside the one that an attached model has."""
    with installing():
        other = door_of(model)
        if other is None:
            yield install(model, kv)
            return
    with other.aside():
        reads = any(placed.in_pages for placed in other.plan.placed.values())
        plan = probe(model, kv.page_size, in_pages=reads).plan
    identity = Identity(model)  # of a cache that is about to be closed
    bind(kv, plan.geometry, identity.namespace)
    door = ForwardHook(model, kv, plan, identity, other.switch)
    door.continues = other.continues
    yield door


def _ways(door: ForwardHook) -> tuple[str, ...]:
    ways = []
    for index, spec in enumerate(door.plan.specs):
        placed = door.plan.placed.get(index)
        if placed is None:
            ways.append("state" if spec.stateful else "none")
        else:
            ways.append("pages" if placed.was_read and placed.in_pages else "dense")
    return tuple(ways)


def _reasons(door: ForwardHook) -> tuple[str, ...]:
    found = [door.switch.reason] if door.switch.reason else []
    if not door.continues:
        found.append("it does not go on from a cached prefix: nothing is reused")
    if any(not p.was_read for p in door.plan.placed.values()) and not door.switch.reason:
        found.append("its attention needs more than keys, values and a causal mask")
    return tuple(found)


def _by_place(model: Any, door: ForwardHook) -> tuple[str, ...]:
    with (door_of(model) or door).aside():
        alike = rows_alike(model, door.names, 2)
    if alike == "mixed":
        return ("the rows of a batch look at each other, so that batches share nothing",)
    if alike == "by place":
        return (
            "it answers a prompt otherwise in another row of a batch: by its place, so that rows "
            "share with the same row of equally large batches only",
        )
    return ()


def _cases(model: Any, door: ForwardHook, tokens: int) -> Iterator[Comparison]:
    ids = ordinary_tokens(model, door.names, tokens + 2 * _NEW)
    first = ids[:, :tokens]
    with quiet(model):
        answer, case = _compare(model, door, "turn 1", first)
        yield case
        second = torch.cat([first, answer, ids[:, -_NEW:]], dim=1)
        _, case = _compare(model, door, "turn 2", second)
        yield case
        if not door.names.encoder:
            short = tokens // 2 + 3
            pad = second.shape[1] - short
            rows = torch.cat([second, second.roll(pad, 1)])
            mask = torch.ones_like(rows)
            mask[1, :pad] = 0
            yield _compare(model, door, "padded pair", rows, mask)[1]


def _compare(
    model: Any, door: ForwardHook, name: str, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, Comparison]:
    mask = torch.ones_like(ids) if mask is None else mask
    with (door_of(model) or door).aside():
        native = DynamicCache(config=model.config.get_text_config(decoder=True))
        wanted, logits = _answer(model, door.names, ids, mask, native, None)
    given = {
        door.names.ids: ids,
        door.names.mask: mask,
        **encoder_inputs(model, door.names, len(ids)),
    }
    given[door.names.positions] = _positions(mask)
    cache = door.open({k: v for k, v in given.items() if k in door.names.parameters}, None)
    try:
        reused = cache.reused
        found, others = _answer(model, door.names, ids, mask, cache, wanted)
    finally:
        cache.close()
    difference = float((logits - others).abs().max())
    return wanted, Comparison(name, torch.equal(wanted, found), difference, reused, int(mask.sum()))


def _answer(
    model: Any,
    names: Names,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: Any,
    forced: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens `[B, n]` and their logits; goes on with `forced` ones if they are given."""
    found, logits = [], []
    whole, encoded = pair(names, cache), encoder_inputs(model, names, len(ids))
    for step in range(_NEW):
        past = cache.get_seq_length()
        given = {
            **encoded,
            names.ids: ids[:, past:],
            names.mask: mask,
            names.positions: _positions(mask)[:, past:],
            "past_key_values": whole,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        out = model(**{k: v for k, v in given.items() if k in names.parameters})
        last = out.logits[:, -1].float()
        token = last.argmax(-1, keepdim=True)
        found.append(token)
        logits.append(last)
        chosen = token if forced is None else forced[:, step : step + 1]
        ids, mask = torch.cat([ids, chosen], 1), torch.cat([mask, torch.ones_like(chosen)], 1)
    return torch.cat(found, 1), torch.stack(logits, 1)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


def _ranges(numbers: list[str]) -> str:
    found: list[list[int]] = []
    for number in map(int, numbers):
        if found and found[-1][-1] == number - 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, span)) for span in found)
