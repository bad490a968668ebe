"""The protocol: which loads there are, and every system under each of them, in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import msgspec

from bench.serve.baselines import BATCHED, SEQUENTIAL, STATIC, Generate, System
from bench.serve.engine import Engined
from bench.serve.ground import Ground, Setting
from bench.serve.row import UNCACHED, Row, Who, make_row
from bench.serve.served import Outcome
from bench.serve.workload import BURSTS, POISSON, Ask, Load, draw
from flowkv.core.errors import ConfigError

Tell = Callable[[int, int, str], None]

PARTS = {
    "concurrency": "Clients at once, each asking anew when it is answered",
    "prefix": "Prompts with a shared beginning, found and computed anew",
    "arrivals": "Requests that come when they come",
    "pages": "Page sizes",
    "budget": "Tokens of a step",
    "scheduler": "Schedulers, short and long answers mixed, more than are served meanwhile",
    "soak": "Long answers, page by page and in a cache that is copied to grow",
    "steps": "What a step takes beside the model",
    "beside": "Decodes beside restores",
    "swap": "Preempted and resumed",
}
"""Parts of the protocol, by name; the last four have measures of their own."""

LOADS = ("concurrency", "prefix", "arrivals", "pages", "budget", "scheduler")
_BY_RATE = ("arrivals", "scheduler")
BASELINES = (SEQUENTIAL, STATIC, BATCHED, UNCACHED)

_OWN = "32+8"
_WARM = 1 << 40
"""Seed of what compiles and allocates before the clock starts."""

_BUSY, _OVERLOAD = 0.7, 2.0
"""How much comes in open loads, of what the engine serves of a closed one: it keeps up, or falls
behind, so that schedulers have somebody to choose from and somebody to leave waiting."""

_OPEN = 64
"""Least requests of an open load: two bursts or three."""

_MIXED, _FEW_ROWS = 192, 8
"""Requests and rows where schedulers are compared."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        parts: Names in `PARTS`.
        concurrency: Clients at once.
        requests: Of a load, at least; open loads and those of many clients have more.
        repetitions: Of each system under each load.
        lengths: See `draw_lengths`.
        context: Most tokens of a request, and those of long shared prefixes; lengths shrink with
            it. At most half of what the model takes.
        prefix_shares: Of the prompts.
        many: Clients with shared prefixes.
        page_sizes: Of the cache.
        budgets: Tokens of a step.
        schedulers: Names.
        baselines: Names in `BASELINES`.
        setting: Of the engine, where nothing else is said.
        soak_tokens: New tokens of each row.
        soak_rows: Rows.
        swaps: Schedules with preemption.
    """

    parts: tuple[str, ...] = tuple(PARTS)
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 100)
    requests: int = 16
    repetitions: int = 3
    lengths: str = "chat"
    context: int = 2048
    prefix_shares: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    many: int = 100
    page_sizes: tuple[int, ...] = (16, 32, 64, 128)
    budgets: tuple[int, ...] = (256, 512, 1024)
    schedulers: tuple[str, ...] = ("fcfs", "shortest", "priority")
    baselines: tuple[str, ...] = BASELINES
    setting: Setting = Setting()
    soak_tokens: int = 10_000
    soak_rows: int = 2
    swaps: int = 20

    def __post_init__(self) -> None:
        for given, known, what in (
            (self.parts, PARTS, "part"),
            (self.baselines, BASELINES, "baseline"),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"there is no {what} {name!r}", f"Use {', '.join(known)}")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Systems that are compared under one load.

    Attributes:
        part: Of the protocol.
        load: What is asked.
        settings: Of engines; the first is what others are compared with.
        baselines: Names.
    """

    part: str
    load: Load
    settings: tuple[Setting, ...]
    baselines: tuple[str, ...] = ()

    def names(self) -> Iterator[tuple[str, Setting | None]]:
        """The systems, by what they are called in ratios."""
        for name in self.baselines:
            yield name, None
        for setting in self.settings:
            yield describe(setting, self.settings), setting


