"""Arguments of one forward: token ids, padding, positions, and all else that K and V depend on."""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.keys import Salt
from flowkv.core.signatures import parameters_of
from flowkv.hooks.huggingface.versions import MODAL_INPUTS, RENAMED, PreTrainedTokenizerBase
from flowkv.kernels.operands import Later
from flowkv.naming.fingerprint import bytes_of, parts_of

# Salts of further inputs that keys and values depend on: encoder outputs, options, token types.


def condition_salts(condition: Mapping[str, Any], row: int, rows: int) -> list[Salt]:
    """Return the salts of inputs that every token of a row depends on, as the encoder's output.

    Tensors and lists with rows as their first dimension are split, so that a row's salt does not
    depend on its neighbours. Flat ones of numbers are also digested whole: they may have one number
    for each layer, or concern all rows, and be as long as there are rows by chance.

    Raises:
        TypeError: A value has no digest.
    """
    if not condition:
        return []
    try:
        parts = _row(condition, row, rows), _flat(condition, rows) if rows > 1 else {}
    except (IndexError, RuntimeError) as error:  # sparse and nested tensors
        raise TypeError(f"an input cannot be split into rows ({error})") from error
    return [Salt(0, digest_of("condition", *parts))]


def type_salts(name: str, types: NDArray[np.int64]) -> list[Salt]:
    """Return the salts of a row's token types: one wherever the type changes, none for zeros."""
    changes = np.flatnonzero(np.diff(types, prepend=0))
    return [Salt(int(at), digest_of("type", name, int(types[at]))) for at in changes]


