"""Every operation has an oracle, a numba twin, a Triton kernel and a bench."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flowkv import kernels
from tests.inside import ConfigError, dispatch

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = sorted(dispatch.IMPLEMENTATIONS)
MOVES = {"copy_pages", "digest_pages", "gather_pages", "scatter_pages"}
"""Public operations that are one in the registry, `move_pages`."""


@pytest.mark.parametrize(("op", "codec"), ENTRIES)
def test_oracle_twin_and_kernel(op: str, codec: str) -> None:
    targets = dispatch.IMPLEMENTATIONS[op, codec]
    assert {"reference", "cpu", "triton"} <= set(targets)
    public = list(inspect.signature(getattr(dispatch, op)).parameters)
    public.remove("backend")
    if "scale" in public:  # the switches of attention, from here on, travel as one
        public = [*public[: public.index("scale")], "how"]
    for backend, target in targets.items():
        module, _, name = target.partition(":")
        if backend == "triton":  # read, not imported: an interpreter without Triton does it too
            path = ROOT / (module.replace(".", "/") + ".py")
            functions = {
                node.name: [a.arg for a in [*node.args.args, *node.args.kwonlyargs]]
                for node in ast.parse(path.read_text()).body
                if isinstance(node, ast.FunctionDef)
            }
            assert functions[name] == public
        else:
            function = dispatch.resolve(op, codec, backend)
            assert list(inspect.signature(function).parameters) == public


def test_every_operation_is_public_and_benched() -> None:
    public = {*(op for op, _ in ENTRIES), *MOVES} - {"move_pages"}
    assert public <= set(kernels.__all__)
    path = ROOT / "bench" / "bench_kernels.py"
    groups = {
        node.args[0].value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "benched"
        and isinstance(node.args[0], ast.Constant)
    }
    assert groups == {*public, "cascade_attention"}, "made of two others"


def test_every_operation_is_compiled_without_a_gpu() -> None:
    """A case of `bench.codegen`, run by the tests, for each operation and codec."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    from bench.codegen import CALLS, CASES

    tested = [case for case in CASES if case.scope != "full"]
    cased = {(case.op, codec) for case in tested for codec in case.codec.split("+")}
    moves = {(op, dispatch.ANY) for op in MOVES}
    assert {*ENTRIES, *moves} - {("move_pages", dispatch.ANY)} <= cased
    assert {op for op, _ in cased} <= set(CALLS)
    assert len({case.name for case in CASES}) == len(CASES)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no kernel for codec 'zip'.*raw"):
        dispatch.resolve("append", "zip", "cpu")
    with pytest.raises(ConfigError, match="Use one of reference, cpu, triton"):
        dispatch.resolve("append", "raw", "cuda")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kernels.nothing  # noqa: B018 - looking it up is the test
    assert dir(kernels) == sorted(kernels.__all__)


def test_a_missing_backend_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    key = ("merge", dispatch.ANY)
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, key, {"triton": "flowkv.kernels.nowhere:merge"})
    dispatch.resolve.cache_clear()
    with pytest.raises(ConfigError, match="backend='reference'"):
        dispatch.resolve(*key, "triton")
    monkeypatch.undo()
    dispatch.resolve.cache_clear()


def test_choice_of_backend() -> None:
    cpu = torch.device("cpu")
    assert dispatch.choose(torch.device("cuda:1"), torch.float64) == "triton"
    assert dispatch.choose(cpu, torch.float16, page_dtype="bfloat16") == "cpu"
    assert dispatch.choose(cpu, torch.float64, page_dtype="float32") == "reference"
    assert dispatch.choose(cpu, torch.float32, page_dtype="float64") == "reference"
    assert dispatch.choose(torch.device("meta"), torch.float32) == "reference"


def test_import_is_lazy() -> None:
    program = (
        "import sys, flowkv.kernels\n"
        "from flowkv.kernels import Pages, merge, paged_attention, checking\n"
        "print(*(m for m in ('numba', 'triton', 'llvmlite') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == ""
    assert importlib.util.find_spec("flowkv.kernels.cpu") is not None


def test_without_a_directory_for_machine_code_the_kernels_still_work() -> None:
    from tests.inside import pages as cpu_entries

    kept = cpu_entries._move_pages
    arena = torch.arange(4 * 4096).to(torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "/dev/null")
        patch.setattr(cpu_entries, "_move_pages", cpu_entries.entry(kept.py_func))
        assert cpu_entries._move_pages is not kept
        places = torch.tensor([1]).int(), torch.tensor([3]).int()
        kernels.copy_pages(arena, *places, 1, backend="cpu")
    assert torch.equal(arena[-4096:], arena[4096:8192])


def test_machine_code_is_kept_under_the_digest_of_all_sources() -> None:
    """A change in any kernel file must change the stamp of the cached entries."""
    from tests.inside import pages as cpu_entries

    names = [name for name in vars(cpu_entries) if hasattr(getattr(cpu_entries, name), "py_func")]
    assert len(names) == 12
    for name in names:
        cache = getattr(cpu_entries, name)._cache
        assert cache._cache_file._source_stamp[1] == cpu_entries.STAMP
