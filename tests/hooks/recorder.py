"""A CUDA graph's stand-in: keeps the operations of a forward, and does them again verbatim.

What is kept are the operations of torch and the launches of FlowKV's kernels, with the very tensors
that they were given: whatever a forward would decide anew in Python, a replay does not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowkv import kernels
from tests import inside
from tests.inside import dispatch, door, graphs


class Recording(threading.local):
    """The recorders of a thread, the innermost last: others compute beside it."""

    def __init__(self) -> None:
        self.now: list[LaunchRecorder] = []


_RECORDING = Recording()


class LaunchRecorder(TorchDispatchMode):
    """Records operations and launches; a `graphs.Recorder`.

    Attributes:
        calls: (function, its arguments, what it returned), in their order.
    """

    names_flowkv_pages = True
    n_bytes = 1

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        assert func not in WAITS, f"{func} waits for the device in a captured step"
        out = func(*args, **given)
        self.keep(func, args, given, out)
        return out

    def keep(self, func: Any, args: Any, given: Any, out: Any) -> None:
        """Note a call, unless it only shows memory of its arguments in another way."""
        changes = not hasattr(func, "_schema") or func._schema.is_mutable
        if changes or not _memory(out) & _memory((args, given)):
            self.calls.append((func, args, given, out))

    def record(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        with keeping(self):
            return run()

    def replay(self) -> None:
        for func, args, given, out in self.calls:
            again = func(*args, **given)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


@contextmanager
def keeping(recorder: LaunchRecorder) -> Iterator[None]:
    """Record the operations and launches of the block."""
    with recorder:
        _RECORDING.now.append(recorder)
        try:
            yield
        finally:
            _RECORDING.now.pop()


def recording() -> bool:
    """Return whether this thread records."""
    return bool(_RECORDING.now)


WAITS = frozenset(
    (
        *(torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default),
        *(torch.ops.aten.nonzero.default, torch.ops.aten.is_nonzero.default),
        *(torch.ops.aten._unique2.default, torch.ops.aten.masked_select.default),
    )
)
"""Operations whose result the host has to know."""


def _memory(values: Any) -> set[int]:
    return {
        leaf.untyped_storage().data_ptr()
        for leaf in tree_leaves(values)
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.numel()
    }


def _resolve(op: str, codec: str, backend: str) -> Callable[..., Any]:
    own = _OWN(op, codec, backend)
    if not _RECORDING.now:
        return own

    def launch(*args: Any) -> Any:
        recorder = _RECORDING.now[-1]
        with torch._C._DisableTorchDispatch():  # what a kernel does inside is its own
            out = own(*args)
        recorder.keep(own, args, {}, out)
        return out

    return launch


def _check_batch(*args: Any, **given: Any) -> None:
    with torch._C._DisableTorchDispatch():  # on a CPU it looks at what it asks no GPU for
        _CHECK(*args, **given)


_OWN, _CHECK = dispatch.resolve, dispatch.check_batch


@contextmanager
def launches() -> Iterator[None]:
    """Triton's interpreter serves the CPU, and each launch of a kernel is kept by itself."""
    launch = inside.triton_launch
    own = launch.run_kernel

    def run_kernel(kernel: Any, grid: Any, args: Any, constants: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            found = own(kernel, grid, args, constants)
        if _RECORDING.now:
            _RECORDING.now[-1].keep(own, (kernel, grid, args, dict(constants)), {}, None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "run_kernel", run_kernel)
        patch.setattr(dispatch, "resolve", lambda op, codec, _: _OWN(op, codec, "triton"))
        patch.setattr(kernels, "prepare_decode", lambda *_: None)  # the package keeps what it found
        yield


@contextmanager
def recorded(*, kernels: bool = True) -> Iterator[list[LaunchRecorder]]:
    """Steps on the CPU are captured by recorders; those that were made."""
    made: list[LaunchRecorder] = []

    def recorder_of(device: torch.device) -> LaunchRecorder:
        made.append(LaunchRecorder())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "recorder_of", recorder_of)
        patch.setattr(door, "recorder_of", recorder_of)
        if kernels:
            patch.setattr(dispatch, "resolve", _resolve)
        patch.setattr(dispatch, "check_batch", _check_batch)
        yield made
