"""The table of the experiment: every plan, every set of rules, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from flowkv.policy import make_policy
from flowkv.sim.hierarchy.floor import compulsory_bytes, least_cxl_bytes
from flowkv.sim.hierarchy.machine import (
    CODECS,
    GIB,
    INT4,
    INT8,
    MIB,
    PUBLISHED,
    RAW,
    Codec,
    Machine,
)
from flowkv.sim.hierarchy.outcome import Outcome
from flowkv.sim.hierarchy.plans import Classes, Everything, Kept
from flowkv.sim.hierarchy.published import run_published
from flowkv.sim.hierarchy.strict import StrictPlan, run_strict
from flowkv.sim.hierarchy.workload import Workload, published_workload

STRICT_SRAM = 32 * MIB  # what an L2 cache can spare; the published 512 MiB exist on no device
PRESSURE_HBM = 2 * GIB  # half of the context, at full precision
_AHEAD = ((RAW, 80), (INT8, 80), (INT4, 96))  # blocks fetched ahead per step under published rules

Tell = Callable[[int, int, str], None]


class Row(msgspec.Struct, frozen=True):
    """One plan under one set of rules. All of it is simulated.

    Attributes:
        rules: "published", "strict", or "pressure": strict, with an HBM too small for the context.
        plan: What was done.
        source: "kvflow" (rebuilt), "flowkv", or "floor": what no plan can undercut.
        hbm_read_bytes: Bytes read from HBM; under published rules every read counts. None for a
            floor that is about the link alone.
        cxl_read_bytes: Bytes read over CXL.
        exposed_ns: Time in which compute waited; None for a floor of bytes.
        exposed_decode_ns: Waiting for decoding, which the published rules count apart.
        total_ns: The whole run.
        sram_hit_rate: Share of reads that found their block staged and in time.
        moved_bytes: Bytes moved between tiers.
        usd_per_million_tokens: Price of the occupied memory, a proxy.
    """

    rules: str
    plan: str
    source: str
    hbm_read_bytes: int | None
    cxl_read_bytes: int
    exposed_ns: float | None = None
    exposed_decode_ns: float | None = None
    total_ns: float | None = None
    sram_hit_rate: float | None = None
    moved_bytes: int | None = None
    usd_per_million_tokens: float | None = None


def run_experiment(
    workload: Workload | None = None,
    machine: Machine = PUBLISHED,
    *,
    policies: Sequence[str] = ("lru", "auto"),
    sram_bytes: int = STRICT_SRAM,
    pressure_bytes: int = PRESSURE_HBM,
    tell: Tell | None = None,
) -> list[Row]:
    """Runs all plans on one workload.

    Args:
        workload: What is read; default the published pattern.
        machine: What it is read from; its SRAM and HBM as they are under published rules.
        policies: Names of the catalogue that decide what leaves SRAM and HBM in FlowKV's rows.
        sram_bytes: Staging memory under strict rules.
        pressure_bytes: HBM of the last rows.
        tell: Called with (done, all, label) after every row.

    Returns:
        The rows, by rules.

    Raises:
        ConfigError: If there is no such policy.
    """
    given = workload or published_workload()
    for name in policies:
        make_policy(name)  # better now than after the first half of the rows
    strict = machine._replace(sram=machine.sram._replace(capacity=sram_bytes))
    tight = strict._replace(hbm=strict.hbm._replace(capacity=pressure_bytes))
    plans = [
        *_published(given, machine, policies),
        *_strict(given, strict, policies),
        *_pressure(given, tight, policies),
    ]
    rows = []
    for done, (label, run) in enumerate(plans, 1):
        rows.append(run())
        if tell is not None:
            tell(done, len(plans), label)
    return rows


_Planned = tuple[str, Callable[[], Row]]


def _published(workload: Workload, machine: Machine, policies: Sequence[str]) -> Iterator[_Planned]:
    def row(label: str, source: str, make: Callable[[], Everything]) -> _Planned:
        def run() -> Row:
            outcome = run_published(workload, machine, make())
            return _row("published", label, source, outcome, workload, machine)

        return label, run

    yield row("all in HBM", "kvflow", Everything)
    yield row("hot, warm, cold", "kvflow", Classes)
    for codec, ahead in _AHEAD:
        for name in policies:

            def make(codec: Codec = codec, ahead: int = ahead, name: str = name) -> Kept:
                policy = make_policy(name), make_policy(name)
                return Kept(machine, workload, codec, ahead, *policy)

            yield row(f"{codec.name}, {name}, +{ahead} blocks", "flowkv", make)


def _strict(workload: Workload, machine: Machine, policies: Sequence[str]) -> Iterator[_Planned]:
    for codec in CODECS.values():
        for name in policies:
            for steps in (0, 1):
                label = f"{codec.name}, {name}, +{steps} steps".replace("+1 steps", "+1 step")
                yield _strict_row("strict", label, workload, machine, (codec, name, steps, False))
    for codec in CODECS.values():

        def floor(codec: Codec = codec) -> Row:
            n_bytes = compulsory_bytes(workload, codec)
            return Row("strict", f"{codec.name}, each block once", "floor", n_bytes, 0, 0.0)

        yield "floor", floor


def _pressure(workload: Workload, machine: Machine, policies: Sequence[str]) -> Iterator[_Planned]:
    for name in policies:
        for thrifty in (False, True):
            label = f"raw, {name}" + (", CXL-aware" if thrifty else "")
            yield _strict_row("pressure", label, workload, machine, (RAW, name, 1, thrifty))
    for codec in (INT8, INT4):
        label = f"{codec.name}, {policies[-1]}"
        yield _strict_row("pressure", label, workload, machine, (codec, policies[-1], 1, False))

    def floor() -> Row:
        over_cxl = least_cxl_bytes(workload, machine, RAW)
        label = "raw, Belady"
        return Row("pressure", label, "floor", None, over_cxl)

    yield "floor", floor


def _strict_row(
    rules: str,
    label: str,
    workload: Workload,
    machine: Machine,
    told: tuple[Codec, str, int, bool],
) -> _Planned:
    codec, name, steps, thrifty = told

    def run() -> Row:
        plan = StrictPlan(codec, make_policy(name), make_policy(name), steps, thrifty)
        outcome = run_strict(workload, machine, plan)
        return _row(rules, label, "flowkv", outcome, workload, machine)

    return label, run


def _row(
    rules: str, plan: str, source: str, outcome: Outcome, workload: Workload, machine: Machine
) -> Row:
    return Row(
        rules,
        plan,
        source,
        outcome.read_bytes["hbm"],
        outcome.read_bytes["cxl"],
        outcome.exposed_ns,
        outcome.exposed_decode_ns,
        outcome.total_ns,
        outcome.sram_hit_rate,
        outcome.moved_bytes,
        outcome.usd_per_million_tokens(machine, len(workload.steps)),
    )
