"""A prepared launch is the one that Triton itself would make, found with less Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="Triton is not installed here")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import compute_cache_key  # noqa: E402

from bench import codegen  # noqa: E402
from bench.nodevice import NoDevice, active  # noqa: E402
from flowkv import kernels  # noqa: E402
from tests.inside import launch, triton_launch  # noqa: E402
from tests.kernels.scene import Scene, layout_of  # noqa: E402


class Sizes(NamedTuple):
    WIDE: int = 16
    ODD: bool = False


OFFSET = tl.constexpr(3)


@triton.jit(do_not_specialize=["plain"], do_not_specialize_on_alignment=["loose"])
def anything(  # noqa: PLR0917
    p_a, p_b, x, y, plain, loose, p_c, z, C: tl.constexpr, D: tl.constexpr
):
    o = tl.arange(0, 16)
    tl.store(p_a + o, o + x + plain + OFFSET)


@triton.jit
def simple(p_a, x, C: tl.constexpr):
    o = tl.arange(0, 16)
    tl.store(p_a + o, o + x + OFFSET)


class Launches(list):
    """What the launchers of compiled kernels were given."""

    def __init__(self) -> None:
        super().__init__()
        self.device = NoDevice("sm_90", lambda source, metadata: lambda *args: self.append(args))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Every launch of a test, on a device that is not there; Triton has compiled nothing."""
    seen = Launches()
    simple.device_caches.clear()
    monkeypatch.setattr(triton_launch, "_SITES", {})
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(triton_launch, "_OTHERS", [None])
    with active(seen.device):
        yield seen


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernels of the launches that were left to Triton."""
    own, seen = triton_launch.ask, []

    def ask(kernel: Any, *args: Any) -> Any:
        seen.append(kernel)
        return own(kernel, *args)

    monkeypatch.setattr(triton_launch, "ask", ask)
    return seen


def tritons_key(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> str:
    """What Triton finds a compiled kernel by."""
    *_, binder = kernel.device_caches[driver.active.get_current_device()]
    own = constants | {"debug": False, "instrumentation_mode": ""}
    _, specialization, options = binder(*args, **own)
    return compute_cache_key({}, specialization, options)


def our_key(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """What a prepared launch is found by; None if there is none."""
    kinds = tuple(map(type, args))
    key = triton_launch.Site(kernel, kinds).key(args, constants)
    return None if key is None else (kinds, key)


MEMORY = torch.zeros(256, dtype=torch.uint8)
EDGES = (0, 1, 2, 15, 16, 17, 1 << 31, (1 << 31) - 1, (1 << 31) - 16, 1 << 32, 1 << 63)

dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8])
integers = st.one_of(
    st.sampled_from(EDGES),
    st.sampled_from([-x for x in EDGES[:-1]]),
    st.integers(0, 64),
    st.integers(-(1 << 63), (1 << 64) - 1),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, offset = draw(dtypes), draw(st.sampled_from([0, 0, 0, 4, 8, 12, 16, 20]))
    found = MEMORY[offset : offset + 64].view(dtype)
    if dtype.is_floating_point and draw(st.booleans()):
        return torch.nn.Parameter(found)
    return found


others = st.one_of(
    integers, st.booleans(), st.floats(), st.none(), tensors(), st.tuples(integers, integers)
)
values = st.sampled_from([0, 1, 2, True, False, None, 1.0, 0.5, "a", Sizes(), Sizes(32)])
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "num_warps": st.sampled_from([1, 2, 4]),
        "num_stages": st.sampled_from([1, 2, 4]),
        "maxnreg": st.sampled_from([128, 255]),
        "enable_fp_fusion": st.booleans(),
    },
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = (draw(tensors()), draw(tensors()), *(draw(integers) for _ in "xy"))
    args += (draw(integers), draw(integers), draw(st.none() | tensors()), draw(others))
    return args, {"C": draw(values), "D": draw(values)} | draw(OPTIONS)


@st.composite
def pairs(draw: st.DrawFn) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Two calls that differ in few arguments, or all."""
    first, second = draw(calls()), draw(calls())
    takes = draw(st.lists(st.integers(0, len(second[0]) - 1), max_size=2, unique=True))
    if draw(st.booleans()):
        args = tuple(second[0][i] if i in takes else x for i, x in enumerate(first[0]))
        second = args, draw(st.sampled_from([first[1], second[1]]))
    return [first, second]


