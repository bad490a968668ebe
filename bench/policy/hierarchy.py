"""The memory-hierarchy experiment against its own targets."""

from __future__ import annotations

from bench.hierarchy import ExperimentRow, run_experiment
from bench.policy.finding import Finding

_MB, _MS = 1e6, 1e6


def hierarchy(policy: str = "auto") -> list[Finding]:
    """Bytes read and time exposed, by the published and by strict rules, and under pressure."""
    rows = {(row.rules, row.plan): row for row in run_experiment(policies=[policy])}
    ours = rows["published", f"int8, {policy}, +80 blocks"]
    baseline = rows["published", "all in HBM"]
    strict = rows["strict", f"int8, {policy}, +0 steps"]
    aware = rows["pressure", f"raw, {policy}, CXL-aware"]
    small = rows["pressure", f"int8, {policy}"]
    floor = rows["pressure", "raw, Belady"]
    return [
        _finding("HBM read, MB", "published rules", 665.0, _mb(ours)),
        _finding("exposed, ms", "published rules", 0.15, _ms(ours.exposed_ns)),
        _finding("all, ms", "published rules", _ms(baseline.total_ns), _ms(ours.total_ns)),
        _finding("HBM read, MB", "strict rules", 660.0, _mb(strict)),
        _finding("exposed, ms", "strict rules", 0.07, _ms(strict.exposed_ns)),
        _finding(
            "16 bits over CXL, of Belady's bytes",
            "HBM of 2 GiB",
            1.25,
            aware.cxl_read_bytes / floor.cxl_read_bytes,
        ),
        _finding("int8 over CXL, MB", "HBM of 2 GiB", 0.0, small.cxl_read_bytes / _MB),
    ]


def _finding(what: str, rules: str, target: float, measured: float) -> Finding:
    return Finding("hierarchy", what, rules, target, "at most", measured)


def _mb(row: ExperimentRow) -> float:
    return (row.hbm_read_bytes or 0) / _MB


def _ms(ns: float | None) -> float:
    return (ns or 0.0) / _MS
