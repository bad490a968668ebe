"""Launches reach the kernel that Triton would have launched, whichever way they take."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="Triton is not installed here")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402

from bench.nodevice import NoDevice, active  # noqa: E402
from flowkv.kernels.triton import direct as triton_direct  # noqa: E402
from flowkv.kernels.triton import launch as triton_launch  # noqa: E402
from flowkv.kernels.triton.launch import launch  # noqa: E402
from tests.calls import calls_of  # noqa: E402


@triton.jit(do_not_specialize=["fixed"])
def move(p_a, p_b, special, fixed, scale, p_extra, SIZE: tl.constexpr, FLAG: tl.constexpr):
    """A kernel whose machine code depends on all that code may depend on."""
    o = tl.arange(0, SIZE)
    b = tl.load(p_a + o * special + fixed)
    if p_extra is not None:
        b += tl.load(p_extra + o)
    if FLAG:
        b = b * scale
    tl.store(p_b + o, b)


@triton.jit
def mixed(p_a, SIZE: tl.constexpr, n):
    """A constant in front of an argument."""
    tl.store(p_a + tl.arange(0, SIZE), n)


class Launches(list):
    """What the launchers of compiled kernels were given, each with its kernel's digest."""

    def __init__(self) -> None:
        super().__init__()
        self.device = NoDevice("sm_90", self.launcher)

    def launcher(self, source: Any, metadata: Any) -> Any:
        return lambda *args: self.append((metadata.hash, args))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Every launch of a test, on a device that is not there."""
    seen = Launches()
    triton_direct.SITES.clear()
    for kernel in (move, mixed):
        kernel.device_caches.clear()
    with active(seen.device):
        yield seen
    triton_direct.known.cache_clear()


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches that went the documented way, after the first of each kind."""
    calls, real = [], triton_launch.official

    def official(kernel: Any, *args: Any) -> Any:
        calls.append(kernel)
        return real(kernel, *args)

    monkeypatch.setattr(triton_launch, "official", official)
    return calls


@cache
def tensor(dtype: torch.dtype = torch.float32, skip: int = 0) -> torch.Tensor:
    """A tensor that begins `skip` elements behind a multiple of 16 bytes."""
    return torch.zeros(64, dtype=dtype)[skip:]


