"""Rows: one cell of the protocol with its result, one line of the table."""

from __future__ import annotations

import msgspec

OURS = "flowkv"
"""FlowKV's own policy."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One situation that every policy is put into.

    Attributes:
        part: Of the protocol (`protocol.PARTS`).
        model: Whose shape it has.
        gpu: What computes.
        tokens: Of the prefix; of a batch, their median.
        suffix: New tokens behind it.
        gbps: Of the link, 1e9 bits per second.
        compute_share: Share of the computing that restores get; others use the rest.
        lengths: Tokens of each prefix of a batch; () for one request of `tokens`.
        stages: Devices that hold a part of the layers each.
        codecs: In which the prefix lies there, most precise first.
    """

    part: str
    model: str
    gpu: str
    tokens: int
    suffix: int
    gbps: float
    compute_share: float = 1.0
    lengths: tuple[int, ...] = ()
    stages: int = 1
    codecs: tuple[str, ...] = ("raw",)

    @property
    def batch(self) -> int:
        """Requests that are restored at once."""
        return len(self.lengths) or 1


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy did in one cell, once.

    Attributes:
        ttft_s: To the first token of each request, suffix included.
        link_bytes: That were loaded.
        computed: Share of the prefixes' cells that were computed: where the pointers met.
        compute_busy: Share of the time until the last first token in which something was computed;
            None where that is not known.
        link_busy: The same of the link.
        planner_s: Spent in the policy's own code.
        boundary_bytes: Activations between stages, part of `link_bytes`.
    """

    ttft_s: tuple[float, ...]
    link_bytes: float
    computed: float
    compute_busy: float | None
    link_busy: float | None
    planner_s: float
    boundary_bytes: float = 0.0


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What nobody can beat.

    Attributes:
        mean_s: Of the times to the first token, averaged over the batch.
        makespan_s: Of the last of them.
        computed: Share of the prefixes that is computed where that is reached.
    """

    mean_s: float
    makespan_s: float
    computed: float = 0.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A policy in a cell.

    Attributes:
        model: See `Cell`, like all that is not told here.
        gpu: See `Cell`.
        tokens: See `Cell`.
        suffix: See `Cell`.
        gbps: See `Cell`.
        compute_share: See `Cell`.
        batch: Requests at once.
        policy: Its name.
        ttft_s: Mean time of the batch to the first token.
        bound_s: Lower bound of that.
        bound_ratio: `ttft_s` over `bound_s`.
        link_bytes: That were loaded.
        part: See `Cell`.
        lengths: See `Cell`.
        stages: See `Cell`.
        codec: The codecs of the stored prefix, with slashes.
        makespan_s: Until the last first token of the batch.
        makespan_bound_s: Lower bound of that.
        bound_computed: Share of the prefix that is computed where that is reached.
        computed: Share of the prefix that was computed: where the pointers met.
        boundary_bytes: Activations between stages, part of `link_bytes`.
        compute_busy: Utilisation of what computes; None where that is not known.
        link_busy: Utilisation of the link, likewise.
        planner_share: Time in the policy's own code over the makespan.
    """

    model: str
    gpu: str
    tokens: int
    suffix: int
    gbps: float
    compute_share: float
    batch: int
    policy: str
    ttft_s: float
    bound_s: float
    bound_ratio: float
    link_bytes: float
    part: str
    lengths: tuple[int, ...] = ()
    stages: int = 1
    codec: str = "raw"
    makespan_s: float = 0.0
    makespan_bound_s: float = 0.0
    bound_computed: float = 0.0
    computed: float = 0.0
    boundary_bytes: float = 0.0
    compute_busy: float | None = None
    link_busy: float | None = None
    planner_share: float = 0.0

    def kept(self) -> dict[str, object]:
        """Its fields for a file: without those that have their default, six digits each."""
        fields = {field.name: field.default for field in msgspec.structs.fields(self)}
        told = ((name, getattr(self, name)) for name in fields)
        return {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in told
            if value != fields[name]
        }

    def cell(self) -> tuple[object, ...]:
        """What rows have in common that are to be compared."""
        what = (self.part, self.model, self.gpu, self.tokens, self.suffix, self.gbps)
        return (*what, self.compute_share, self.lengths, self.stages, self.codec)
