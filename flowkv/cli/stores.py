"""`flowkv inspect` and `flowkv scrub`: show, check and repair the directory of a disk tier."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flowkv.cli.arguments import AddVerb
from flowkv.core.config import format_size, load_config
from flowkv.report.screen import Screen
from flowkv.tiers.frame import Keyring

if TYPE_CHECKING:
    from flowkv.tiers.disk.inspect import FrameShare, Inspection, ScrubReport


def add_verbs(verb: AddVerb) -> None:
    """Add the verbs `inspect` and `scrub`."""
    show = verb("inspect", _inspect, "show what a store holds")
    check = verb("scrub", _scrub, "check every frame of a store")
    for added in (show, check):
        added.add_argument("directory", type=Path, metavar="DIR", help="directory of a disk tier")
    change = check.add_mutually_exclusive_group()
    change.add_argument(
        "--drop",
        metavar="NAMESPACE",
        help="erase the frames of one model: the first digits of its namespace, its name, or"
        " 'unknown' for all that no model in use has named; no process may have the store open",
    )
    change.add_argument(
        "--repair",
        action="store_true",
        help="drop damaged frames, find those that a damaged journal lost, and write it again;"
        " no process may have the store open",
    )
    check.option("--config", "FILE", "has the secret of encrypted frames, as TOML", type=Path)


def _inspect(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.tiers.disk.inspect import inspect

    found = inspect(given.directory)
    rows = _rows({f"kind {name[:16]}": one for name, one in found.kinds.items()})
    rows += _rows({f"codec {name[:16]}": one for name, one in found.codecs.items()})
    rows += _namespaces(found)
    rows.append(["all frames", f"{found.frames:,}", format_size(found.bytes)])
    screen.table(["", "frames", "bytes"], rows, title=f"Store {given.directory.absolute()}")
    full = f"{format_size(found.disk_bytes)} of {format_size(found.capacity_bytes)}"
    owner = "in use by a process" if found.owned else "not in use"
    screen.say(f"Format {found.format}, {full} on disk, {owner}.")
    for frames, what in ((found.encrypted, "encrypted"), (found.compressed, "compressed")):
        if frames:
            screen.say(f"{frames:,} frames are {what}.")
    if not found.readable:
        screen.say("This version of FlowKV does not read that format.", style="yellow")
    if found.journal_lost:
        screen.say("Its journal is lost: the frames were found in their slots.", style="yellow")
    elif found.bad_pages:
        text = f"{found.bad_pages} pages of its journal are damaged: frames may be missing above."
        screen.say(text, style="yellow")
    return 0, {"directory": str(given.directory), **msgspec.structs.asdict(found)}


def _rows(shares: dict[str, FrameShare]) -> list[list[str]]:
    return [[name, f"{one.frames:,}", format_size(one.bytes)] for name, one in shares.items()]


def _namespaces(found: Inspection | ScrubReport) -> list[list[str]]:
    """Return a row for each namespace: its digits for `--drop`, and the model's name if known."""
    names, shares = found.names, found.namespaces
    return _rows({f"namespace {d[:16]} ({names.get(d, 'unknown')})": s for d, s in shares.items()})


def _scrub(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.tiers.disk.inspect import RepairReport, drop, repair, scrub

    keyring = _keyring(given.config)
    if given.drop is not None:
        erased = drop(given.directory, given.drop, keyring=keyring)
        screen.say(f"{erased.frames:,} frames, {format_size(erased.bytes)}, were erased.")
        return 0, {"directory": str(given.directory), **msgspec.structs.asdict(erased)}

    check = repair if given.repair else scrub
    with screen.progress("repairing" if given.repair else "checking") as tell:
        report = check(
            given.directory,
            lambda done, total: tell(done, total, f"{done:,} frames"),
            keyring=keyring,
        )
    if report.namespaces:
        screen.table(["", "frames", "bytes"], _namespaces(report))
    rate = report.bytes / report.seconds if report.seconds else 0.0
    screen.say(
        f"{report.frames:,} frames, {format_size(report.bytes)} in {report.seconds:.2f} s"
        f" ({format_size(int(rate))}/s)."
    )
    if report.locked:
        text = f"{report.locked:,} are encrypted, and no secret given opens them: see --config."
        screen.say(text, style="yellow")
    if isinstance(report, RepairReport) and (report.bad or report.recovered):
        text = f"{report.bad:,} damaged ones were dropped, {report.recovered:,} lost ones found."
        screen.say(text, style="yellow")
    elif report.bad:
        text = f"{report.bad:,} are damaged. None will be served: their prompts are computed again."
        screen.say(text, style="red bold")
    elif not report.locked:
        screen.say("All are sound.", style="green")
    found = {"directory": str(given.directory), **msgspec.structs.asdict(report)}
    return int(report.bad > 0), found


def _keyring(path: Path | None) -> Keyring | None:
    config = load_config(path)
    wanted = config.integrity == "aead" or config.secret
    return Keyring(config.secret_bytes) if wanted else None
