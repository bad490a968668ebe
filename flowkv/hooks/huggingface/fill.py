"""What fills placeholder tokens: images and sounds, or what the model's encoders made of them.

Placeholder tokens are the same for every image, so pages from the first placeholder on are salted
with the content that fills it. Where it is beyond doubt which content fills which run of
placeholders, each run has a salt of its own: a conversation with a second image still shares its
beginning, and only what fills the rest of the prompt is given to the model. Everywhere else all
content salts all runs, and is used whole or not at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.keys import Salt
from flowkv.hooks.huggingface.salts import digest_of

ENCODED = "mm_encoder_outputs"
_MODALITIES = ("image", "video", "audio", "speech", "vision")
_MARKS = ("start", "begin", "end")
_ID_NAMES = ("_token_id", "_token_index")
_FEATURES = ("pooler_output", "deepstack_features")
"""What models read of encoder outputs that are given to them, by placeholder token in order."""


class Run(NamedTuple):
    """Adjacent placeholders of one kind.

    Attributes:
        row: Batch row.
        first: First token, without padding.
        stop: One past the last.
        token: The placeholder's id.
    """

    row: int
    first: int
    stop: int
    token: int


def placeholder_ids(config: Any) -> dict[str, int]:
    """Placeholder ids by the names of the configuration, such as `image_token_id`."""
    named = dict(vars(config))
    for word in _MODALITIES:  # names that the configuration maps to others
        named[f"{word}_token_id"] = getattr(config, f"{word}_token_id", None)
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, int)
        and name.endswith(_ID_NAMES)
        and any(word in name for word in _MODALITIES)
        and not any(word in name for word in _MARKS)
    }


class Fill:
    """What fills the placeholders of a batch of whole prompts.

    Attributes:
        runs: In the order in which content fills them: by row, then by position.
        exact: It is known which content fills which run.

    Args:
        prompts: Tokens of each row, without padding.
        inputs: The arguments that fill placeholders, by name.
        placeholders: As `placeholder_ids` found them.
    """

    def __init__(
        self,
        prompts: Sequence[NDArray[np.uint32]],
        inputs: Mapping[str, Any],
        placeholders: Mapping[str, int],
    ) -> None:
        self.inputs, self.rows = dict(inputs), len(prompts)
        ids = set(placeholders.values()) if inputs else set()
        self.runs = [
            Run(row, *run) for row, tokens in enumerate(prompts) for run in _runs(tokens, ids)
        ]
        self._parts = self._by_item() or self._by_feature(placeholders)
        self.exact = self._parts is not None

    def salts(self, row: int) -> list[Salt]:
        """Salts of a row.

        Raises:
            TypeError: Some content has no digest.
        """
        if not self.inputs:
            return []
        own = [(i, run) for i, run in enumerate(self.runs) if run.row == row]
        if self._parts is not None:
            return [Salt(run.first, digest_of("fill", self._parts[i])) for i, run in own]
        layout = [list(run) for run in self.runs]
        first = own[0][1].first if own else 0
        return [Salt(first, digest_of("fill", self.inputs, layout, row))]

    def cut(self, base: int, pads: Sequence[int]) -> int:
        """The last column, at most `base`, at which the batch can be cut in two."""
        if not self.inputs:
            return base
        places = [(pads[run.row] + run.first, pads[run.row] + run.stop) for run in self.runs]
        if self.exact:
            while inside := [first for first, stop in places if first < base < stop]:
                base = min(inside)
            return base
        filled = {run.row for run in self.runs}
        if len(filled) == self.rows and all(stop <= base for _, stop in places):
            return base
        firsts = [first for first, _ in places]
        firsts += [pad for row, pad in enumerate(pads) if row not in filled]
        return min([base, *firsts])

    def rest(self, base: int, pads: Sequence[int]) -> dict[str, Any]:
        """The arguments for the part of the batch behind column `base`, which `cut` chose."""
        return self.of({row: (base - pad, sys.maxsize) for row, pad in enumerate(pads)})

    def parts(self, row: int, first: int, stop: int) -> bool:
        """Whether a span of a row's tokens can be filled by itself: no run lies across its ends."""
        met = [r for r in self.runs if r.row == row and r.first < stop and r.stop > first]
        return all(self.exact and first <= run.first and run.stop <= stop for run in met)

    def whole(self, row: int, stop: int, page_size: int) -> int:
        """Where a part of a row that has at least `stop` tokens, in pages, may end."""
        runs = [run for run in self.runs if run.row == row]
        if runs and not self.exact:
            stop = max(stop, *(run.stop for run in runs))
        while any(run.first < stop < run.stop for run in runs) or stop % page_size:
            stop += page_size - stop % page_size
        return stop

    def of(self, spans: Mapping[int, tuple[int, int]]) -> dict[str, Any]:
        """The arguments for spans of tokens of some rows, in which runs lie whole or not at all."""
        left = [
            i
            for i, run in enumerate(self.runs)
            if run.row in spans and spans[run.row][0] <= run.first < spans[run.row][1]
        ]
        if len(left) == len(self.runs):
            return dict(self.inputs)
        if not left:
            return {}
        ((name, value),) = self.inputs.items()
        if name != ENCODED:
            return {name: value[left]}
        found = {}
        for modality, output in value.items():
            rows = self._feature_rows[modality]
            kept = [row for i in left for row in range(*rows.get(i, (0, 0)))]
            if kept:
                found[modality] = _take(output, kept)
        return {name: found}

    def _by_item(self) -> list[Any] | None:
        """Item i of the one tensor fills run i.

        Beyond doubt if there are as many items as runs, and all runs are equally long: items of one
        tensor have one shape and so give equally many features, which fill placeholders in order.
        """
        if len(self.inputs) != 1 or not self.runs:
            return None
        (value,) = self.inputs.values()
        if not isinstance(value, torch.Tensor) or value.dim() < 3 or len(value) != len(self.runs):
            return None
        lengths = {(run.stop - run.first, run.token) for run in self.runs}
        return list(value) if len(lengths) == 1 else None

    def _by_feature(self, placeholders: Mapping[str, int]) -> list[Any] | None:
        """Row i of a modality's features fills its i-th placeholder, as in `generate`."""
        outputs = self.inputs.get(ENCODED)
        if len(self.inputs) != 1 or not isinstance(outputs, Mapping) or not self.runs:
            return None
        self._feature_rows: dict[str, dict[int, tuple[int, int]]] = {}
        parts: list[Any] = [None] * len(self.runs)
        for modality, output in outputs.items():
            if output is None:
                continue
            features = _features(output)
            token, at = placeholders.get(f"{modality}_token_id"), 0
            rows = self._feature_rows[modality] = {}
            for i, run in enumerate(self.runs):
                if run.token == token:
                    rows[i] = (at, at + run.stop - run.first)
                    at = rows[i][1]
            if features is None or any(len(table) != at for table in features):
                return None
            for i, (first, stop) in rows.items():
                parts[i] = [modality, *(table[first:stop] for table in features)]
        return parts if all(part is not None for part in parts) else None


