"""`check_sparsifier`: check any rule that drops tokens on made-up keys, values and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowkv.core.errors import FlowKVError
from flowkv.policy.sparsify import Sparsifier
from flowkv.testing.stories import require, tell, told

Array = np.ndarray[Any, Any]


class MadeUpPrompt(NamedTuple):
    """Made-up prompt in one layer.

    Attributes:
        layer: The layer's number.
        heads: KV heads.
        tokens: Its length.
        kind: "random", "equal" (all tokens alike), "zero" or "huge".
        seed: Seed of its numbers.
    """

    layer: int
    heads: int
    tokens: int
    kind: str
    seed: int

    def arrays(self) -> list[Array]:
        """Return its keys, values and weights."""
        dice, (heads, tokens) = np.random.default_rng(self.seed), self[1:3]
        equal, size = self.kind == "equal", {"zero": 0.0, "huge": 1e18}.get(self.kind, 1.0)
        shapes = [(heads, 1 if equal else tokens, dim) for dim in (8, 4)]
        made = [np.repeat(dice.normal(size=s) * size, tokens // s[1], 1) for s in shapes]
        even = np.full((heads, tokens), 1 / tokens)
        made.append(dice.dirichlet(np.ones(tokens), heads) if self.kind == "random" else even)
        return [part.astype(np.float32) for part in made]


PROMPTS = st.builds(
    MadeUpPrompt,
    st.integers(0, 90),
    st.integers(1, 3),
    st.integers(1, 200),
    st.sampled_from(["random", "equal", "zero", "huge"]),
    st.integers(0, 999),
)


def check_sparsifier(
    make: Callable[[Any], Sparsifier], *, max_examples: int = 150, shrink: bool = True
) -> None:
    """Run the conformance suite on a rule that drops tokens; return if it found no fault.

    Checked: the rule keeps its share of slots, the same number for all heads, each once, in
    ascending order; the first and the latest tokens are among them; a larger share keeps all slots
    of a smaller one, except protected ones; a share of 1 keeps all; a layer keeps its own share,
    whatever those of others are; equal prompts give equal answers, also after others and from
    another object; arrays are neither kept nor written; the rule works without attention that it
    did not ask for; nothing is raised, also if all keys are equal, zero or huge.

    Args:
        make: Makes a rule that keeps a share, or a share for each layer: its class, or any callable
            that takes both.
        max_examples: Number of prompts to try.
        shrink: Search for the simplest prompt that shows a fault, rather than report the first.

    Raises:
        AssertionError: With a prompt that shows the fault.
    """

    @told(max_examples, shrink=shrink)
    @given(PROMPTS, st.floats(0.01, 1.0), st.floats(0.01, 1.0))
    def story(prompt: MadeUpPrompt, share: float, other: float) -> None:
        try:
            _judge(make, prompt, sorted((share, other)))
        except FlowKVError as error:
            raise AssertionError(f"it raised {type(error).__name__}: {error}") from error

    tell(story)


def _judge(make: Callable[[Any], Sparsifier], prompt: MadeUpPrompt, shares: list[float]) -> None:
    few, many, all_of_it = (make(share) for share in (*shares, 1.0))
    heads, tokens, arrays, before = *prompt[1:3], prompt.arrays(), prompt.arrays()

    def kept(rule: Sparsifier, layer: int = prompt.layer, by: list[Array] = arrays) -> Array:
        mass = by[2] if rule.queries or rule.repeats else None
        return rule.keep(layer, by[0], by[1], mass)

    first, count = kept(few), few.count(tokens, prompt.layer)
    require(first.shape == (heads, count), "it keeps another number than its share", first.shape)
    require(bool((np.diff(first, axis=1) > 0).all()), "slots are not ascending", first)
    require(bool((first >= 0).all() and (first < tokens).all()), "there is no such slot", first)
    written = any(not np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))
    require(not written, "it writes to its arguments")
    kept(few, prompt.layer + 1, [part * 0 + 1 for part in arrays])
    for again in (kept(few), kept(make(shares[0]))):
        require(np.array_equal(first, again), "the same prompt is answered otherwise", again)
    sinks = min(count, few.sink_tokens)
    recent = min(count - sinks, few.recent_tokens)
    safe = {*range(sinks), *range(tokens - recent, tokens)}
    for head in first:
        require(safe <= set(head), "a protected token is lost", head)
    require(kept(all_of_it).shape == (heads, tokens), "a share of 1 loses tokens")
    uneven, behind = make([*[shares[1]] * prompt.layer, shares[0], 1.0]), prompt.layer + 1
    require(np.array_equal(kept(uneven), first), "the shares of other layers count", kept(uneven))
    most = kept(uneven, behind).shape[1], uneven.count(tokens, behind)
    require(most == (tokens, tokens), "a layer does not keep its own share", most)
    if len(safe) == few.sink_tokens + few.recent_tokens:  # else the wider share protects more
        lost = [set(a) - set(b) for a, b in zip(first, kept(many), strict=True)]
        require(not any(lost), "a larger share loses slots that a smaller one keeps", lost)
