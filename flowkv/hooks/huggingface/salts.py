"""What keys and values depend on beside token ids and images: encoder outputs, options, types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.keys import Salt
from flowkv.hooks.huggingface.fingerprint import digest_of


def condition_salts(condition: Mapping[str, Any], row: int, rows: int) -> list[Salt]:
    """Salts for what every token of a row depends on, such as the encoder's output.

    Tensors whose first dimension counts rows are taken apart, so that a row's salt does not depend
    on its neighbours.

    Raises:
        TypeError: A value has no digest.
    """
    if not condition:
        return []
    return [Salt(0, digest_of("condition", _row(condition, row, rows)))]


def type_salts(name: str, types: NDArray[np.int64]) -> list[Salt]:
    """Salts for a row's token types: one wherever the type changes, none while it is zero."""
    changes = np.flatnonzero(np.diff(types, prepend=0))
    return [Salt(int(at), digest_of("type", name, int(types[at]))) for at in changes]


def column_salts(pad: int, positions: torch.Tensor | None) -> list[Salt]:
    """A salt for positions that the model makes itself, in which it may count the padding."""
    return [Salt(0, digest_of("columns", pad))] if pad and positions is None else []


def _row(value: Any, row: int, rows: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[row] if value.dim() and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        return {key: _row(item, row, rows) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_row(item, row, rows) for item in value]
    return value