def describe(setting: Setting, among: Sequence[Setting]) -> str:
    """How a setting differs from others; "engine" where it is the only one."""
    if not setting.caching:
        return UNCACHED
    rest = [other for other in among if other.caching]
    words = [
        f"{label}{getattr(setting, name)}"
        for name, label in (("scheduler", ""), ("page_size", "page "), ("token_budget", "budget "))
        if len({getattr(other, name) for other in rest}) > 1
    ]
    return ", ".join(words) or "engine"


def cells_of(plan: Plan, part: str, rate: float = 0.0) -> list[Cell]:
    """The cells of a part.

    Args:
        plan: What is measured.
        part: A name in `LOADS`.
        rate: Requests a second that the engine serves of `closed_load`, where loads are open.
    """
    own = plan.setting
    load = Load(requests=plan.requests, concurrency=16, lengths=plan.lengths)
    base, off = msgspec.structs.replace, msgspec.structs.replace(own, caching=False)
    if part == "concurrency":
        uncached = (own, off) if UNCACHED in plan.baselines else (own,)
        alone = tuple(name for name in plan.baselines if name != UNCACHED)
        return [
            Cell(
                part=part,
                load=base(load, concurrency=c, requests=max(plan.requests, c * (1 + (c <= 16)))),
                settings=uncached,
                baselines=alone,
            )
            for c in plan.concurrency
        ]
    if part == "prefix":
        cells = [
            Cell(part=part, load=base(load, prefix_share=share), settings=(own, off))
            for share in plan.prefix_shares
        ]
        many = base(load, requests=plan.many, concurrency=plan.many, lengths=_OWN)
        return [
            *cells,
            Cell(part=part, load=base(many, prefix_tokens=plan.context), settings=(own, off)),
        ]
    if part == "arrivals":
        enough = max(plan.requests, _OPEN)
        loads = [
            base(load, requests=enough, arrivals=kind, rate=_BUSY * rate)
            for kind in (POISSON, BURSTS)
        ]
        settings = tuple(base(own, scheduler=name) for name in plan.schedulers)
        return [Cell(part=part, load=one, settings=settings) for one in loads]
    if part == "pages":
        settings = tuple(base(own, page_size=size) for size in plan.page_sizes)
        return [Cell(part=part, load=base(load, prefix_share=0.5), settings=settings)]
    if part == "budget":
        settings = tuple(base(own, token_budget=budget) for budget in plan.budgets)
        return [Cell(part=part, load=load, settings=settings)]
    mixed = base(closed_load(plan, part), arrivals=POISSON, rate=_OVERLOAD * rate)
    settings = tuple(base(own, scheduler=name, max_rows=_FEW_ROWS) for name in plan.schedulers)
    return [Cell(part=part, load=mixed, settings=settings)]


def closed_load(plan: Plan, part: str) -> Load:
    """The load by which the rate of a part's open ones is found."""
    if part == "scheduler":
        return Load(requests=_MIXED, concurrency=_MIXED, lengths="mixed", ranks=2)
    return Load(requests=max(plan.requests, _OPEN), concurrency=16, lengths=plan.lengths)


class Stand:
    """Systems that are ready to serve; each is made once, warmed up, and closed at the end.

    Args:
        ground: The model.
        stack: Closes them.
    """

    def __init__(self, ground: Ground, stack: ExitStack) -> None:
        self._ground, self._stack = ground, stack
        self._made: dict[object, System] = {}

    def system(self, name: str, setting: Setting | None, plan: Plan) -> System:
        """A baseline by its name, or an engine of a setting."""
        key: object = (name, plan.setting) if setting is None else setting
        if key not in self._made:
            self._made[key] = made = self._make(name, setting, plan)
            ground, longest = self._ground, min(plan.context, self._ground.context) // 2
            for seed, lengths in enumerate(("96+8", f"{longest}+2")):
                warm = Load(requests=5, concurrency=4, lengths=lengths)
                asks = draw(
                    warm, context=ground.context, vocabulary=ground.vocabulary, seed=_WARM + seed
                )
                made.serve(asks, warm.concurrency)
        return self._made[key]

    def _make(self, name: str, setting: Setting | None, plan: Plan) -> System:
        if setting is None:
            if name == BATCHED:
                return self._stack.enter_context(self._ground.batched(plan.setting))
            return Generate(self._ground.model, batches=name == STATIC)
        if not setting.caching:  # the same engine, asked by strangers
            with_caching = msgspec.structs.replace(setting, caching=True)
            found = self.system("", with_caching, plan)
            assert isinstance(found, Engined)
            return found.among_strangers(name)
        return Engined(*self._stack.enter_context(self._ground.engine(setting)))


