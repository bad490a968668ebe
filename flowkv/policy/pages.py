"""Policies for pages and states: codec by distance, tokens to keep, slabs to empty, states to save.

`Ladder` chooses codecs, `Importance` the tokens of a sequence to keep within a budget,
`Defragmentation` the bytes to copy so that slabs become empty, `StatePlacement` the positions at
which recurrent states are saved, and `Samples` the pages to audit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.config import AUTO
from flowkv.core.errors import ConfigError, GeometryError, refuse_unknown
from flowkv.core.geometry import CODECS
from flowkv.policy.base import PolicyConfig, configure

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=0)]

# Age at which a page is encoded, and its codec, by distance from the end of its sequence.
#
# The last tokens of a sequence get most of its attention, so that errors in them cost most, and
# they are few (the residual window of Liu et al., KIVI, arXiv 2402.02750). A ladder keeps them
# raw and encodes earlier pages, the further back the smaller. A page only ever climbs down.

AUTO_CODECS = ("kv8", "kv4c")
"""Codecs of warm and cold pages under "auto"."""


class Rung(NamedTuple):
    """One step of a ladder.

    Attributes:
        pages: Least number of whole pages between a page and the end of its sequence.
        codec: Index of the codec that such a page is encoded with.
    """

    pages: int
    codec: int


class Ladder:
    """Codecs of the full pages of a sequence, by distance from the sequence's end.

    Distances are whole pages, so that a page becomes due only when another one fills.

    Args:
        rungs: (tokens, codec): a page with at least so many tokens behind its end gets the codec.
            Nearer pages are raw. The further, the lossier.
        page_size: Tokens per page.

    Raises:
        ConfigError: A codec is unknown, or a further rung is less lossy than a nearer one.

    Attributes:
        rungs: Furthest first.
        idle: Index of the codec of pages that no open sequence uses.
    """

    def __init__(self, rungs: Collection[tuple[int, str]], page_size: int) -> None:
        self.page_size = page_size
        unknown = [codec for _, codec in rungs if codec not in CODECS[1:]]
        if unknown or min((tokens for tokens, _ in rungs), default=0) < 0:
            raise ConfigError(
                f"rungs {list(rungs)}", f"Give distances of 0 or more, and {', '.join(CODECS[1:])}"
            )
        steps = [Rung(-(-tokens // page_size), CODECS.index(codec)) for tokens, codec in rungs]
        # Of two codecs at one distance only the smaller one is ever used.
        furthest = {rung.pages: rung for rung in sorted(steps)}
        self.rungs = tuple(furthest[pages] for pages in sorted(furthest, reverse=True))
        codecs = [rung.codec for rung in self.rungs]
        if codecs != sorted(set(codecs), reverse=True):
            raise ConfigError(f"rungs {list(rungs)}", "Let pages that lie further back be smaller")
        self.idle = codecs[-1] if codecs else 0

    @property
    def codecs(self) -> tuple[int, ...]:
        """Return the codec indices of all pages, "raw" included, least lossy first."""
        return (0, *(rung.codec for rung in reversed(self.rungs)))

    def border(self, rung: Rung, length: int) -> int:
        """Return how many leading pages of `length` tokens have this rung's codec or lossier."""
        return max(0, length // self.page_size - rung.pages)

    def codec(self, page: int, length: int) -> int:
        """Return the codec index of page number `page` of a sequence of `length` tokens."""
        for rung in self.rungs:
            if page < self.border(rung, length):
                return rung.codec
        return 0


def make_ladder(
    codec: str, page_size: int, possible: Collection[str], *, recent_tokens: int, warm_tokens: int
) -> Ladder:
    """Return the ladder of one layer group.

    Args:
        codec: A codec, or "auto".
        page_size: Tokens per page.
        possible: Codecs that the group's pages support. "auto" leaves the others out.
        recent_tokens: Tokens at the end of a sequence with raw pages.
        warm_tokens: Tokens before these that "auto" gives eight bits.
    """
    if codec != AUTO:
        return Ladder([(recent_tokens, codec)] if codec != "raw" else [], page_size)
    distances = (recent_tokens, recent_tokens + warm_tokens)
    rungs = zip(distances, AUTO_CODECS, strict=True)
    return Ladder([(tokens, name) for tokens, name in rungs if name in possible], page_size)


# Times to empty sparse slabs of a page pool, and the copying that this is worth.
#
# Pages of different codecs have different sizes, and a slab holds pages of one size (Bonwick,
# USENIX '94). Bytes that are free in slabs of one size are of no use to another size until a slab
# is empty. So a pool can refuse a page with half its bytes free. Moving the pages of sparse slabs
# into the holes of fuller ones frees whole slabs; `Defragmentation` decides at each step's edge
# whether that pays, a few bytes at a time.


class Occupancy(NamedTuple):
    """Occupancy of a page pool.

    Attributes:
        slabs: All slabs.
        empty: Empty slabs, which pages of any size may take.
        reclaimable: Slabs that would also be empty if the holes of each size were together.
        sizes: Number of page sizes; with a single one, holes are as good as empty slabs.
        fragmentation: Share of the bytes in occupied slabs that no page uses.
    """

    slabs: int
    empty: int
    reclaimable: int
    sizes: int
    fragmentation: float


class DefragmentationConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `Defragmentation`.

    Attributes:
        least_fragmentation: Fragmentation below which nothing moves.
        reserve_share: Part of the slabs that should be empty, ready for any size.
        most_bytes: Bytes copied at one step's edge, or one page if that is more; 0 disables it.
        least_gain: Bytes of slabs emptied per byte copied, at least. 2 means that only slabs which
            are at most half full are emptied.
        blocks_per_edge: After a move, all known blocks are searched for references to moved pages;
            one edge of rest follows for each so many blocks.
    """

    least_fragmentation: Share = 0.1
    reserve_share: Share = 1 / 16
    most_bytes: Annotated[int, Meta(ge=0)] = 16 << 20
    least_gain: Annotated[float, Meta(ge=1.0)] = 2.0
    blocks_per_edge: Annotated[int, Meta(ge=1)] = 512


class Defragmentation:
    """Copy budgets for one pool.

    Deterministic: it sees numbers only, and counts edges, not seconds.

    Args:
        **options: Fields of `DefragmentationConfig`.

    Raises:
        ConfigError: An option is unknown or malformed.
    """

    name = "defragmentation"

    def __init__(self, **options: object) -> None:
        self.config = configure(DefragmentationConfig, self.name, options)
        self._rest = 0
        self._fruitless: Occupancy | None = None

    def budget(self, now: Occupancy, blocks: int) -> int:
        """Return the most bytes to copy at this step's edge; 0 leaves the pool unchanged.

        Args:
            now: Occupancy of the pool.
            blocks: Blocks that may have to be renamed.
        """
        if self._rest:
            self._rest -= 1
            return 0
        config = self.config
        short = now.empty < max(1, int(config.reserve_share * now.slabs))
        pays = now.reclaimable > 0 and now.fragmentation >= config.least_fragmentation
        if not (short and pays) or now.sizes < 2 or now == self._fruitless:
            return 0
        self._rest = blocks // config.blocks_per_edge
        return config.most_bytes

    def record(self, pages: int, now: Occupancy) -> None:
        """Record the result of a budget.

        After no move, none is tried until the occupancy changes.
        """
        self._fruitless = None if pages else now


# Tokens of a sequence to keep under a budget: the pages with most attention mass.
#
# Attention weights are sparse, and tokens attended to once are attended to again (H2O, arXiv
# 2306.14048; SnapKV, arXiv 2404.14469). The attention kernels return the weight of each page, per
# layer and KV head, without a second pass (`Scoring.mass`). `Importance` adds these weights up,
# older ones fading. The first tokens stay, as every head parks weight on them (StreamingLLM, arXiv
# 2309.17453), and the latest stay, as the next tokens are mostly predicted from them.


class ImportanceConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `Importance`.

    Attributes:
        sink_tokens: First tokens that always stay.
        recent_share: Part of a budget that always goes to the latest tokens.
        half_life_tokens: Queries after which a weight counts half; 0 for never.
    """

    sink_tokens: Count = 4
    recent_share: Share = 0.25
    half_life_tokens: Count = 1024


def highest(value: NDArray[np.float64], count: int, sinks: int, recent: int) -> NDArray[np.int32]:
    """Return the `count` slots of the highest values, always with the first and the latest ones.

    Args:
        value: `[..., length]`; not kept or written.
        count: Slots to keep, `sinks + recent` at least and `length` at most.
        sinks: First slots that stay.
        recent: Latest slots that stay.

    Returns:
        int32 `[..., count]`, ascending; among equals the latest stay.
    """
    length, value = value.shape[-1], value.copy()
    value[..., :sinks] = value[..., length - recent :] = np.inf
    # A stable sort of the slots from last to first.
    order = length - 1 - np.argsort(-value[..., ::-1], axis=-1, kind="stable")
    return np.sort(order[..., :count], axis=-1).astype(np.int32)


class Importance:
    """Running page mass of one sequence, and the tokens to keep by it. Deterministic.

    Args:
        layers: Layers of the group, L.
        kv_heads: KV heads, Hk.
        page_size: Tokens of a page, P.
        **options: Fields of `ImportanceConfig`.

    Raises:
        ConfigError: An option is unknown or malformed.
    """

    name = "importance"

    def __init__(self, layers: int, kv_heads: int, page_size: int, **options: object) -> None:
        self.config = configure(ImportanceConfig, self.name, options)
        self.page_size = page_size
        self._mass = np.zeros((layers, kv_heads, 0))

    @property
    def mass(self) -> NDArray[np.float64]:
        """Return a copy of the faded weight that each page was given so far, `[L, Hk, pages]`."""
        return self._mass.copy()

    def observe(self, mass: NDArray[np.floating], queries: int) -> None:
        """Add the weights that the next queries gave to pages.

        Args:
            mass: `[L, Hk, pages]`, not negative, of all pages that the sequence has now.
            queries: Number of queries.

        Raises:
            GeometryError: The mass has another shape.
        """
        if mass.ndim != 3 or mass.shape[:2] != self._mass.shape[:2]:
            layers, heads, _ = self._mass.shape
            raise GeometryError(f"page mass {mass.shape}", f"Pass [{layers}, {heads}, pages]")
        half_lives = queries / (self.config.half_life_tokens or math.inf)
        before = self._mass[:, :, : mass.shape[2]]  # a sequence may have been cut since
        total = mass.astype(np.float64)
        total[:, :, : before.shape[2]] += before * 0.5**half_lives
        self._mass = total

    def keep(
        self, length: int, budget: int, scores: NDArray[np.floating] | None = None
    ) -> NDArray[np.int32]:
        """Return the slots to keep of a sequence of `length` tokens.

        The pages of least mass are dropped whole; the page at the border keeps its latest tokens,
        or those of the highest scores.

        Args:
            length: Tokens of the sequence, one a slot.
            budget: Tokens to keep of them, per layer and head.
            scores: `[L, Hk, length]`, not negative, for a finer choice: a page's mass is then
                shared among its tokens in proportion to them, and tokens compete one by one.

        Returns:
            int32 `[L, Hk, n]`, ascending, `n = min(budget, length)`.

        Raises:
            ConfigError: The budget is too small for the first tokens, which always stay.
            GeometryError: Scores of another shape.
        """
        sinks = min(length, self.config.sink_tokens)
        count = min(budget, length)
        if count < max(sinks, 1):
            raise ConfigError(
                f"a budget of {budget} of {length} tokens, {sinks} of which always stay",
                "Raise the budget, or lower sink_tokens",
            )
        recent = min(count - sinks, int(self.config.recent_share * count))
        return highest(self._token_values(length, scores), count, sinks, recent)

    def kept(self, keep: NDArray[np.int32]) -> None:
        """Follow a drop: slot i of a layer and head now holds the token of slot `keep[..., i]`."""
        size = self.page_size
        shares = np.take_along_axis(self._padded(int(keep.max(initial=0)) + 1), keep // size, 2)
        self._mass = np.add.reduceat(shares / size, np.arange(0, keep.shape[2], size), axis=2)

    def _padded(self, length: int) -> NDArray[np.float64]:
        """Return the mass of all pages of so many tokens, 0 for pages without attention."""
        pages = -(-length // self.page_size)
        missing = max(0, pages - self._mass.shape[2])
        return np.pad(self._mass, ((0, 0), (0, 0), (0, missing)))[:, :, :pages]

    def _token_values(
        self, length: int, scores: NDArray[np.floating] | None
    ) -> NDArray[np.float64]:
        size, mass = self.page_size, self._padded(length)
        value = np.repeat(mass, size, axis=2)[:, :, :length]
        if scores is None:
            return value
        if scores.shape != value.shape:
            raise GeometryError(
                f"token scores {scores.shape}", f"Pass one number per slot, {value.shape}"
            )
        empty = mass.shape[2] * size - length
        padded = np.pad(scores.astype(np.float64), ((0, 0), (0, 0), (0, empty)))
        pages = padded.reshape(*mass.shape, size)
        sums = np.maximum(pages.sum(axis=3, keepdims=True), np.finfo(np.float64).tiny)
        shared: NDArray[np.float64] = (mass[..., None] * pages / sums).reshape(padded.shape)
        return shared[:, :, :length]


# Placement of recurrent states: where to save one along a prompt, and which ones it replaces.
#
# K and V of a token serve every prompt that begins with it; a state serves only prompts that begin
# with all tokens before it. So a prefix of a hybrid model is of use up to its last saved state.
#
# | rule | saves at | like |
# |---|---|---|
# | `interval` | every `every_tokens` tokens | vLLM's retention interval |
# | `ends` | the last whole page of each prompt, and the end of its answer | |
# | `junctions` | where a prompt parts from known ones | |
# | `tail` | ends and junctions | SGLang's radix tree for hybrids |
# | `newest` | as `tail`; a state replaces the earlier ones of its conversation | |
# | `auto` | as `newest`, but some earlier states stay, at distances that double | |


class SavedState(NamedTuple):
    """A saved state of a prompt.

    Attributes:
        tokens: Tokens that it follows.
        branches: Ways that known prompts go on right behind it.
    """

    tokens: int
    branches: int = 1


class PlacementConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `StatePlacement`.

    Attributes:
        every_tokens: Tokens between states, 0 for none.
        ends: Save at the ends of prompts.
        junctions: Save where a prompt parts from known ones.
        replaces: Earlier states of a conversation that a new one replaces: none, all but those
            where prompts part ("newest"), or all of these that are closer to the next one than it
            is to the end ("spaced").
        least_tokens: Least tokens between a state and the one before it, half as many where they
            have been computed before and so are likely to come again. A stop is a forward more,
            which takes about as long as some hundred tokens: the time to read the weights.
    """

    every_tokens: Annotated[int, Meta(ge=0)] = 0
    ends: bool = True
    junctions: bool = True
    replaces: Literal["", "newest", "spaced"] = ""
    least_tokens: Annotated[int, Meta(ge=0)] = 0


STATE_RULES: Mapping[str, PlacementConfig] = MappingProxyType(
    {
        "interval": PlacementConfig(every_tokens=8192, ends=False, junctions=False),
        "ends": PlacementConfig(junctions=False),
        "junctions": PlacementConfig(ends=False),
        "tail": PlacementConfig(),
        "newest": PlacementConfig(replaces="newest"),
        "auto": PlacementConfig(replaces="spaced", least_tokens=512),
    }
)
"""Options of the rules by name."""


class StatePlacement:
    """Rule of where the states of recurrent layers are saved. Deterministic, without state.

    Args:
        rule: A name of `STATE_RULES`.
        **options: Fields of `PlacementConfig` in place of the rule's.

    Raises:
        ConfigError: The rule or an option is unknown, or an option is malformed.
    """

    def __init__(self, rule: str = "auto", **options: object) -> None:
        refuse_unknown("no placement of states", rule, STATE_RULES)
        known = STATE_RULES[rule]
        own = {name: getattr(known, name) for name in known.__struct_fields__}
        self.name, self.config = rule, configure(PlacementConfig, rule, own | options)

    def stops(self, base: int, known: int, end: int, *, page: int) -> list[int]:
        """Return where to save states while tokens `[base, end)` of a prompt are computed.

        Args:
            base: Tokens that a state is known for; 0 for none.
            known: Tokens at the beginning of the prompt whose pages are known, whole pages.
            end: Last token that may be stopped at.
            page: Tokens of a page.

        Returns:
            Lengths in `(base, end]`, whole pages, ascending.
        """
        config, last = self.config, end - end % page
        least = max(config.least_tokens, page)
        found = set[int]()
        if config.every_tokens:
            every = -(-config.every_tokens // page) * page
            found.update(range((base // every + 1) * every, last + 1, every))
        if config.junctions and base + max(config.least_tokens // 2, page) <= min(known, last):
            found.add(min(known, last))
        at = max(found, default=base)
        if config.ends and last > at and (last - at >= least or not at):
            found.add(last)
        return sorted(found)

    def replaced(
        self, saved: Sequence[SavedState], placed: int = 0, *, state_tokens: float = 0.0
    ) -> list[int]:
        """Return which states of a prompt are of little use beside the newest one.

        States where prompts part stay, as other prompts begin there.

        Args:
            saved: All states of the prompt, by ascending tokens; the last one is the newest.
            placed: Tokens of the last state before the end of the prompt, which stays; 0 for none.
            state_tokens: Tokens whose K and V have the bytes of a state; 0 if unknown.

        Returns:
            Their tokens.
        """
        if not self.config.replaces or not saved:
            return []
        newest = deeper = saved[-1].tokens
        found = []
        for tokens, branches in reversed(saved[:-1]):
            wide = deeper - tokens >= max(state_tokens, newest - deeper, 1)
            if branches > 1 or tokens == placed or (wide and self.config.replaces == "spaced"):
                deeper = tokens
            else:
                found.append(tokens)
        return found


# The sample of restored pages that are recomputed and compared, and the results
# (see `flowkv.cache.audit`).

MOST_WAITING = 1 << 12
"""Most sampled pages that wait for their audit; beyond it the oldest are forgotten."""


class Verdict(NamedTuple):
    """The distance of a restored page from the model's own computation of it.

    Attributes:
        error: Greatest distance of a token's keys or values, relative to their size.
        bound: Greatest error that the page's codec explains there.
    """

    error: float
    bound: float

    @property
    def sound(self) -> bool:
        """Return whether the page agrees with the model's computation, within the bound."""
        return self.error <= self.bound


class Samples:
    """The sample of restored pages. Callers hold the KV lock.

    The key alone decides whether a page is in the sample: the same pages are sampled in every run
    and in every process. Keys are SHA-256, so that the share is met for any prompts.

    Args:
        share: Share of all restored pages, 0 to 1; 0 samples none.

    Attributes:
        audited: Pages that were recomputed and compared.
        mismatches: Audited pages that differ from the model's computation.
        skipped: Sampled pages that could not be recomputed.
        worst: The greatest error as a share of its bound, mismatches left out.
    """

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self._border = round(share * 2.0**64)
        self._came: dict[bytes, str] = {}
        self.audited = self.mismatches = self.skipped = 0
        self.worst = 0.0

    def __len__(self) -> int:
        return len(self._came)

    def has(self, key: bytes) -> bool:
        """Return whether a page belongs to the sample."""
        return int.from_bytes(key[:8], "little") < self._border

    def came(self, key: bytes, tier: str) -> None:
        """Record that a page was restored from a tier, if it belongs to the sample."""
        if self._border and self.has(key):
            self._came.pop(key, None)
            self._came[key] = tier
            if len(self._came) > MOST_WAITING:
                del self._came[next(iter(self._came))]

    def waiting(self, key: bytes) -> bool:
        """Return whether a page was restored and is still to be audited."""
        return key in self._came

    def take(self, key: bytes) -> str:
        """Remove a page from the queue; return its tier of origin, "" if it was not queued."""
        return self._came.pop(key, "")

    def skip(self, key: bytes) -> None:
        """Count a queued page as skipped: it cannot be audited."""
        self.skipped += bool(self.take(key))

    def judged(self, verdict: Verdict) -> None:
        """Count the verdict on an audited page."""
        self.audited += 1
        if not verdict.sound:
            self.mismatches += 1
        elif verdict.bound:
            self.worst = max(self.worst, verdict.error / verdict.bound)