def shift_salts(shifts: NDArray[Any]) -> list[Salt]:
    """Return the salts of a row's position shifts `[D, n]`, one wherever the shift changes.

    A run of tokens with changing shifts, as those of an image, has one salt.
    """
    steps = np.diff(shifts, axis=1, prepend=0).any(0)
    edges = np.flatnonzero(np.diff(steps.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    spans = [(first, shifts[:, first:stop]) for first, stop in edges.tolist()]
    return [
        Salt(first, digest_of("shift", span[:1] if (span == span[0]).all() else span))
        for first, span in spans
    ]


def _flat(value: Any, rows: int) -> Any:
    """Return the flat parts of a value that are as long as there are rows, None elsewhere."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value if value.ndim == 1 and value.shape[0] == rows else None
    if isinstance(value, Mapping):
        return {key: _flat(item, rows) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) == rows and all(isinstance(x, (int, float)) for x in value):
            return value
        return [_flat(item, rows) for item in value]
    return None


def _row(value: Any, row: int, rows: int) -> Any:
    if type(value) in (torch.Tensor, torch.nn.Parameter, np.ndarray):
        return value[row] if value.ndim and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        own = dict(getattr(value, "__dict__", None) or {})  # of a subclass
        return [own, {key: _row(item, row, rows) for key, item in value.items()}]
    if isinstance(value, (list, tuple)):
        if len(value) == rows and not any(isinstance(x, torch.Tensor) for x in value):
            return value[row]
        return [_row(item, row, rows) for item in value]
    return value


def digest_of(*parts: object) -> bytes:
    """Return 32 bytes over tensors (dtype, shape, content) and plain values, nested in any way.

    Raises:
        TypeError: A value has no digest.
    """
    state = hashlib.sha256()
    try:
        _feed(state, parts)
    except (ValueError, RuntimeError, RecursionError) as error:  # NotImplementedError is one
        raise TypeError(f"an input cannot be read ({error})") from error
    return state.digest()


def _feed(state: hashlib._Hash, value: object) -> None:
    if isinstance(value, (torch.Tensor, Mapping, np.ndarray)) and getattr(value, "__dict__", None):
        _feed(state, vars(value))  # attributes that a subclass or a user has added
    if isinstance(value, torch.Tensor):
        state.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        for part in parts_of(value):
            state.update(f"{part.dtype} {tuple(part.shape)};".encode())
            state.update(bytes_of(part).cpu().numpy().data)
    elif isinstance(value, Mapping):
        state.update(f"map {len(value)};".encode())
        for key in sorted(value, key=str):
            _feed(state, str(key))
            _feed(state, value[key])
    elif isinstance(value, (list, tuple)):
        state.update(f"list {len(value)};".encode())
        for item in value:
            _feed(state, item)
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        state.update(f"array {value.dtype} {value.shape};".encode())
        state.update(np.ascontiguousarray(value).tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = f"{type(value).__name__} {value!r}"
        state.update(f"{len(text)} {text};".encode())
    else:
        raise TypeError(f"{type(value).__name__} has no digest")


# Features that fill placeholder tokens: images and sounds, or the outputs of the model's encoders.
#
# Placeholder tokens are the same for every image, so pages from the first placeholder on are salted
# with the content that fills it. Where it is beyond doubt which content fills which run of
# placeholders, each run has a salt of its own: a conversation with a second image still shares its
# beginning, and only the content for the rest of the prompt is passed to the model. Everywhere else
# all content salts all runs, and is used whole or not at all.

ENCODED = "mm_encoder_outputs"
_MODALITIES = ("image", "video", "audio", "speech", "vision", "visual")
_MARKS = ("start", "begin", "end")
_ID_NAMES = ("_token_id", "_token_index")
_FEATURES = ("pooler_output", "deepstack_features")
"""Fields of encoder outputs that models read, with one row for each placeholder token in order."""


class PlaceholderRun(NamedTuple):
    """Run of adjacent placeholders of one kind.

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
    """Return the placeholder ids by their names in the configuration, such as `image_token_id`."""
    named = dict(vars(config))
    for name, listed in vars(config).items():  # tokens that have other embeddings beside images
        if name.endswith("_token_ids") and isinstance(listed, (list, tuple)):
            named |= {f"{i}_{name[:-1]}": value for i, value in enumerate(listed)}
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
    """Features that fill the placeholders of a batch of whole prompts.

    Attributes:
        runs: In the order in which content fills them: by row, then by position.
        exact: Whether it is known which content fills which run.

    Args:
        prompts: Tokens of each row, without padding.
        inputs: The arguments that fill placeholders, by name.
        placeholders: The result of `placeholder_ids`.
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
            PlaceholderRun(row, *run)
            for row, tokens in enumerate(prompts)
            for run in _runs(tokens, ids)
        ]
        self._parts = self._by_item() or self._by_feature(placeholders)
        self.exact = self._parts is not None

    @property
    def divides(self) -> bool:
        """Return whether spans of single rows can be computed: their content is known."""
        return not self.inputs or self.exact or (self.rows == 1 and bool(self.runs))

    def salts(self, row: int) -> list[Salt]:
        """Return the salts of a row's placeholder runs.

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
        """Return the last column, at most `base`, at which the batch can be cut in two."""
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

    def cut_at_page(self, base: int, page_size: int) -> int:
        """Return the last end of a page, at most `base`, at which rows without padding are cut."""
        while (end := self.cut(base, [0] * self.rows)) % page_size:
            base = end - end % page_size
        return end

    def rest(self, base: int, pads: Sequence[int]) -> dict[str, Any]:
        """Return the arguments for the part of the batch behind column `base`, chosen by `cut`."""
        return self.arguments({row: (base - pad, sys.maxsize) for row, pad in enumerate(pads)})

    def parts(self, row: int, first: int, stop: int) -> bool:
        """Return whether a span of a row can be filled by itself: no run lies across its ends."""
        met = [r for r in self.runs if r.row == row and r.first < stop and r.stop > first]
        return all(self.exact and first <= run.first and run.stop <= stop for run in met)

    def whole(self, row: int, stop: int, page_size: int) -> int:
        """Return the first length of a row, `stop` or more, at a page's end and inside no run."""
        runs = [run for run in self.runs if run.row == row]
        if runs and not self.exact:
            stop = max(stop, *(run.stop for run in runs))
        while any(run.first < stop < run.stop for run in runs) or stop % page_size:
            stop += page_size - stop % page_size
        return stop

    def arguments(self, spans: Mapping[int, tuple[int, int]]) -> dict[str, Any]:
        """Return the arguments for spans of some rows' tokens, each run inside or outside them."""
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
        """Assign item i of the one tensor to run i; None if that is in doubt.

        It is certain if there are as many items as runs, all equally long: items of one tensor have
        one shape and so give equally many features, which fill placeholders in order. In five
        dimensions an item may be all images of a row, some of which the model skips as padding.
        """
        if len(self.inputs) != 1 or not self.runs:
            return None
        (value,) = self.inputs.values()
        if not isinstance(value, torch.Tensor) or value.dim() not in (3, 4):
            return None
        lengths = {(run.stop - run.first, run.token) for run in self.runs}
        return list(value) if len(value) == len(self.runs) and len(lengths) == 1 else None

    def _by_feature(self, placeholders: Mapping[str, int]) -> list[Any] | None:
        """Assign row i of a modality's features to its i-th placeholder, as `generate` does."""
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
    """Return (first, past the last, id) of each run of equal placeholder tokens."""
    if not ids:
        return []
    held = np.isin(tokens, np.fromiter(ids, np.uint32, len(ids)))
    kinds = np.where(held, tokens.astype(np.int64), -1)
    edges = np.flatnonzero(np.diff(kinds, prepend=-1, append=-1))
    spans = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return [(first, stop, int(kinds[first])) for first, stop in spans if kinds[first] >= 0]


def _table(features: Any) -> torch.Tensor:
    """Return the features of all items as one `[placeholders, hidden]` table."""
    return torch.cat([item.reshape(-1, item.shape[-1]) for item in features])


def _features(output: Any) -> list[torch.Tensor] | None:
    """Return the feature tables of an encoder's output, one per layer that reads one, or None."""
    try:
        deep = output.get(_FEATURES[1])
        layers = [] if deep is None else deep if _nested(deep) else [deep]
        return [_table(layer) for layer in (output[_FEATURES[0]], *layers)]
    except (AttributeError, KeyError, RuntimeError, TypeError, IndexError):
        return None


def _nested(deep: Any) -> bool:
    """Return whether an output has features for each of several layers."""
    return not isinstance(deep[0], torch.Tensor) or deep[0].dim() > 2


def _take(output: Any, rows: list[int]) -> Any:
    """Return the output with some feature rows only, in containers of the same types."""

    def take(features: Any) -> Any:
        kept = _table(features)[rows]
        return kept.unsqueeze(0) if isinstance(features, torch.Tensor) else [kept]

    deep = output.get(_FEATURES[1])
    found = {_FEATURES[0]: take(output[_FEATURES[0]])}
    if deep is not None:
        found[_FEATURES[1]] = [take(layer) for layer in deep] if _nested(deep) else take(deep)
    return type(output)(**found)


TYPE_INPUTS = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
_GRIDS = frozenset({"image_grid_thw", "video_grid_thw"})
_MODAL = MODAL_INPUTS | _GRIDS
MODEL_INPUTS = _MODAL | TYPE_INPUTS
"""Inputs beside token ids that some models take under `**kwargs`."""

_NEUTRAL = frozenset(
    """past_key_values cache use_cache return_dict logits_to_keep output_attentions
    output_hidden_states output_router_logits output_logits""".split()
)
"""Arguments that do not change K and V."""
_SPEECH = frozenset({"tokenizer", "assistant_tokenizer"})
"""Tokenizers that `generate` takes, for `stop_strings`, and passes to every forward."""

_TIMES = frozenset({"second_per_grid_ts", "video_second_per_grid"})
"""Inputs that positions alone depend on."""

_PAST = "past_key_values"


class Names:
    """Names of a model's arguments, read from its forward and its configuration.

    Attributes:
        parameters: Parameters of its forward, in order, with their defaults.
        encoder: It has an encoder, so that the decoder's arguments are called `decoder_...`.
        configs: The configuration, and that of its decoder.
        placeholders: Token ids that images and the like replace, by name.
        mixed: Prompts may hold more than text.
        ids: The token ids.
        mask: The padding mask.
        positions: The positions.
        embeds: Embeddings given instead of token ids.
        cache: The cache: `past_key_values` up to transformers 5.23.
        other: The other name by which calls may pass the cache, or None.
        counts: Without positions, it counts on from the length of its cache.
        whole: Types of tokens that it reads from the first token on, also behind a cache.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        config: Any = model.config
        self.configs = config, config.get_text_config(decoder=True)
        taken = [*parameters_of(type(model).forward).values()][1:]
        self.parameters = {p.name: None if p.default is p.empty else p.default for p in taken}
        encodes = bool(getattr(config, "is_encoder_decoder", False))
        self.encoder = encodes and "decoder_input_ids" in self.parameters
        self.placeholders, self.whole = placeholder_ids(config), set[str]()
        self.mixed = bool(self.placeholders or getattr(config, "sub_configs", None))
        # Models with `rope_deltas` count on from the end of whichever prompt they ran last.
        self.counts = not any("rope_deltas" in vars(module) for module in model.modules())
        names = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")
        whose = "decoder_" if self.encoder else ""
        self.ids, self.mask, self.positions, self.embeds = (whose + name for name in names)
        former, named = (name in self.parameters for name in (_PAST, "cache"))
        takes = RENAMED and any(one.kind is one.VAR_KEYWORD for one in taken)
        newer = (named and RENAMED) or ((named or takes) and not former)
        self.cache, self.other = ("cache", _PAST) if newer else (_PAST, "cache" if takes else None)

    def own(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return arguments with the cache by its own name: of two caches that named `cache`.

        None as `cache` hides no cache from a forward that has the former name, too.
        """
        cache = given.get("cache")
        if cache is None and ("cache" not in given or _PAST in self.parameters):
            cache = given.get(_PAST)
        return {n: one for n, one in given.items() if n != self.other} | {self.cache: cache}


class Prompt(NamedTuple):
    """Prompt of one row of a first forward.

    Attributes:
        tokens: Ids without padding.
        pad: Padding columns before them.
        salts: Salts of the other inputs that K and V depend on.
    """

    tokens: NDArray[np.uint32]
    pad: int
    salts: list[Salt]


class CallForm(NamedTuple):
    """Form of a forward with K and V that depend on token ids and positions only.

    Attributes:
        shape: Shape of the token ids.
        dtype: Dtype of the token ids.
        given: Names of all arguments.
        options: Arguments beside ids, mask, positions and cache.
        keep: See `ForwardCall`.
        wants_weights: See `ForwardCall`.
    """

    shape: torch.Size
    dtype: torch.dtype
    given: frozenset[str]
    options: dict[str, Any]
    keep: int
    wants_weights: bool


class ForwardCall:
    """Arguments of one forward.

    Attributes:
        ids: `[B, T]` token ids, or None.
        mask: The mask argument, or None.
        positions: `[..., T]`, or None.
        rows: Rows of the forward, B.
        columns: Columns of the forward, T.
        keep: Number of last positions with wanted logits; 0 for all.
        modal: Inputs that fill placeholders.
        fill: The features that fill placeholders of the whole prompts, after `prompts`.
        problem: Why the forward's K and V cannot be named by its token ids; "" if they can.
        wants_weights: The caller asks for attention weights.
        form: Form of the forward, None if K and V depend on more than token ids and positions.

    Args:
        names: The model's names of its arguments.
        given: The arguments, by name.
        form: Form of the forward before; a forward of the same form is not analysed again.
    """

    def __init__(self, names: Names, given: dict[str, Any], form: CallForm | None = None) -> None:
        self.names, self.given = names, given
        self.ids: torch.Tensor | None = given.get(names.ids)
        self.mask: torch.Tensor | None = given.get(names.mask)
        self.positions: torch.Tensor | None = given.get(names.positions)
        like = self.ids if self.ids is not None else given.get(names.embeds)
        shape = tuple(like.shape) if isinstance(like, torch.Tensor) else ()
        self.rows, self.columns = (*shape, 0, 0)[:2]
        self.modal: dict[str, Any] = {}
        self.types: dict[str, torch.Tensor] = {}
        self.condition: dict[str, Any] = {}
        self.problem, self.form = "", form
        self._numbers: tuple[NDArray[Any] | None, ...] | None = None
        if (
            form is not None
            and isinstance(like, torch.Tensor)
            and (like.shape, like.dtype) == form[:2]
            and given.keys() == form.given
            and all(map(operator.is_, map(given.get, form.options), form.options.values()))
        ):
            self.keep, self.wants_weights = form.keep, form.wants_weights
            return
        wanted = given.get("logits_to_keep", 0) if "logits_to_keep" in names.parameters else 0
        self.keep = wanted if isinstance(wanted, int) else 0
        self.wants_weights = self.asks("output_attentions")
        self.problem = self._text_problem() or self._sort()
        own, self.form = {names.ids, names.mask, names.positions, names.cache}, None
        ids = None if self.problem or self.modal or self.types or self.condition else self.ids
        if ids is not None:
            options = {name: value for name, value in given.items() if name not in own}
            told = self.keep, self.wants_weights
            self.form = CallForm(ids.shape, ids.dtype, frozenset(given), options, *told)

    @property
    def unplaced(self) -> bool:
        """Return whether positions are missing and the model would not count on from a cache."""
        return self.positions is None and not self.names.counts

    @property
    def fillers(self) -> dict[str, Any]:
        """Return inputs that fill placeholders, or may do so, as their names are unknown."""
        if self.names.encoder or not self.names.mixed:
            return self.modal
        more = {n: v for n, v in self.condition.items() if n not in _TIMES and not is_plain(v)}
        return self.modal | more

    @property
    def skippable(self) -> bool:
        """Return whether the caller needs no result of the tokens that a prefix cache skips."""
        more = self.wants_weights or self.asks("output_hidden_states", "output_router_logits")
        return self.keep > 0 and not more

    def asks(self, *outputs: str) -> bool:
        """Return whether any of some outputs is wanted, by argument or by configuration."""
        for name in outputs:
            said, (outer, inner) = self.given.get(name), self.names.configs
            if said or (said is None and (getattr(outer, name, 0) or getattr(inner, name, 0))):
                return True
        return False

    def _text_problem(self) -> str:
        if self.given.get(self.names.embeds) is not None:
            return "embeddings are given instead of token ids"
        ids = self.ids
        if ids is None or ids.dim() != 2 or ids.is_floating_point() or ids.dtype is torch.bool:
            return "there are no token ids"
        if type(ids) is not torch.Tensor:
            return f"the token ids have the class {type(ids).__name__}, not torch.Tensor"
        if not self.rows or not self.columns:
            return "there are no tokens"
        if self.given.get("cache_position") is not None:
            return "`cache_position` is given"
        if self.given.get("labels") is not None:
            return "labels are given"
        if self.positions is not None and self.names.positions not in self.names.parameters:
            return f"`{self.names.positions}` is no argument of the model, which may count itself"
        return ""

    def _sort(self) -> str:
        skip = {self.names.ids, self.names.mask, self.names.positions, self.names.embeds}
        for name, value in self.given.items():
            if name in skip or name in _NEUTRAL or self._absent(name, value):
                continue
            if name in TYPE_INPUTS and isinstance(value, torch.Tensor):
                fits = value.dim() == 2 and len(value) in (1, self.rows)
                fits = fits and not value.is_floating_point()
                if not fits or (value.shape[1] != self.columns and name not in self.names.whole):
                    return f"`{name}` is not one number per token"
                self.types[name] = value
            elif name not in self.names.parameters and name not in _MODAL:
                return f"attention may read `{name}`, which is no argument of the model"
            elif name in _MODAL and not self.names.encoder:
                self.modal[name] = value
            elif not self.names.encoder and _by_column(value, self.columns):
                return f"`{name}` may have a value for every token"
            else:
                self.condition[name] = value
        return ""

    def _absent(self, name: str, value: Any) -> bool:
        """Return whether an argument has the same effect as its absence."""
        if name in _SPEECH and isinstance(value, PreTrainedTokenizerBase):
            return name not in self.names.parameters
        if name == ENCODED and isinstance(value, Mapping) and not value:
            return True  # a prompt of text alone
        return value is self.names.parameters.get(name)

    # ---- the first forward of a cache

    @property
    def numbers(self) -> Any:
        """Return ids, mask and positions as arrays, None for absent ones; waits once in all."""
        if self._numbers is None:
            given = self.ids, self.mask, self.positions
            plain = [x if isinstance(x, torch.Tensor) else None for x in given]
            away = any(x is not None and not x.is_cpu for x in plain)
            self._numbers = tuple(map(_numbers, Later(*plain).result() if away else plain))
        return self._numbers

    def pads(self) -> list[int] | None:
        """Return the padding columns of each row; None if the mask is more than left padding."""
        assert self.ids is not None
        mask = self.mask
        if mask is None:
            return [0] * self.rows
        if not isinstance(mask, torch.Tensor) or mask.shape != self.ids.shape:
            return None
        seen = self.numbers[1] != 0
        if bool((np.diff(seen.astype(np.int8), axis=1) < 0).any()) or not seen[:, -1].all():
            return None
        return (self.columns - seen.sum(1)).tolist()  # type: ignore[no-any-return]

    def prompts(self, pads: list[int], *, by_place: bool = False) -> list[Prompt]:
        """Return the rows with their salts; set `fill`.

        Args:
            pads: Padding columns of each row.
            by_place: The model treats rows by their place in the batch.

        Raises:
            TypeError: An input that K and V depend on has no digest.
        """
        assert self.ids is not None
        ids = self.numbers[0]
        if ids.min() < 0 or ids.max() >= 1 << 32:
            raise TypeError("token ids out of range have no digest")
        tokens = [row[pad:].astype(np.uint32) for row, pad in zip(ids, pads, strict=True)]
        self.fill = Fill(tokens, self.fillers, self.names.placeholders)
        types = {name: value.cpu().numpy() for name, value in self.types.items()}
        shifts = self.shifts(pads)
        found = []
        for row, pad in enumerate(pads):
            salts = condition_salts(self.condition, row, len(pads)) + self.fill.salts(row)
            if pad and self.positions is None:  # the model's own positions may count the padding
                salts.append(Salt(0, digest_of("columns", pad)))
            if by_place:
                salts.append(Salt(0, digest_of("place", row, len(pads))))
            if shifts is not None:
                salts += shift_salts(shifts[:, row, pad:])
            for name, value in types.items():
                salts += type_salts(name, value[min(row, len(value) - 1), pad:].astype(np.int64))
            salts.sort(key=lambda salt: (salt.position, salt.digest))
            found.append(Prompt(tokens[row], pad, salts))
        return found

    def head(self, columns: int) -> dict[str, Any]:
        """Return the arguments of the first `columns` columns, without most of their logits."""
        given = dict(self.given)
        for name in (self.names.ids, self.names.mask, self.names.positions, *self.types):
            if isinstance(given.get(name), torch.Tensor):
                given[name] = given[name][..., :columns]
        if "logits_to_keep" in self.names.parameters:
            given["logits_to_keep"] = 1
        return given

    def skip(self, columns: int, modal: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the arguments without their first `columns` columns, which are known.

        Args:
            columns: Columns to skip.
            modal: The features for the placeholders that are left; default as before.
        """
        given = dict(self.given)
        if columns:
            for name in {self.names.ids, self.names.positions, *self.types} - self.names.whole:
                if isinstance(given.get(name), torch.Tensor):
                    given[name] = given[name][..., columns:]
            if self.unplaced and self.ids is not None:
                places = torch.arange(columns, self.columns, device=self.ids.device)
                given[self.names.positions] = places[None]
        if modal is not None:
            for name in self.fillers:
                del given[name]
            given.update(modal)
        return given

    def shifts(self, pads: Sequence[int] | None) -> NDArray[Any] | None:
        """Return the shifts `[D, B, T]` of positions in several dimensions (M-RoPE).

        A shift is the position less the usual one. None where positions have one dimension, or are
        not one for each token, and where the first of four dimensions does not count the tokens.
        """
        given = self.positions
        if pads is None or given is None or given.dim() != 3:
            return None
        if given.shape[-1] != self.columns:
            return None
        if given.shape[1] not in (1, self.rows):
            return None
        own = np.arange(self.columns) - np.asarray(pads, np.int64)[:, None]
        told = self.numbers[2]
        whole = told.astype(np.int64)  # frames of a video may lie between whole numbers
        found = (whole if (whole == told).all() else told) - own
        if len(found) == 4:  # the first dimension counts tokens, for masks
            return None if found[0][own >= 0].any() else found[1:]
        return found

    def joined(self, types: torch.Tensor) -> bool:
        """Return whether the tokens that have a type are whole runs of placeholders."""
        ids = set(self.names.placeholders.values())
        kinds = types[:, -self.columns :].expand(self.rows, -1).cpu().numpy() != 0
        for typed, tokens in zip(kinds, self.numbers[0], strict=True):
            runs = {run[:2] for run in _runs(tokens, ids)}
            if any(run[:2] not in runs for run in _runs(typed, {1})):
                return False
        return True

    def hides(self, pads: Sequence[int]) -> bool:
        """Return whether the padding holds placeholders, which take features like others."""
        ids = set(self.names.placeholders.values())
        return any(_runs(row[:pad], ids) for row, pad in zip(self.numbers[0], pads, strict=True))

    # ---- later forwards

    def conditioned(self, options: Mapping[str, Any]) -> bool:
        """Return whether inputs beside token ids are the same as in an earlier forward."""
        mine = self.condition
        if mine.keys() != options.keys():
            return False
        changed = [name for name in mine if mine[name] is not options[name]]
        try:
            return all(digest_of(mine[name]) == digest_of(options[name]) for name in changed)
        except TypeError:
            return False

    @property
    def continues(self) -> bool:
        """Return whether K and V of a later forward depend on token ids only."""
        if self.problem or self.modal:
            return False
        return not (self.types and any(bool(value.any()) for value in self.types.values()))


def is_plain(value: Any) -> bool:
    """Return whether an input is one number or text for all tokens of a batch."""
    return isinstance(value, (bool, int, float, str))


def _by_column(value: Any, columns: int) -> bool:
    """Return whether an input could have one value for each column of a batch.

    Then it would have to be cut where known tokens are skipped, in an unknown dimension.
    """
    if isinstance(value, torch.Tensor) and value.is_nested:
        return True  # a nested tensor has no shape
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return columns > 1 and columns in value.shape
    if isinstance(value, Mapping):
        return any(_by_column(item, columns) for item in value.values())
    if isinstance(value, (list, tuple)):
        inner = any(_by_column(item, columns) for item in value)
        return inner or (columns > 1 and len(value) == columns)
    return False


# Token ids and positions of a model's forwards, kept until a page fills and its name is needed.
#
# They are copied to the host during the forward: a caller may write its next token into the same
# tensor, and nothing waits for a copy when the page is full.


def read_notes(
    notes: Sequence[tuple[int, Later]],
    pads: NDArray[np.int64],
    shifts: NDArray[np.int64],
    *,
    by_column: bool,
) -> tuple[int, NDArray[np.int64], bool]:
    """Read the ids and positions of a cache's forwards.

    Args:
        notes: The first column of each forward, in order, and its ids and positions; at least one.
        pads: Padding columns of each row.
        shifts: See `usual`.
        by_column: Positions are expected to be missing: they count columns.

    Returns:
        The first column, ids `[B, n]`, and whether all positions are the usual ones.
    """
    first = notes[0][0]
    read = [(low, *map(_numbers, later.result()[:2])) for low, later in notes]
    ids, places = np.concatenate([some for _, some, _ in read], axis=1), [p for *_, p in read]
    shapes = {None if p is None else p.shape[:-1] for p in places}
    fitting = all(p is None or p.shape[-1] == some.shape[1] for _, some, p in read)
    if len(shapes) == 1 and fitting:  # those of all forwards are looked at together
        read = [(first, ids, None if None in shapes else np.concatenate(places, axis=-1))]
    ordinary = all(
        usual(low, some.shape[1], p, pads, shifts, by_column=by_column) for low, some, p in read
    )
    return first, ids, ordinary


def _numbers(tensor: torch.Tensor | None) -> Any:
    """Return the content of a tensor as an array of exact numbers."""
    if tensor is None:
        return None
    here = tensor.detach() if tensor.is_cpu else tensor.detach().cpu()
    return (here.double() if here.is_floating_point() else here).numpy()


def usual(
    low: int,
    columns: int,
    positions: torch.Tensor | NDArray[np.int64] | None,
    pads: NDArray[np.int64],
    shifts: NDArray[np.int64] | None = None,
    *,
    by_column: bool = False,
) -> bool:
    """Return whether positions count each row's own tokens, which every reuse relies on.

    Args:
        low: First column.
        columns: Number of columns.
        positions: The model's argument `[..., columns]`; None if the model makes them itself.
        pads: Padding columns of each row.
        shifts: Offset of each row's positions from those; the first of four dimensions has none.
        by_column: Positions that the model makes count the padding; pages are salted with it.
    """
    moved = pads if shifts is None else pads - shifts
    padded = bool(moved.any())
    if positions is None:
        return by_column or not padded
    if (by_column and padded) or positions.shape[-1] != columns:
        return False
    told = _numbers(positions) if isinstance(positions, torch.Tensor) else positions
    if moved is not pads and told.ndim == 3 and len(told) == 4:
        return usual(low, columns, told[0], pads) and usual(low, columns, told[1:], moved)
    wanted = np.arange(low, low + columns)
    if padded:
        wanted = wanted - moved[:, None]
    # Positions of padding are free, but a larger one than the row's may change all frequencies.
    return bool(((told == wanted) | ((wanted < 0) & (told < max(low + columns, 2)))).all())