def arguments(**changes: Any) -> tuple[Any, ...]:
    given = {"special": 16, "fixed": 3, "scale": 0.5, "p_extra": None}
    return tensor(), tensor(), *(given | changes).values()


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Compare what two launches gave to launchers, but for the record of launch hooks."""
    (digest, args), (digest_2, args_2) = one, other
    assert digest == digest_2 and len(args) == len(args_2)
    assert args[:6] == args_2[:6]
    assert all(a is b for a, b in zip(args[9:], args_2[9:], strict=True))


INTEGERS = [0, 1, 2, 15, 16, 17, 48, 2**31 - 1, 2**31, 2**40, 2**63, -1, -16, -(2**31), -(2**33)]


@settings(max_examples=40)
@given(data=st.data())
def test_a_launch_reaches_the_kernel_that_triton_chooses(data: st.DataObject) -> None:
    draw = data.draw
    integer = st.sampled_from(INTEGERS)
    dtype = st.sampled_from([torch.float32, torch.float16])
    skip = st.sampled_from([0, 0, 1, 4, 8])
    seen = Launches()
    with active(seen.device):
        triton_direct.SITES.clear()
        move.device_caches.clear()
        for _ in range(draw(st.integers(2, 5))):
            args = (
                tensor(draw(dtype), draw(skip)),
                tensor(draw(dtype), draw(skip)),
                draw(integer),
                draw(integer),
                draw(st.sampled_from([0.5, 2.0, 3, True])),
                draw(st.sampled_from([None, tensor(), tensor(torch.float16), tensor(skip=1)])),
            )
            constants = {"SIZE": draw(st.sampled_from([16, 32])), "FLAG": draw(st.booleans())}
            grid = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
            for _ in range(2):
                launch(move, grid, *args, **constants, num_warps=1)
            move[grid](*args, **constants, num_warps=1, enable_fp_fusion=True)
            assert len(seen) == 3
            same(seen[0], seen[2])
            same(seen[1], seen[2])
            seen.clear()


def run(**changes: Any) -> None:
    constants = {"SIZE": changes.pop("SIZE", 16), "FLAG": changes.pop("FLAG", True)}
    launch(move, (4, 2), *arguments(**changes), **constants)


def test_known_kernels_are_launched_without_triton(launches: Launches, plainly: list[Any]) -> None:
    for _ in range(3):
        run()
    site = triton_direct.site_of(move, arguments())
    assert site.direct and len(site.handles) == 1 and not plainly
    assert len(launches) == 3
    same(launches[0], launches[2])
    assert launches[2][1][:4] == (4, 2, 1, 0) and launches[2][1][6:9] == (None, None, None)


def test_integers_of_any_size_share_kernels(
    launches: Launches, plainly: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_direct, "MOST_HANDLES", 5)
    for n in range(32, 32 + 16 * 20, 16):
        run(special=n, fixed=n)
    site = triton_direct.site_of(move, arguments())
    assert len(site.by_class) == 1 and len(site.handles) <= 5 and not plainly
    assert len({digest for digest, _ in launches}) == 1 and len(launches) == 20
    run(special=1)
    run(special=18)
    assert len({digest for digest, _ in launches}) == 3


def test_a_device_has_kernels_of_its_own(launches: Launches, plainly: list[Any]) -> None:
    functions = iter([11, 22])
    launches.device.load_binary = lambda *args: (1, next(functions), 32, 0, 1024)
    for number in (0, 0, 1, 1, 0):
        launches.device.number = number
        run()
    assert [args[4] for _, args in launches] == [11, 11, 22, 22, 11] and not plainly


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks_are_given_every_launch(
    launches: Launches, plainly: list[Any], hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    chain = getattr(knobs.runtime, hook)
    heard = chain.add(print) or chain
    try:
        run()
    finally:
        chain.remove(print)
    assert len(plainly) == 1 and heard in launches[-1][1][6:9]
    run()
    assert len(plainly) == 1
    monkeypatch.setattr(knobs.runtime, hook, print)  # the way of old, one function
    run()
    assert len(plainly) == 2 and print in launches[-1][1][6:9]


def test_hooks_of_one_kernel_are_called(launches: Launches) -> None:
    run()
    heard = []
    move.add_pre_run_hook(lambda *args, **constants: heard.append(args))
    try:
        run()
    finally:
        move.pre_run_hooks.clear()
    assert len(heard) == 1 and len(launches) == 2


def test_other_kinds_of_arguments_go_the_documented_way(
    launches: Launches, plainly: list[Any]
) -> None:
    run()
    run()
    for extra in (tensor(), tensor(torch.float16), tensor(torch.float32, 1)):
        run(p_extra=extra)
        move[4, 2](*arguments(p_extra=extra), SIZE=16, FLAG=True, enable_fp_fusion=True)
        same(*launches[-2:])
    assert len(plainly) == 3
    with pytest.raises(TypeError, match="unhashable"):  # Triton's own complaint
        run(FLAG=[1])
    run()
    same(launches[0], launches[-1])


def test_constants_before_arguments_go_the_documented_way(
    launches: Launches, plainly: list[Any]
) -> None:
    x = tensor(torch.int32)
    for n in (1, 5):
        launch(mixed, (3,), x, 16, n)
    assert len(plainly) == len(launches) == 2
    assert launches[1][1][:3] == (3, 1, 1) and launches[1][1][-1] == 5


def test_an_unknown_version_is_launched_the_documented_way(
    launches: Launches, plainly: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_direct.known.cache_clear()
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    for _ in range(3):
        run()
    assert len(plainly) == len(launches) == 3
    assert not triton_direct.site_of(move, arguments()).direct


def renamed(self: CompiledKernel) -> Any:
    """Compiled kernels keep their launcher under another name."""
    if "_launcher" not in self.__dict__:
        self._init_handles()
        self._launcher = self.__dict__.pop("_run")
    return self._launcher


def reordered(self: CompiledKernel) -> Any:
    """Launchers are given the stream first."""
    self._init_handles()
    return lambda *given: self._run(given[3], *given[:3], *given[4:])


def longer(self: CompiledKernel) -> Any:
    """Launchers are given one thing more."""
    self._init_handles()
    return lambda *given: self._run(None, *given)


@pytest.mark.parametrize("change", ["renamed", "reordered", "longer"])
def test_a_launcher_called_otherwise_is_left_to_triton(
    launches: Launches, plainly: list[Any], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledKernel, "run", property(globals()[change]))
    for _ in range(3):
        run()
    assert len(launches) == 3, "each launch is made once"
    assert len(plainly) == 2, "the first one is watched"
    assert not triton_direct.site_of(move, arguments()).direct


def test_a_failing_launch_leaves_the_launcher_in_place(launches: Launches) -> None:
    def broken(source: Any, metadata: Any) -> Any:
        def fail(*args: Any) -> None:
            raise RuntimeError("no memory")

        return fail

    launches.device.launcher_cls = broken
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            run()
    (cache, *_), *_ = move.device_caches.values()
    assert all(compiled._run.__name__ == "fail" for compiled in cache.values())


def test_triton_3_8_is_warned_of_once(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_direct.known.cache_clear()
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    with pytest.warns(UserWarning, match=r"3\.8 .* 4-bit .*Use Triton 3\.7 or 3\.9"):
        run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
        launch(mixed, (3,), tensor(torch.int32), 16, 5)


def test_a_direct_launch_is_little_python(launches: Launches) -> None:
    """Counted, not timed: `bench/bench_launch.py` has the times."""

    args = arguments()
    run()
    direct = calls_of(lambda: launch(move, (4, 2), *args, SIZE=16, FLAG=True), {"call"})
    plain = calls_of(lambda: move[4, 2](*args, SIZE=16, FLAG=True, enable_fp_fusion=True), {"call"})
    assert direct <= 10 < plain
