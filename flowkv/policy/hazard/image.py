"""What a learned order carries over: the whole of it, or only its model, for a warm start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.hazard.features import BUCKETS, FEATURES, SIZES, TIP, TRAITS, describe_all
from flowkv.policy.hazard.model import (
    BASE_LIMIT,
    BASES,
    BINS,
    KNOTS,
    MODEL_SIZE,
    REACH,
    WEIGHT_LIMIT,
    fresh_model,
)
from flowkv.policy.hazard.tips import COUNTERS, OWN, TIPS, await_all
from flowkv.policy.order.compiled import SLOT_LIMIT
from flowkv.policy.order.image import column, damaged, uncolumn

Mind = tuple[NDArray[Any], ...]
MODEL_VERSION = 1
TAIL_LIMIT = 1e15  # counts of a model; a sum of them is finite
PSEUDO, PSEUDO_BASE = 0.5, 5.0  # sums of squared steps that a loaded weight starts with


class _Model(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    shape: list[int]
    weights: bytes
    bases: bytes
    reach: list[float]


def model_bytes(model: NDArray[np.float64]) -> bytes:
    """The weights of one model, without what it needs to learn on; less than 100 KB."""
    return msgspec.msgpack.encode(
        _Model(
            MODEL_VERSION,
            [BINS, KNOTS, *SIZES.values()],
            model[:BASES:2].astype("<f4").tobytes(),
            model[BASES:REACH:2].astype("<f4").tobytes(),
            model[REACH : REACH + 8].tolist(),
        )
    )


def model_of(saved: bytes) -> NDArray[np.float64]:
    """The row of a model that `model_bytes` gave, open to be taught otherwise.

    Raises:
        ConfigError: It is of another version or shape, or damaged.
    """
    wrong = "It comes from another version or is damaged: start without it"
    try:
        image = msgspec.msgpack.decode(saved, type=_Model)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is no hazard model: {error}", wrong) from None
    shape = [BINS, KNOTS, *SIZES.values()]
    sizes = len(image.weights), len(image.bases), len(image.reach)
    if (image.version, image.shape) != (MODEL_VERSION, shape) or sizes != (
        4 * BUCKETS * KNOTS,
        4 * BINS,
        8,
    ):
        raise ConfigError("the hazard model has another shape", wrong)
    row: NDArray[np.float64] = fresh_model()[0]
    row[:BASES:2] = np.frombuffer(image.weights, "<f4")
    row[BASES:REACH:2] = np.frombuffer(image.bases, "<f4")
    row[1:BASES:2], row[BASES + 1 : REACH : 2] = PSEUDO, PSEUDO_BASE
    row[REACH : REACH + 8] = image.reach
    if not is_model(row[None]):
        raise ConfigError("the hazard model holds what no model learns", wrong)
    return row


def is_model(models: NDArray[np.float64]) -> bool:
    """Whether these are within the bounds that learning keeps."""
    weights, bases = np.abs(models[:, :BASES:2]), np.abs(models[:, BASES:REACH:2])
    tail = models[:, REACH:]
    return bool(
        np.isfinite(models).all()
        and (weights <= WEIGHT_LIMIT).all()
        and (bases <= BASE_LIMIT).all()
        and (models[:, 1:REACH:2] >= 0).all()
        and (models[:, BASES + 1 : REACH : 2] > 0).all()
        and ((tail >= 0) & (tail <= TAIL_LIMIT)).all()
        and (models[:, REACH : REACH + 8].sum(axis=1) > 0).all()
    )


def mind_columns(mind: Mind) -> dict[str, object]:
    """What a mind remembers, as plain values."""
    own, tips, traits, _rows, models, counters = mind
    n = int(counters[TIPS])
    known = 1 + max(
        int(np.flatnonzero(own["tip"] >= 0).max(initial=-1)),
        int(own["up"].max(initial=-1)),
        int(tips["slot"][:n].max(initial=-1)),
        int(tips["low"][:n].max(initial=-1)),
    )
    return {
        "own": own[:known].tobytes(),
        "tips": tips[:n].tobytes(),
        "traits": column(traits[:n]),
        "models": column(models),
        "counters": column(counters),
    }


def mind_of(values: Mapping[str, Any]) -> Mind:
    """The mind that `mind_columns` told of, with no room to spare.

    Raises:
        ConfigError: It cannot be one.
    """
    size = [len(values.get(name) or b"") for name in ("own", "tips", "models")]
    known, n = size[0] // OWN.itemsize, size[1] // TIP.itemsize
    if known > SLOT_LIMIT:
        raise damaged("more blocks are known than there can be")
    own = uncolumn(values.get("own"), OWN, known)
    tips = uncolumn(values.get("tips"), TIP, n)
    traits = uncolumn(values.get("traits"), np.float64, n * TRAITS).reshape(n, TRAITS)
    counters = uncolumn(values.get("counters"), np.int64, COUNTERS)
    m = max(size[2] // (8 * MODEL_SIZE), 1)
    models = uncolumn(values.get("models"), np.float64, m * MODEL_SIZE).reshape(m, MODEL_SIZE)
    rows = np.zeros((n, FEATURES), np.int32)
    if m > 2 or not is_model(models) or not _fits(own, tips, traits, counters):
        raise damaged("what it learned is out of range")
    describe_all(tips, traits, rows)
    await_all(tips, counters)
    return own, tips, traits, rows, models, counters


def requests_of(value: object, n: int) -> dict[int, int]:
    """Requests under way and their tips, of `n`.

    Raises:
        ConfigError: They are not.
    """
    try:
        requests = msgspec.convert(value, dict[int, int])
    except msgspec.ValidationError as error:
        raise damaged(str(error)) from None
    if any(not 0 <= t < n for t in requests.values()):
        raise damaged("a request has no tip")
    return requests


def _fits(own: Any, tips: Any, traits: Any, counters: Any) -> bool:
    """Whether all numbers that are used as an index, or decide how long a loop runs, are sound."""
    n, room = len(tips), len(own)
    ranges = (
        (own["tip"], -1, n),
        (own["up"], -1, room),
        (own["next"], -1, 1 << 31),
        (own["at"], 0, 1 << 31),
        (tips["slot"], -1, room),
        (tips["low"], -1, room),
        (tips["stop"], 0, 128),
        (tips["done"], 0, 2),
        (tips["bin"], -1, BINS),
        (tips["turn"], 0, 1 << 31),
        (tips["known"], 0, 1 << 31),
        (tips["blocks"], 0, 1 << 31),
        (tips["seen"], 0, 1 << 31),
        (tips["output"], -1, 1 << 31),
        (counters[2 : 2 + BINS - 1], 0, n + 1),
    )
    if counters[TIPS] != n or not np.isfinite(traits).all() or not np.isfinite(own["pause"]).all():
        return False
    if n and (np.diff(tips["time"]) < 0).any():
        return False
    return all(bool(((low <= x) & (x < high)).all()) for x, low, high in ranges)