A = MEMORY[:64].view(torch.float32)


@given(pairs())
@example([((A, A, 16, 1, 1, 8, None, 0.5), {"C": 1, "D": 1}) for _ in range(2)])
@example([((A, A, 16, 1, x, 8, None, 0.5), {"C": 1, "D": 1}) for x in (1, 1 << 31)])
@example([((A, A, 16, x, 1, 8, None, 0.5), {"C": 1, "D": 1}) for x in (0, 1)])
@example([((A, A, 16, 0, 1, 8, None, 0.5), {"C": x, "D": 1}) for x in (True, 1)])
@example([((A, A, 0, 0, 1, 8, None, 0.5), {"C": 1, "D": 1, "num_warps": x}) for x in (1, 2)])
@example(
    [((A, A, 0, 0, 1, 8, None, 0.5), {"C": 1, "D": 1, x: 2}) for x in ("num_warps", "maxnreg")]
)
@example([((A, A, 0, 0, 1, 8, None, (x, 2)), {"C": 1, "D": 1}) for x in (1, 2)])
def test_calls_share_a_launch_only_if_triton_gives_them_one_kernel(
    both: list[tuple[tuple[Any, ...], dict[str, Any]]],
) -> None:
    with active(NoDevice("sm_90")):
        ours = [our_key(anything, *call) for call in both]
        if None in ours or ours[0] != ours[1]:
            return
        assert tritons_key(anything, *both[0]) == tritons_key(anything, *both[1])


def variants(x: Any) -> list[Any]:
    """What may stand in place of an argument of a kernel."""
    if isinstance(x, torch.Tensor):
        flat = x.view(-1)[:64].contiguous()
        return [x, flat[1:], flat[16:], flat.view(torch.int8), torch.nn.Parameter(flat, False)]
    if type(x) is int:
        return [x, *EDGES[:-1], -1]
    return [x, 2.5, 0.0, 3, True, None]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, dict[str, Any]]]:
    """One launch of each kernel with each set of constants, as calls of FlowKV make them."""
    seen: dict[Any, Any] = {}

    def run_kernel(kernel: Any, grid: Any, args: Any, constants: dict[str, Any]) -> None:
        seen.setdefault((kernel.__name__, *constants), (kernel, args, constants))

    monkeypatch.setattr(triton_launch, "run_kernel", run_kernel)
    for case in codegen.CASES:
        if case.scope == "every" or case.options:
            codegen.CALLS[case.op](codegen.scene(case))
    return list(seen.values())


