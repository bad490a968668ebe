"""Placement of recurrent states: where to save one along a prompt, and which ones it replaces.

K and V of a token serve every prompt that begins with it; a state serves only prompts that begin
with all tokens before it. So a prefix of a hybrid model is of use up to its last saved state.

| rule | saves at | like |
|---|---|---|
| `interval` | every `every_tokens` tokens | vLLM's retention interval |
| `ends` | the last whole page of each prompt, and the end of its answer | |
| `junctions` | where a prompt parts from known ones | |
| `tail` | ends and junctions | SGLang's radix tree for hybrids |
| `newest` | as `tail`; a state replaces the earlier ones of its conversation | |
| `auto` | as `newest`, but some earlier states stay, at distances that double | |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from flowkv.core.errors import refuse_unknown
from flowkv.policy.base import PolicyConfig, configure


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
