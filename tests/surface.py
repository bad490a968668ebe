"""What users may rely on, as text: `python -m tests.surface` writes docs/surface.txt.

Names and signatures are read from the source, not from imported modules: they are the same under
every Python, and engines that are not installed are no obstacle.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import griffe

from tests.calls import uncollected
from tests.inside import NAMES, command

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "surface.txt"

MODULES = """
    flowkv flowkv.connect flowkv.connect.events flowkv.connect.ray flowkv.connect.routing
    flowkv.data flowkv.kernels flowkv.policy flowkv.policy.blend flowkv.policy.prefetch
    flowkv.policy.restore flowkv.policy.scheduling flowkv.residency flowkv.sim
    flowkv.sim.restore flowkv.sim.serving
    flowkv.testing flowkv.tiers flowkv.tiers.shared
""".split()
"""Their `__all__` is public, and all errors and events."""

NAMED = """
    flowkv.connect.lmcache.FlowKVDeserializer flowkv.connect.lmcache.FlowKVL2Adapter
    flowkv.connect.lmcache.FlowKVSerializer flowkv.connect.lmcache.ObjectHead
    flowkv.connect.sglang.FlowKVStorage
    flowkv.connect.vllm.FlowKVCachePolicy flowkv.connect.vllm.FlowKVTier
    flowkv.engine.runner.Runner flowkv.engine.sampling.Sampler flowkv.hooks.blend.Blender
    flowkv.hooks.blend.KeyTurn
    flowkv.hooks.embedding.write_table flowkv.hooks.huggingface.cache_control.CacheControl
    flowkv.hooks.huggingface.cache_control.cache_control
    flowkv.hooks.huggingface.cache_control.without_hints flowkv.observe.otel.Bridge
    flowkv.observe.prometheus.Exporter flowkv.observe.timeline.Serving
    flowkv.observe.timeline.Timelines flowkv.policy.by_score.ByScore
    flowkv.policy.order.leaf.LeafOrder flowkv.policy.prefetch.markov.Markov
    flowkv.policy.sparsify.KVzip flowkv.policy.sparsify.KeepLatest flowkv.policy.sparsify.KeyNorm
    flowkv.policy.sparsify.SnapKV flowkv.policy.sparsify.Sparsifier
    flowkv.report.account.restore_section flowkv.report.page.write_report
    flowkv.sim.formats.Writer flowkv.sim.formats.read_sessions
    flowkv.tiers.remote.objects.ObjectTier