def measure_loads(ground: Ground, plan: Plan, tell: Tell | None = None) -> list[Row]:
    """Every system under every load of the plan's parts, in turns.

    Each turn begins with another system, so that what else happens on the machine meets all alike;
    each has prompts that nobody has seen, the same for all systems.

    Args:
        ground: The model.
        plan: What is measured.
        tell: Called with (done, all, what is going on).
    """
    plan = msgspec.structs.replace(plan, context=min(plan.context, ground.context // 2))
    parts = [part for part in plan.parts if part in LOADS]
    todo = sum(len(list(cell.names())) for part in parts for cell in cells_of(plan, part))
    counted = _Counted(tell, todo * plan.repetitions)
    rows: list[Row] = []
    for part in parts:
        with ExitStack() as stack:
            stand = Stand(ground, stack)
            rate = _rate(ground, plan, part, stand) if part in _BY_RATE else 0.0
            for number, cell in enumerate(cells_of(plan, part, rate)):
                rows += _measured(ground, plan, cell, number, stand, counted)
    return rows


class _Counted:
    def __init__(self, tell: Tell | None, total: int) -> None:
        self._tell, self._total, self._done = tell, total, 0

    def __call__(self, doing: str) -> None:
        if self._tell is not None:
            self._tell(self._done, self._total, doing)
        self._done += 1


def _rate(ground: Ground, plan: Plan, part: str, stand: Stand) -> float:
    """Requests a second that the engine serves when it is never without one."""
    load, setting = closed_load(plan, part), cells_of(plan, part, 1.0)[0].settings[0]
    asks = draw(load, context=plan.context, vocabulary=ground.vocabulary, seed=99)
    engine = stand.system("engine", setting, plan)
    return len(asks) / engine.serve(asks, load.concurrency).seconds


def _measured(
    ground: Ground, plan: Plan, cell: Cell, number: int, stand: Stand, counted: _Counted
) -> list[Row]:
    context = ground.context if cell.load.prefix_tokens else plan.context
    systems = {name: (stand.system(name, setting, plan), setting) for name, setting in cell.names()}
    runs: dict[str, list[Outcome]] = {name: [] for name in systems}
    prompts = []
    gc.collect()  # of what others left; it would fall to whoever comes first
    for turn in range(plan.repetitions):
        asks = draw(  # of text that no other cell had: its systems know that
            cell.load,
            context=context,
            vocabulary=ground.vocabulary,
            seed=_seed(cell, turn),
            text=number,
        )
        prompts.append([len(ask.prompt) for ask in asks])
        names = list(systems)
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            counted(f"{cell.part}: {cell.load.concurrency} clients, {name}")
            runs[name].append(_served(systems[name][0], asks, cell.load.concurrency))
    reference = runs.get(SEQUENTIAL, [])
    rows = []
    for name, (system, setting) in systems.items():
        who = Who(
            part=cell.part,
            model=ground.name,
            device=str(ground.model.device),
            dtype=str(ground.model.dtype).removeprefix("torch."),
            load=cell.load,
            baseline=system.name,
            setting=setting,
        )
        rivals = {other: runs[other] for other in runs if other != name and setting is not None}
        rows.append(make_row(who, runs[name], prompts, rivals, reference))
    return rows


def _served(system: System, asks: Sequence[Ask], clients: int) -> Outcome:
    before_s = time.process_time()
    outcome = system.serve(asks, clients)
    return outcome._replace(cpu_s=time.process_time() - before_s)


def _seed(cell: Cell, turn: int) -> int:
    """The same for any number of clients: they ask as much, as far as they get."""
    numbers = (turn, round(100 * cell.load.prefix_share), cell.load.prefix_tokens)
    return sum(number * 1009**power for power, number in enumerate(numbers))