def _runs(tokens: NDArray[np.uint32], ids: set[int]) -> list[tuple[int, int, int]]:
    """(first, past the last, id) of each run of equal placeholder tokens."""
    if not ids:
        return []
    held = np.isin(tokens, np.fromiter(ids, np.uint32, len(ids)))
    kinds = np.where(held, tokens.astype(np.int64), -1)
    edges = np.flatnonzero(np.diff(kinds, prepend=-1, append=-1))
    spans = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return [(first, stop, int(kinds[first])) for first, stop in spans if kinds[first] >= 0]


def _tables(features: Any) -> torch.Tensor | None:
    """Features of all items as one `[placeholders, hidden]` table."""
    try:
        return torch.cat([item.reshape(-1, item.shape[-1]) for item in features])
    except (AttributeError, RuntimeError, TypeError, IndexError):
        return None


def _features(output: Any) -> list[torch.Tensor] | None:
    if not isinstance(output, Mapping) or output.get(_FEATURES[0]) is None:
        return None
    layers = [output[_FEATURES[0]]]
    deep = output.get(_FEATURES[1])
    if deep is not None:
        nested = not isinstance(deep[0], torch.Tensor) or deep[0].dim() > 2
        layers += list(deep) if nested else [deep]
    tables = [_tables(layer) for layer in layers]
    return None if any(table is None for table in tables) else tables  # type: ignore[return-value]


def _take(output: Any, rows: list[int]) -> Any:
    """The output with some feature rows only, in the containers that it had."""

    def take(features: Any) -> Any:
        table = _tables(features)
        assert table is not None
        kept = table[rows]
        return kept.unsqueeze(0) if isinstance(features, torch.Tensor) else [kept]

    deep = output.get(_FEATURES[1])
    found = {_FEATURES[0]: take(output[_FEATURES[0]])}
    if deep is not None:
        nested = not isinstance(deep[0], torch.Tensor) or deep[0].dim() > 2
        found[_FEATURES[1]] = [take(layer) for layer in deep] if nested else take(deep)
    return type(output)(**found)