""".split()
"""Public where they stand: what guides import from there, what engines are configured with."""

FORMAT = re.compile(r"_?([A-Z]+_)?(MAGIC|VERSION|FORMAT|LAYOUT)")
"""Constants that say which format a file, a message or an object has."""

OTHER_CONSTANTS = ("flowkv.kernels.", "flowkv.tiers.digest", "flowkv.tiers.shared.table")
"""Where constants of such names are arithmetic, or made of others."""


def found(package: griffe.Module, path: str) -> griffe.Object | None:
    """The object of a name, where it is defined; None for a constant out of a tuple."""
    module, _, name = path.rpartition(".")
    parent = package if module == package.path else package[module.removeprefix("flowkv.")]
    member = parent.members.get(name)
    if isinstance(member, griffe.Module) and name in member.members:  # a function hides its module
        member = member.members[name]
    try:
        return member.final_target if isinstance(member, griffe.Alias) else member
    except griffe.AliasResolutionError:
        return None


def members(one: griffe.Class, homes: dict[str, str]) -> Iterator[tuple[str, griffe.Object]]:
    """Members of a class that its public bases lack; what only a constructor sets is none."""
    for name, member in sorted(one.all_members.items()):
        target = member.final_target if isinstance(member, griffe.Alias) else member
        if target.parent is not one and target.parent.path in homes:
            continue
        if target.is_attribute:  # a field without a default has no value, what `self` is given has
            declared = target.labels & {"class-attribute", "property"} or target.value is None
        else:
            declared = True
        if declared and (name == "__init__" or not name.startswith("_")):
            yield name, target


def told(path: str, one: griffe.Object | None, homes: dict[str, str]) -> Iterator[str]:
    """Lines of a name, with the members of a class below it.

    Args:
        path: The name.
        one: What it means.
        homes: The first public name of each object.
    """
    if one is not None and homes.get(one.path, path) != path:
        yield f"{path} is {homes[one.path]}"
    elif isinstance(one, griffe.Class):
        yield f"class {path}({', '.join(map(str, one.bases))})".removesuffix("()")
        for name, member in members(one, homes):
            yield from (f"    {line}" for line in told(name, member, {}))
    elif isinstance(one, griffe.Function):
        yield f"def {one.signature(name=path)}"
    elif isinstance(one, griffe.Attribute):
        kind = "property " if "property" in one.labels else ""
        shown = f": {one.annotation}" if one.annotation is not None else ""
        value = f" = {one.value}" if one.value is not None and not kind else ""
        yield f"{kind}{path}{shown}{value if len(value) <= 60 else ' = ...'}"
    else:
        yield path


@functools.cache
def load() -> griffe.Module:
    """The package as its source has it."""
    with uncollected():
        package = griffe.load("flowkv", search_paths=[ROOT], resolve_aliases=True)
    assert isinstance(package, griffe.Module)
    return package


def public_paths(package: griffe.Module) -> set[str]:
    """Paths of all public names of Python."""
    paths = set(NAMED)
    for whole in ("core.errors", "observe.events"):
        classes = package[whole].classes.values()
        paths |= {one.path for one in classes if not one.name.startswith("_")}
    for path in MODULES:
        module = package if path == package.path else package[path.removeprefix("flowkv.")]
        assert module.exports, f"{path} is public and has no __all__"
        paths |= {f"{path}.{name}" for name in map(str, module.exports)}
    return paths


def names(package: griffe.Module) -> Iterator[str]:
    """Lines of all public names of Python."""
    ordered = sorted(
        public_paths(package), key=lambda path: (path.count("."), path)
    )  # the shortest name first
    objects = {path: found(package, path) for path in ordered}
    homes: dict[str, str] = {}
    for path, one in objects.items():
        if one is not None:
            homes.setdefault(one.path, path)
    for path, one in objects.items():
        yield from told(path, one, homes)


def verbs(parser: argparse.ArgumentParser, prog: str = "flowkv") -> Iterator[str]:
    """Lines of the commands and their options."""
    yield prog
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from verbs(inner, f"{prog} {name}")
        elif not isinstance(action, argparse._HelpAction):
            label = ", ".join(action.option_strings) or action.dest
            several = f" ({action.nargs})" if action.nargs not in (None, 0) else ""
            value = (
                ""
                if action.nargs == 0 or not action.option_strings
                else f" {action.metavar or action.dest.upper()}"
            )
            chosen = f" of {', '.join(map(str, action.choices))}" if action.choices else ""
            yield f"    {label}{value}{several}{chosen}{' required' * action.required}"


def formats() -> Iterator[str]:
    """Lines of the constants that name formats."""
    for path in sorted((ROOT / "flowkv").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if module.startswith(OTHER_CONSTANTS):
            continue
        with uncollected():
            tree = ast.parse(path.read_text())
        for node in tree.body:
            if not isinstance(node, ast.Assign):
                continue
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            else:
                pairs = [(target, value)]
            for name, one in pairs:
                if FORMAT.fullmatch(ast.unparse(name)):
                    yield f"{module}.{ast.unparse(name)} = {ast.unparse(one)}"


def surface() -> str:
    """All of it, as the file has it."""
    sections = {
        "Names": names(load()),
        "Commands": verbs(command.make_parser()),
        "Metrics": (
            f"{name}: {metric.kind}{{{', '.join(metric.labels)}}}"
            for name, metric in sorted(NAMES.items())
        ),
        "Formats": formats(),
    }
    parts = [
        "What users of FlowKV may rely on, see stability.md.\n",
        "`python -m tests.surface` writes this file.\n",
        *(f"\n# {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items()),
    ]
    return "".join(parts)


if __name__ == "__main__":
    FILE.write_text(surface())
