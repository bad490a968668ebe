"""A launch is Triton's own, and what Triton compiles in it is nobody's time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402

from bench.nodevice import NoDevice, active  # noqa: E402
from flowkv import kernels  # noqa: E402
from flowkv.kernels import paged_attention  # noqa: E402
from tests.inside import compiling, launch, triton_launch  # noqa: E402
from tests.kernels.scene import Scene, int32, layout_of  # noqa: E402


@triton.jit
def move(p_a, p_b, special, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(p_b + o, tl.load(p_a + o * special))


class Launches(list):
    """What the launchers of compiled kernels were given."""

    def __init__(self) -> None:
        super().__init__()
        self.device = NoDevice("sm_90", self.launcher)

    def launcher(self, source: Any, metadata: Any) -> Any:
        return lambda *args: self.append(args)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Every launch of a test, on a device that is not there."""
    seen = Launches()
    move.device_caches.clear()
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(triton_launch, "_OTHERS", [None])
    with active(seen.device):
        yield seen


def run(special: int = 16) -> None:
    launch(move, (4, 2), torch.zeros(512), torch.zeros(16), special, SIZE=16)


def test_a_launch_is_tritons(launches: Launches) -> None:
    run()
    a, b = torch.zeros(512), torch.zeros(16)
    launch(move, (3,), a, b, 32, SIZE=16)
    assert launches[0][:3] == (4, 2, 1) and launches[1][:3] == (3, 1, 1)
    assert launches[1][9] is a and launches[1][10] is b and launches[1][11] == 32


def test_compiling_in_a_launch_stops_the_clock(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **given: heard.append(given))
    spent = [compiling.spent_ns()]
    for special in (16, 32, 1, 16):  # 1 is compiled for itself
        run(special)
        spent.append(compiling.spent_ns())
    first, same, other, known = (b - a for a, b in itertools.pairwise(spent))
    assert first > 0 and same == 0 and other > 0 and known == 0
    assert len(heard) == 2, "who listened before still hears"
    # Whatever else is compiled meanwhile is not ours to tell.
    move.device_caches.clear()
    move.warmup(torch.zeros(512), torch.zeros(16), 16, SIZE=16, grid=(1,), enable_fp_fusion=True)
    assert compiling.spent_ns() == spent[-1]


def test_compiling_is_heard_after_others_took_the_hook(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spends(special: int) -> bool:
        before = compiling.spent_ns()
        run(special)
        return compiling.spent_ns() > before

    with knobs.runtime.scope():
        assert spends(16)
    heard, ours = [], knobs.runtime.jit_cache_hook

    def wraps(**given: Any) -> Any:
        heard.append(given)
        return triton_launch._hear(**given)

    assert ours is not triton_launch._hear, "the scope took it along"
    assert spends(1)
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", wraps)
    assert spends(3) and len(heard) == 1


def test_a_launch_that_fails_ends_what_it_compiled(launches: Launches) -> None:
    def broken(source: Any, metadata: Any) -> Any:
        raise RuntimeError("no memory")

    launches.device.launcher_cls = broken
    with pytest.raises(RuntimeError, match="no memory"):
        run()
    spent = compiling.spent_ns()
    assert compiling.spent_ns() == spent, "the clock goes on"


def test_constants_are_fields() -> None:
    """From Triton 3.8 on, device functions are given the fields of a named tuple alone."""
    members = vars(triton_launch.Constants).items()
    assert not [name for name, member in members if isinstance(member, property)]


@pytest.mark.parametrize(
    ("sealed", "kernels"),
    [
        ((), ["attend_few"]),
        (("kv8",), ["attend_lists"]),
        (("kv4h",), ["turn_queries", "attend_lists"]),
        (("kv8", "kv4c"), ["attend_lists", "attend_sealed"]),
    ],
)
def test_a_decode_call_launches_once_for_raw_and_sealed_pages(
    sealed: tuple[str, ...], kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And merges; only a step's first layer lists the pages."""
    names: list[str] = []
    monkeypatch.setattr(
        triton_launch, "run_kernel", lambda kernel, *args: names.append(kernel.__name__)
    )
    scene = Scene(layout_of(2, 64, page_size=64), [200, 70], [1, 1], layer=0, sealed=sealed)
    for layer in range(2):
        pages = scene.pages._replace(layer=layer)
        paged_attention(scene.queries(2), pages, scene.batch, backend="triton")
    once = [*kernels, "merge_few"]
    assert names == ["list_pages"] * bool(sealed) + once + once


def test_kernels_serve_any_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled for one model serves a deeper one of the same heads."""
    found: list[list[Any]] = []

    def run_kernel(kernel: Any, grid: Any, args: Any, constants: Any) -> None:
        each = zip(kernel.params, args, strict=False)
        found[-1].append(
            (
                kernel.__name__,
                constants,
                [
                    (x == 1, x % 16 == 0) if isinstance(x, int) else getattr(x, "dtype", type(x))
                    for param, x in each
                    if not param.do_not_specialize
                ],
            )
        )

    monkeypatch.setattr(triton_launch, "run_kernel", run_kernel)
    for layers in (1, 3, 32):
        found.append([])
        shape = layout_of(2, 64, page_size=64, layers=layers)
        x = Scene(shape, [130, 70], [1, 1], layer=layers - 1, sealed=("kv8",))
        (sealed,), pages, new = x.pages.sealed, int32([1]), torch.zeros(2, 2, 64)
        kernels.append(new, new, x.pages, x.batch, backend="triton")
        paged_attention(torch.zeros(2, 4, 64), x.pages, x.batch, backend="triton")
        kernels.gather_dense(x.pages, x.batch, 130, backend="triton")
        arena, granules = x.pages.arena, shape.granules
        for old, to in ((shape, sealed), (sealed, shape)):
            kernels.transcode(arena, pages, pages + granules, old, to, backend="triton")
        kernels.copy_pages(arena, pages, pages + granules, granules, backend="triton")
    assert found[0] and found[0] == found[1] == found[2]