def test_flowkvs_kernels_are_told_apart_as_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each argument of each kernel in turn is replaced by what differs, and by what does not."""
    same, served = 0, set()
    with active(NoDevice("sm_90")):
        for kernel, args, constants in recorded(monkeypatch):
            served.add(kernel.__name__)
            own = our_key(kernel, args, constants)
            theirs = tritons_key(kernel, args, constants)
            assert own is not None, f"launches of {kernel.__name__} are never prepared"
            for i, old in enumerate(args):
                for x in variants(old):
                    call = (*args[:i], x, *args[i + 1 :])
                    key = our_key(kernel, call, constants)
                    if key == own:
                        assert tritons_key(kernel, call, constants) == theirs, (kernel, i, x)
                        same += 1
    assert {"attend_few", "attend_lists", "attend_many", "merge_few", "append_kernel"} <= served
    assert same > 500, "the same kernel is found for other tensors and numbers"


def run(x: int = 16, a: torch.Tensor = A, **constants: Any) -> None:
    launch(simple, (4, 2), a, x, C=Sizes(), **constants)


def test_a_prepared_launch_is_given_what_triton_gives(launches: Launches, asked: list[Any]) -> None:
    other = MEMORY[64:128].view(torch.float32)
    for a, x in ((A, 16), (other, 32), (other, 16)):
        run(x, a)
        simple[4, 2](a, x, C=Sizes(), enable_fp_fusion=True)
        ours, theirs = launches[-2:]
        assert ours[:6] == theirs[:6]
        assert all(p is q or p == q for p, q in zip(ours[9:], theirs[9:], strict=True))
    assert len(asked) == 1


def calls_of(call: Callable[[], Any]) -> int:
    """Functions of FlowKV and Triton, and of C, that a call runs there."""
    found: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        room = frame.f_globals.get("__name__", "triton").partition(".")[0]
        if event in ("call", "c_call") and room in ("flowkv", "triton"):
            found.append(event)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(found)


def test_a_prepared_launch_costs_little_python(launches: Launches, asked: list[Any]) -> None:
    """From `launch` to the compiled kernel's launcher; and a layer's step, beside its launches."""
    run()
    assert calls_of(lambda: run(32)) <= 22
    assert len(asked) == 1 and len(launches) == 2
    scene = Scene(layout_of(2, 64, page_size=64), [200, 70], [1, 1], layer=0)
    q, new = torch.zeros(2, 4, 64), torch.zeros(2, 2, 64)

    def layer() -> None:
        kernels.append(new, new, scene.pages, scene.batch, backend="triton")
        kernels.paged_attention(q, scene.pages, scene.batch, backend="triton")

    layer()
    assert calls_of(layer) <= 130, "it was 290"
    assert len(asked) == 4 and len(launches) == 8


def test_hooks_around_launches_are_called(launches: Launches) -> None:
    """Triton's launcher calls them, if there are any."""
    run()
    run()
    assert launches[-1][7:9] == (None, None)
    for where, name in ((7, "launch_enter_hook"), (8, "launch_exit_hook")):
        with knobs.runtime.scope():
            getattr(knobs.runtime, name).add(print)
            run()
            assert launches[-1][where].calls == [print]
            getattr(knobs.runtime, name).remove(print)
        with knobs.runtime.scope():
            setattr(knobs.runtime, name, print)
            run()
            assert launches[-1][where] is print
    run()
    assert launches[-1][7:9] == (None, None)


def test_what_triton_forgets_is_compiled_anew(launches: Launches, asked: list[Any]) -> None:
    for _ in range(2):
        simple.device_caches.clear()
        run()
        run()
    assert len(asked) == 2


def test_a_constant_of_the_module_that_changed_is_refused(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    run()
    monkeypatch.setitem(globals(), "OFFSET", tl.constexpr(4))
    with pytest.raises(RuntimeError, match="OFFSET has changed"):
        run()
    monkeypatch.undo()


def test_switches_of_triton_are_obeyed(
    launches: Launches, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "debug", True)
        run()
    heard: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(simple, "pre_run_hooks", [lambda *args, **given: heard.append(args)])
        run()
    run()
    assert len(asked) == 3 and len(heard) == 1


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1234"])
def test_a_triton_that_is_not_known_is_asked_each_time(
    version: str, launches: Launches, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    run()
    run()
    assert len(asked) == 2 == len(launches)


def test_devices_of_amd_are_asked_each_time(asked: list[Any]) -> None:
    with active(NoDevice("gfx942")):
        run()
        run()
    assert len(asked) == 2


def test_other_arguments_are_left_to_triton(launches: Launches, asked: list[Any]) -> None:
    for x in (-1, 1 << 31, True, 0.5):
        run(x)
    prepared = 2  # what is no integer has launches of its own
    for x in (-1, 1 << 31, True, 0.5):
        run(x)
    assert len(asked) == 8 - prepared


def test_a_launcher_of_another_form_is_left_to_triton(
    launches: Launches, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: Any) -> None:
        raise TypeError("function takes exactly 9 arguments")

    memory = torch.zeros(16, dtype=torch.int32)
    launch(simple, (1,), memory, 3, C=Sizes())
    (site,) = triton_launch._SITES.values()
    ((key, prepared),) = site.prepared.items()
    site.prepared[key] = prepared._replace(run=refuses)
    for count in (2, 3):
        launch(simple, (1,), memory, 3, C=Sizes())
        assert len(launches) == len(asked) == count
