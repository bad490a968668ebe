"""Rules that drop tokens: the shipped ones keep the contract, the check notices who does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowkv.policy.sparsify import (
    SPARSIFIERS,
    KeepLatest,
    KeyNorm,
    SnapKV,
    Sparsifier,
    make_sparsifier,
)
from flowkv.testing import check_sparsifier
from tests.inside import ConfigError, GeometryError


class RandomTokens(Sparsifier):
    """The control: for each layer and head, tokens at random."""

    name = "random"

    def score(self, layer: int, keys: Any, values: Any, mass: Any) -> Any:
        return np.random.default_rng(layer).random(keys.shape[:2])


@pytest.mark.parametrize("rule", [*SPARSIFIERS.values(), RandomTokens])
def test_rules_keep_the_contract(rule: type[Sparsifier]) -> None:
    check_sparsifier(rule)


class Forgetful(KeepLatest):
    """Its answer depends on how often it was asked."""

    asked = 0

    def score(self, layer: int, keys: Any, values: Any, mass: Any) -> Any:
        type(self).asked += 1
        return np.random.default_rng(self.asked).random(keys.shape[:2])


class Writer(KeyNorm):
    def score(self, layer: int, keys: Any, values: Any, mass: Any) -> Any:
        keys *= 2
        return super().score(layer, keys, values, mass)


class Divider(KeyNorm):
    def score(self, layer: int, keys: Any, values: Any, mass: Any) -> Any:
        with np.errstate(all="ignore"):
            return 1 / super().score(layer, keys, values, mass)


class Flat(KeyNorm):
    def score(self, layer: int, keys: Any, values: Any, mass: Any) -> Any:
        return super().score(layer, keys, values, mass)[0]


class Greedy(KeepLatest):
    def keep(self, layer: int, keys: Any, values: Any, mass: Any = None) -> Any:
        return KeepLatest(1.0).keep(layer, keys, values)


class Sinkless(KeepLatest):
    def keep(self, layer: int, keys: Any, values: Any, mass: Any = None) -> Any:
        return KeepLatest(self.share, sink_tokens=0).keep(layer, keys, values)


class Fickle(KeepLatest):
    """A larger share keeps others."""

    def score(self, layer: int, keys: Any, values: Any, mass: Any) -> Any:
        return super().score(layer, keys, values, mass) * (1 if self.share_of(layer) < 0.6 else -1)


class Averaging(KeepLatest):
    """Keeps the mean of all shares in every layer."""

    def share_of(self, layer: int) -> float:
        return float(np.mean(self.share))


class FirstShare(KeepLatest):
    def keep(self, layer: int, keys: Any, values: Any, mass: Any = None) -> Any:
        return super().keep(layer if isinstance(self.share, float) else 0, keys, values)


class Reversed(KeepLatest):
    def keep(self, layer: int, keys: Any, values: Any, mass: Any = None) -> Any:
        return super().keep(layer, keys, values)[:, ::-1]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        *((Forgetful, "otherwise"), (Writer, "writes|otherwise"), (Divider, "finite")),
        *((Flat, "scores tokens"), (Greedy, "another number"), (Sinkless, "protected")),
        *((Fickle, "larger share"), (Reversed, "ascending")),
        (Averaging, "shares of other layers"),
        (FirstShare, "shares of other layers|its own share"),
    ],
)
def test_the_check_notices(rule: type[Sparsifier], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_sparsifier(rule, shrink=False)


def test_attention_that_was_asked_for_is_needed() -> None:
    keys = np.ones((1, 40, 2), np.float32)
    with pytest.raises(GeometryError, match="attention"):
        make_sparsifier("snapkv:0.5").keep(0, keys, keys)


def test_options_of_the_rules() -> None:
    keys = np.ones((2, 20, 4), np.float32)
    latest = KeepLatest(0.5, sink_tokens=2, recent_tokens=0)
    assert latest.keep(0, keys, keys).tolist() == [[0, 1, *range(12, 20)]] * 2
    longer = keys * np.arange(20, 0, -1, dtype=np.float32)[:, None]
    assert (
        KeyNorm(0.1, sink_tokens=0, recent_tokens=0).keep(0, longer, keys).tolist()
        == [[18, 19]] * 2
    )
    mass = np.zeros((2, 20))
    mass[0, 10] = mass[1, 3] = 1.0
    snap = SnapKV(0.15, sink_tokens=0, recent_tokens=0, kernel_tokens=3)
    assert snap.keep(0, keys, keys, mass).tolist() == [[9, 10, 11], [2, 3, 4]]
    with pytest.raises(ConfigError, match="odd"):
        SnapKV(0.5, kernel_tokens=4)


def test_each_layer_has_its_share() -> None:
    keys, rule = np.ones((2, 20, 4), np.float32), KeepLatest(np.linspace(1, 0.25, 4))
    assert rule.share == (1.0, 0.75, 0.5, 0.25)
    kept = [rule.keep(layer, keys, keys).shape for layer in range(4)]
    assert kept == [(2, 20), (2, 15), (2, 10), (2, 5)]
    assert [rule.count(0, layer) for layer in range(4)] == [0] * 4
    with pytest.raises(ConfigError, match="none for layer 4"):
        rule.count(20, 4)
    for wrong in ([0.5, 0], [0.5, 1.5], [], [[0.5]], [0.5, float("nan")]):
        with pytest.raises(ConfigError, match="one for each layer"):
            KeepLatest(wrong)
