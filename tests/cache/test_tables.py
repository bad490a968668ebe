"""Lines of sequences, and how they come to a device."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flowkv
from tests.inside import CLOSED, READY, CapacityError, Tables


def test_lines_are_given_emptied_and_grown() -> None:
    tables = Tables([torch.device("cpu"), torch.device("cpu")], 2, max_pages=2)
    first, second = tables.open_row(), tables.open_row()
    with pytest.raises(CapacityError, match="raise max_rows"):
        tables.open_row()
    assert tables.state.tolist() == [READY, READY, CLOSED]
    tables.pages[1][second, 1] = 7
    old = tables.table(1)
    tables.reserve(3)
    assert tables.pages[1].shape == (2, 4) and tables.pages[1][second].tolist() == [-1, 7, -1, -1]
    assert old.shape == (2, 2) and old[second].tolist() == [-1, 7], "a running step keeps its table"
    assert tables.table(1)[second].tolist() == [-1, 7, -1, -1]
    tables.lengths[second], tables.shared[second] = 9, True
    tables.close_row(second)
    assert tables.pages[1][second].tolist() == [-1] * 4 and tables.lengths[second] == 0
    assert not tables.shared[second] and tables.open_row() == second != first
    assert tables.lengths[tables.nowhere] == 0 and tables.state[tables.nowhere] == CLOSED


class Transfers(TorchDispatchMode):
    """Notes of each copy to another device whether the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if (
            func is torch.ops.aten._to_copy.default
            and given.get("device", args[0].device).index == 0
        ):
            self.waits.append(not given.get("non_blocking"))
        return func(*args, **given)


@pytest.mark.at_once
def test_a_table_goes_to_its_device_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of pinned memory; each stream reads the copy that it made, also after a change."""
    stream, pinned = ["one"], list[torch.Tensor]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream[0])
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x) or x)
    tables = Tables([torch.device("cuda:0"), torch.device("cuda:0")], 2)
    with FakeTensorMode(allow_non_fake_inputs=True), Transfers() as transfers:
        own = tables.table(0)
        assert own.device.type == "cuda" and tables.table(0) is own
        stream[0] = "two"
        other = tables.table(0)
        assert other is not own and tables.table(0) is other and tables.table(1) is not other
        tables.mark_changed()
        assert tables.table(0) is not other
    assert len(pinned) == len(transfers.waits) == 4 and not any(transfers.waits)


def test_steps_send_what_they_planned_by_one_function() -> None:
    """A copy out of memory that is not pinned waits for the forward before; no CPU notices."""
    root, found = Path(flowkv.__file__).parent, list[str]()
    packed = [root / f"hooks/huggingface/{name}.py" for name in ("packed", "packing", "rows")]
    for path in (*root.glob("cache/*.py"), *root.glob("engine/*.py"), *packed,
                 root / "kernels/cascade.py"):  # fmt: skip
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Call) else ""
            moved = text.startswith("torch.from_numpy(") and ").to(" in text
            made = text.startswith("torch.tensor(") and "device=" in text
            if (moved or made) and "device='cpu'" not in text:
                found.append(f"{path.name}: {text}")
    assert [one.partition(":")[0] for one in found] == ["audit.py"], found  # of an audit alone
