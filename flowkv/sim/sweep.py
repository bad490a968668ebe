"""`sweep`: a trace replayed with several policies at several sizes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Unpack

from flowkv.core.errors import ConfigError
from flowkv.sim.replay import Maker, Settings, replay
from flowkv.sim.result import Result
from flowkv.sim.trace import Trace

Done = Callable[[int, int, Result], None]
"""Called after each replay with how many are done, how many there are, and what it gave."""

_carried: dict[str, Trace] = {}


def sweep(
    trace: Trace,
    policies: Iterable[Maker] | Mapping[str, Settings],
    sizes: Iterable[float | str],
    *,
    processes: int = 1,
    done: Done | None = None,
    **settings: Unpack[Settings],
) -> list[Result]:
    """Replays a trace with every policy at every size.

    Args:
        trace: What to replay.
        policies: Names of the catalogue, or what makes policies; or names and what each is given
            besides `settings`.
        sizes: Shares of the trace's different blocks: 0.01 or "1%".
        processes: How many replays run at a time; with more than one, policies are given by name.
        done: Called after each replay.
        **settings: Of all of them; see `Settings`.

    Returns:
        One result per size and policy, sizes first.

    Raises:
        ConfigError: If an argument is wrong.
    """
    extra: Mapping[Maker, Settings] = policies if isinstance(policies, Mapping) else {}  # type: ignore[assignment]
    makers = list(policies)
    jobs = [(maker, size) for size in list(sizes) for maker in makers]
    given = [_merged(settings, extra.get(maker)) for maker, _ in jobs]
    results: list[Result] = []

    def note(result: Result) -> None:
        results.append(result)
        if done is not None:
            done(len(results), len(jobs), result)

    if processes <= 1 or len(jobs) <= 1:
        for (maker, size), mine in zip(jobs, given, strict=True):
            note(replay(trace, maker, size=size, **mine))
        return results
    if not all(isinstance(maker, str) for maker in makers) or "progress" in settings:
        raise ConfigError(
            "only names of policies can be passed to other processes",
            "Use processes=1, or put the policy in the catalogue",
        )
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _carry, (trace,)) as pool:
        futures = [
            pool.submit(_one, maker, size, mine)
            for (maker, size), mine in zip(jobs, given, strict=True)
        ]
        for future in futures:
            note(future.result())
    return results


def _merged(common: Settings, own: Settings | None) -> Settings:
    merged = common.copy()
    merged.update(own or {})
    return merged


def _carry(trace: Trace) -> None:
    _carried["trace"] = trace


def _one(policy: Maker, size: float | str, settings: Settings) -> Result:
    return replay(_carried["trace"], policy, size=size, **settings)
