"""Weights larger than their memory: the plain model's outputs, few reads, no wrong tensor."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import flowkv
from tests.clock import held, in_child, together
from tests.inside import (
    Checkpoint,
    ConfigError,
    StateError,
    StoreError,
    UnnamedError,
    Weights,
    belady,
    own_memory,
    weights_module,
)
from tests.interrupts import Tracer, chosen, collectable, free, places, run


class Decoder(nn.Module):
    """Layers with a weight of their own, children, and a head that is tied to the embedding."""

    def __init__(self, layers: int, width: int, *, tied: bool = False, swap: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 37, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.swap = swap

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for layer in reversed(self.layers) if self.swap else self.layers:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    """A scale of its own, used after its children."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


def saved(model: nn.Module, path: Path) -> Path:
    """The model's weights in a file, each once."""
    unique = {id(p): (n, p.detach().clone()) for n, p in reversed(list(model.named_parameters()))}
    save_file(dict(unique.values()), path)
    return path


IDS = torch.arange(12).reshape(2, 6) % 37


@pytest.fixture(params=["near", "far"])
def placed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Options for weights in the CPU's memory, and for those that reach a device by a copy.

    All but streams and pinned memory of a GPU runs here: a device that stands in for one is the
    CPU, which everything is copied to.
    """
    if request.param == "near":
        return {}
    monkeypatch.setattr(weights_module, "is_far", lambda device: True)
    return {"device": "cpu"}


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    layers=st.integers(1, 6),
    width=st.sampled_from([3, 16, 65]),
    share=st.integers(5, 100),
    tied=st.booleans(),
    swap=st.booleans(),
    from_file=st.booleans(),
)
def test_outputs_are_those_of_the_plain_model(
    tmp_path: Path,
    placed: dict[str, str],
    layers: int,
    width: int,
    share: int,
    tied: bool,
    swap: bool,
    from_file: bool,
) -> None:
    model = Decoder(layers, width, tied=tied, swap=swap)
    expected = model(IDS).detach()
    path = saved(model, tmp_path / "w.safetensors") if from_file else None
    try:
        disk = str(tmp_path / "m")
        weights = flowkv.attach_weights(model, path, budget=f"{share}%", disk=disk, **placed)
    except ConfigError as error:
        # The least that it names is enough, and is not less than was offered.
        least = int(error.remedy.split(" bytes")[0].split()[-1])
        assert least > share * sum(p.numel() * 4 for p in model.parameters()) // 100
        weights = flowkv.attach_weights(model, path, budget=least, disk=disk, **placed)
    for _ in range(3):
        assert torch.equal(model(IDS), expected)
        stats = weights.stats()
        assert stats["resident_bytes"] + stats["buffer_bytes"] <= stats["budget_bytes"]
    weights.detach()
    assert torch.equal(model(IDS), expected)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("skew", range(0, 64, 8))
def test_outputs_are_those_of_aligned_weights_wherever_the_file_has_them(
    tmp_path: Path, skew: int
) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    path, x = saved(model, tmp_path / "w.safetensors"), torch.rand(1, 512)
    expected = model(x).detach()
    data = path.read_bytes()
    n_bytes = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + n_bytes] + b" " * skew
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + n_bytes :])
    with flowkv.attach_weights(model, path, budget="60%", disk=str(tmp_path)):
        for _ in range(3):
            assert torch.equal(model(x), expected)
            found = [p for p in model.parameters() if p.numel()]
            assert all(p.data_ptr() % 64 == 0 for p in found)
            assert found


def stack(layers: int = 60, width: int = 128) -> nn.Sequential:
    """Equal layers of 64 KiB."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).eval()


@pytest.mark.parametrize("share", [10, 25, 50])
def test_reads_are_within_5_percent_of_the_optimum(tmp_path: Path, share: int) -> None:
    layers, cycles, width = 160, 3, 320
    model = stack(layers, width)
    path = saved(model, tmp_path / "w.safetensors")
    x = torch.rand(2, width)
    expected = model(x).detach()
    with flowkv.attach_weights(model, path, budget=f"{share}%", disk=str(tmp_path)) as weights:
        for _ in range(2):
            assert torch.equal(model(x), expected)
        before, stats = weights.stats()["reads"], weights.stats()
        for _ in range(cycles):
            model(x)
        reads = (weights.stats()["reads"] - before) / cycles
    units = int(stats["units"])
    uses = np.tile(np.arange(units), 40)
    capacity = int(stats["budget_bytes"] // (stats["total_bytes"] / units))
    hits = belady(np.arange(len(uses) + 1), uses, units, capacity)
    optimum = units - hits[-20 * units :].sum() / 20
    assert optimum > 10
    assert reads <= 1.05 * optimum, (reads, optimum)


def flip(path: Path, at: int) -> None:
    """One damaged bit, and the times of the file as they were."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_damaged_byte_is_found_by_a_later_process(tmp_path: Path) -> None:
    model, x = stack(), torch.rand(1, 128)
    path = saved(model, tmp_path / "w.safetensors")
    with flowkv.attach_weights(model, path, budget="30%", disk=str(tmp_path)):
        model(x)
    flip(path, path.stat().st_size // 2)
    weights = flowkv.attach_weights(model, path, budget="30%", disk=str(tmp_path))
    with pytest.raises(StoreError, match="damaged at byte"):
        model(x)
    flip(path, path.stat().st_size // 2)
    for _ in range(3):  # what was being read ahead just then
        with contextlib.suppress(StoreError):
            model(x)
    model(x)  # nothing is stuck
    weights.detach()


def test_names_that_are_no_text_and_a_changed_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = stack(), torch.rand(1, 128)
    wanted = model(x)
    path = saved(model, tmp_path / "w").rename(os.fsdecode(os.fsencode(tmp_path) + b"/w\xff"))
    monkeypatch.chdir(tmp_path)
    weights = flowkv.attach_weights(model, path, budget="30%", disk="kept")
    monkeypatch.chdir("/")
    assert torch.equal(model(x), wanted)
    weights.detach()
    assert [*(tmp_path / "kept").glob("*.digests")]


def _read_one(path: Path, manifests: Path, name: str) -> Checkpoint:
    found = Checkpoint(path, manifests)
    layout = found.layout([found.tensors[name]])
    memory = np.frombuffer(own_memory(layout.n_bytes), np.uint8)
    found.fill(memory, layout)
    return found


def test_a_manifest_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    save_file({"a": torch.randn(64, 64)}, tmp_path / "w.safetensors")
    found = _read_one(tmp_path / "w.safetensors", tmp_path / "sums", "a")
    (tmp_path / "sums").rmdir()
    with pytest.warns(RuntimeWarning, match="cannot be written") as told:
        found.save()
        found.close()
    assert len(told) == 1


def test_two_that_write_a_manifest_at_a_time_leave_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrote into the other's, so that damage of the file was found no more."""
    path = tmp_path / "two.safetensors"
    save_file({name: torch.randn(64, 64) for name in "ab"}, path)
    first, other = (_read_one(path, tmp_path / "sums", name) for name in "ab")
    saves = [other.save]

    def sync(fd: int) -> None:
        if saves:
            saves.pop()()

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "fdatasync", sync)
    first.save()
    monkeypatch.undo()
    again = Checkpoint(path, tmp_path / "sums")
    known = [one._files[0]._digests for one in (first, other, again)]
    assert known[2] in known[:2]
    for one in (first, other, again):
        one.close()
    assert len(list((tmp_path / "sums").iterdir())) == 1


def test_a_file_that_is_written_to_is_not_read_on(tmp_path: Path) -> None:
    model, x = stack(), torch.rand(1, 128)
    path = saved(model, tmp_path / "w.safetensors")
    weights = flowkv.attach_weights(model, path, budget="30%", disk=str(tmp_path))
    model(x)
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"abcd")
    with pytest.raises(StoreError, match=r"was changed.*Load the model anew"):
        for _ in range(3):
            model(x)
    weights.close()
    with pytest.raises(StateError, match=r"closed.*Load the model anew"):
        model(x)
    anew, wanted = stack(), stack()
    wanted.load_state_dict(load_file(path))
    with flowkv.attach_weights(anew, path, budget="30%", disk=str(tmp_path)):
        assert torch.equal(anew(x), wanted(x))


def test_a_missing_and_a_misshapen_weight_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5))
    save_file({"0.weight": torch.rand(5, 4)}, tmp_path / "a.safetensors")
    with pytest.raises(StoreError, match=r"no 0\.bias"):
        flowkv.attach_weights(model, tmp_path / "a.safetensors", disk=str(tmp_path))
    both = {"0.weight": torch.rand(4, 5), "0.bias": torch.rand(5)}
    save_file(both, tmp_path / "a.safetensors")
    with pytest.raises(StoreError, match=r"0\.weight is .* \[5, 4\].* \[4, 5\]"):
        flowkv.attach_weights(model, tmp_path / "a.safetensors", disk=str(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(StoreError, match="no safetensors file"):
        flowkv.attach_weights(model, tmp_path / "a.safetensors", disk=str(tmp_path))
    assert torch.isfinite(model(torch.rand(1, 4))).all(), "it is what it was"


def test_a_change_within_a_forward_is_kept(tmp_path: Path) -> None:
    model, x = stack(), torch.rand(1, 128)

    def double(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)

    for n in (3, 30, 31):
        path = saved(model, tmp_path / "w.safetensors")
        weights = flowkv.attach_weights(model, path, budget="30%", disk=str(tmp_path))
        handle = model[n].register_forward_pre_hook(double)
        model(x)
        handle.remove()
        once = model(x)
        assert torch.equal(once, model(x))
        assert weights.stats()["resident_bytes"] <= weights.stats()["budget_bytes"]
        weights.detach()
        assert torch.equal(model(x), once)


def test_a_weight_that_is_not_there_computes_nothing(tmp_path: Path) -> None:
    model, x = stack(), torch.rand(1, 128)
    weights = flowkv.attach_weights(model, budget="30%", disk=str(tmp_path))
    assert not list(tmp_path.iterdir()), "what it wrote goes with the process"
    model(x)
    away: Any = next(m for m in model.parameters() if m.numel() == 0)
    with pytest.raises(RuntimeError):
        nn.functional.linear(x, away)
    with pytest.raises(StateError, match="copied"):
        model.state_dict()
    with torch.no_grad():
        away.mul_(2)
    with pytest.raises(StateError, match="written to while it was not in memory"):
        model(x)
    weights.close()


def _vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 1.5, model.parameters())


def _each(change: Any) -> Any:
    return lambda model: [change(p) for p in model.parameters()]


HALVES = {
    "half and float": lambda model: (model.half(), model.float()),
    "bfloat16 and float": lambda model: (model.bfloat16(), model.float()),
    "half": lambda model: model.half(),
    "vector_to_parameters": _vector,
    "data in place": _each(lambda p: p.data.mul_(1.5)),
    "data replaced": _each(lambda p: setattr(p, "data", p.data * 1.5)),
    "numpy": _each(lambda p: np.multiply(p.data.numpy(), 1.5, out=p.data.numpy())),
    "detached": _each(lambda p: p.detach().data.add_(1e-3)),
    "counted": _each(lambda p: p.mul_(1.5)),
    "initialised": lambda model: [nn.init.normal_(layer.weight) for layer in model],
}


@pytest.mark.parametrize("change", HALVES)
@pytest.mark.parametrize("used", [False, True])
def test_the_whole_model_changed_while_a_part_is_in_memory(
    tmp_path: Path, change: str, *, used: bool
) -> None:
    model, x = stack(20), torch.rand(1, 128)
    weights = flowkv.attach_weights(model, budget="50%", disk=str(tmp_path))
    if used:
        model(x)
        assert 1 < sum(bool(p.numel()) for p in model.parameters()) < 20
    plain = model(x) if used else None
    with torch.no_grad():
        HALVES[change](model)
    if not used and change in ("data in place", "numpy", "detached"):
        assert torch.isfinite(model(x)).all(), "there was nothing yet that could be written to"
    else:
        for call in (lambda: model(x), weights.detach, lambda: model(x)):
            with pytest.raises((StateError, RuntimeError), match=r"written to|dtype"):
                call()
        assert plain is None or torch.isfinite(plain).all()
    weights.close()


@pytest.mark.parametrize("change", HALVES)
def test_a_model_that_is_in_memory_whole_is_changed_whole(tmp_path: Path, change: str) -> None:
    model, twin, x = stack(6), stack(6), torch.rand(1, 128)
    twin.load_state_dict(model.state_dict())
    with flowkv.attach_weights(model, budget="64MiB", disk=str(tmp_path)):
        model(x)
        assert all(p.numel() for p in model.parameters())
        for one in (model, twin):
            torch.manual_seed(1)
            with torch.no_grad():
                HALVES[change](one)
        at = x.to(next(twin.parameters()).dtype)
        assert torch.equal(model(at), twin(at))


def test_what_a_forward_hands_out_stays_as_it_was(tmp_path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(128, 128))

        def forward(self, x: torch.Tensor) -> Any:
            return self.weight[: len(x)]

    model = nn.Sequential(*(Positions() for _ in range(60)))
    x = torch.rand(128, 1)
    expected = [m(x).detach().clone() for m in model]
    with flowkv.attach_weights(model, budget="30%", disk=str(tmp_path)):
        got = [m(x) for m in model]
        model(x)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_modules_in_another_order_are_slower_and_right(tmp_path: Path) -> None:
    model, x = stack(), torch.rand(1, 128)
    expected = [m(x).detach() for m in model]
    with flowkv.attach_weights(model, budget="30%", disk=str(tmp_path)):
        model(x)
        for n in torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist():
            assert torch.equal(model[n](x), expected[n])


def test_nothing_is_loaded_first(tmp_path: Path) -> None:
    plain = Decoder(4, 65, tied=True)
    path = saved(plain, tmp_path / "w.safetensors")
    with torch.device("meta"):
        model = Decoder(4, 65)
    model.head.weight = model.embed.weight
    weights = flowkv.attach_weights(model, path, budget="90%", disk=str(tmp_path))
    assert weights.stats()["read_bytes"] == 0
    assert torch.equal(model(IDS), plain(IDS))
    weights.detach()
    assert torch.equal(model(IDS), plain(IDS))
    assert model.head.weight is model.embed.weight


def test_weights_are_attached_within_inference_mode(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    path, x = saved(model, tmp_path / "w.safetensors"), torch.rand(3, 64)
    expected = model(x).detach()
    with torch.device("meta"):
        empty = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    with (
        torch.inference_mode(),
        flowkv.attach_weights(empty, path, budget="50%", disk=str(tmp_path)),
    ):
        assert torch.equal(empty(x), expected)
    assert torch.equal(empty(x), expected)


def test_what_is_away_is_taken_for_nothing_else(tmp_path: Path) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.body = nn.Linear(8, 4), stack()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.prompt.weight, self.body(x)[:, :8]])

    model, x = Parent(), torch.rand(2, 128)
    weights = flowkv.attach_weights(model, budget="30%", disk=str(tmp_path))
    away = [p for p in model.parameters() if not p.numel()]
    with pytest.raises(RuntimeError):
        torch.cat([away[0], torch.rand(2, 8)])
    model.double()  # while they are away
    with pytest.raises((StateError, RuntimeError)):
        model(x)
    weights.close()


def test_threads_take_turns(tmp_path: Path) -> None:
    model = stack()
    xs = [torch.rand(1, 128) for _ in range(4)]
    expected = [model(x).detach() for x in xs]
    wrong: list[int] = []
    with flowkv.attach_weights(model, budget="30%", disk=str(tmp_path)):

        def work(n: int) -> None:
            for _ in range(5):
                if not torch.equal(model(xs[n]), expected[n]):
                    wrong.append(n)

        together(*(partial(work, n) for n in range(4)))
    assert not wrong


def test_a_forward_that_raises_leaves_nothing_held(tmp_path: Path) -> None:
    model, x = stack(), torch.rand(1, 128)
    expected = model(x).detach()
    with flowkv.attach_weights(model, budget="30%", disk=str(tmp_path)):
        with pytest.raises(RuntimeError):
            model(torch.rand(1, 7))
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(model(x)))
        thread.start()
        thread.join(30)
        assert torch.equal(got[0], expected)


def test_layers_of_torch_that_use_weights_below_them(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    x = torch.rand(2, 5, 32)
    with torch.no_grad():
        expected = model(x)
        with flowkv.attach_weights(model, budget="88KiB", disk=str(tmp_path)):
            assert torch.equal(model(x), expected)
            assert torch.equal(model(x), expected)


def test_buffers_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("own", torch.rand(8), persistent=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.norm(x) + self.own

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner()

        def forward(self, x: torch.Tensor) -> Any:
            return self.model(x)

    model, x, path = Inner().eval(), torch.rand(4, 8), tmp_path / "w.safetensors"
    model.norm.running_mean.add_(3)
    save_file(
        {n: t.double() if n == "norm.running_var" else t for n, t in model.state_dict().items()},
        path,
    )
    other = Outer().eval()
    for attached in (other.model, other):
        other.model.own = model.own
        other.model.norm.running_mean.zero_()
        with flowkv.attach_weights(attached, path, budget="1MiB", disk=str(tmp_path)):
            assert torch.equal(attached(x), model(x))
    with torch.device("meta"):
        empty = Inner().eval()
    empty.own = model.own
    with flowkv.attach_weights(empty, path, budget="1MiB", disk=str(tmp_path)):
        assert torch.equal(empty(x), model(x))
    assert [p.requires_grad for p in empty.parameters()] == [True, True]


def test_two_files_with_one_name_are_refused(tmp_path: Path) -> None:
    model = stack(4)
    for name in ("model", "old"):
        saved(model, tmp_path / f"{name}.safetensors")
    with pytest.raises(StoreError, match="two files"):
        flowkv.attach_weights(model, tmp_path, budget="100%", disk=str(tmp_path))


def test_parameters_in_one_place_are_refused(tmp_path: Path) -> None:
    model = stack(4)
    model[3].weight.data = model[2].weight.data
    with pytest.raises(ConfigError, match="share memory"):
        flowkv.attach_weights(model, budget="100%", disk=str(tmp_path))
    both = torch.rand(128, 256)  # columns side by side share no byte
    for place, part in ((2, both[:, :128]), (3, both[:, 128:])):
        model[place].weight.data = part
    flowkv.attach_weights(model, budget="100%", disk=str(tmp_path)).detach()


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint64, torch.complex64, torch.float8_e8m0fnu]
)
def test_every_dtype_of_the_format_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(64, dtype=torch.uint8).view(dtype)
    save_file({"x": values}, tmp_path / "w.safetensors")
    checkpoint = Checkpoint(tmp_path / "w.safetensors", tmp_path)
    assert checkpoint.tensors["x"][3:5] == (dtype, tuple(values.shape))
    checkpoint.close()


def test_copies_are_refused_in_words_and_nothing_is_loaded(tmp_path: Path) -> None:
    model, x = stack(20), torch.rand(1, 128)
    expected, other = model(x), stack(20).state_dict()
    with flowkv.attach_weights(model, budget="50%", disk=str(tmp_path)):
        model(x)
        for way in (copy.deepcopy, pickle.dumps, lambda model: model.load_state_dict(other)):
            with pytest.raises(StateError, match="detach"):
                way(model)
        assert torch.equal(model(x), expected)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    stem = f"weights-1-{10**18}.safetensors"
    left = [tmp_path / stem, tmp_path / f".{stem}.{'a' * 16}.part"]
    kept = [tmp_path / "weights-1.safetensors", tmp_path / f"weights-2-{10**18}.safetensors"]
    for path in (*left, *kept):
        path.write_bytes(b"weights")
        os.utime(path, (1, 1) if path != kept[1] else None)
    with flowkv.attach_weights(stack(4), budget="1MiB", disk=str(tmp_path)):
        pass
    assert [path.exists() for path in (*left, *kept)] == [False, False, True, True]


def test_attention_of_torch_and_lists_of_parameters(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)
            self.factors = nn.ParameterList(torch.rand(16) for _ in range(3))
            self.lstm = nn.LSTM(16, 16)
            self.rest = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.attention(x, x, x)[0] * self.factors[1]
            return self.rest(self.lstm(x)[0])

    model, x = Odd(), torch.rand(3, 1, 16)
    expected = model(x).detach()
    with flowkv.attach_weights(model, budget=120_000, disk=str(tmp_path)) as weights:
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
        assert weights.stats()["resident_units"] < weights.stats()["units"]


class TestDevices:
    def test_what_the_host_keeps_is_read_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And no more than it was given."""
        monkeypatch.setattr(weights_module, "is_far", lambda device: True)
        model = Decoder(12, 65)
        expected, total = model(IDS).detach(), sum(p.numel() * 4 for p in model.parameters())
        reads = []
        for host in ("0%", "30%", "100%"):
            path = saved(model, tmp_path / f"{host}.safetensors")
            with flowkv.attach_weights(
                model, path, budget="40%", device="cpu", host=host, disk=str(tmp_path)
            ) as weights:
                for _ in range(2):  # the first one learns the order
                    assert torch.equal(model(IDS), expected)
                before = weights.stats()
                for _ in range(3):
                    assert torch.equal(model(IDS), expected)
                after = weights.stats()
                reads.append(after["read_bytes"] - before["read_bytes"])
                assert after["host_bytes"] <= int(host[:-1]) / 100 * total
            assert torch.equal(model(IDS), expected)
        assert reads[0] > 1.3 * reads[1] > reads[2] == 0

    def test_a_changed_file_is_noticed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(weights_module, "is_far", lambda device: True)
        model = Decoder(12, 65)
        path = saved(model, tmp_path / "w.safetensors")
        weights = flowkv.attach_weights(
            model, path, budget="40%", device="cpu", disk=str(tmp_path / "m")
        )
        model(IDS)
        os.utime(path, ns=(1, 1))
        with pytest.raises(StoreError, match="was changed"):
            for _ in range(2):
                model(IDS)
        weights.close()

    def test_are_said_by_the_longest_name_of_a_module(self) -> None:
        where = weights_module._Devices({"": "cpu", "layers.1": "cpu", "layers.12": "cpu"})
        assert where.device("layers.1.up") is where._by_name["layers.1"]
        assert where.device("layers.12") is where._by_name["layers.12"]
        assert where.device("layers.2.up") is where._by_name[""]
        assert weights_module._Devices(None).device("head") is None

    @pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", {"layers": "meta"}, 3.5])
    def test_that_are_none_are_refused(self, tmp_path: Path, device: Any) -> None:
        model = Decoder(2, 8)
        with pytest.raises(ConfigError, match="device"):
            flowkv.attach_weights(model, budget="90%", device=device, disk=str(tmp_path))
        assert torch.isfinite(model(IDS)).all()

    @pytest.mark.gpu
    @pytest.mark.parametrize("host", ["0%", "100%"])
    def test_a_gpu_answers_as_with_all_in_its_memory(self, tmp_path: Path, host: str) -> None:
        model = Decoder(40, 256)
        expected = copy.deepcopy(model).cuda()(IDS.cuda()).cpu()
        with flowkv.attach_weights(
            model, budget="30%", device="cuda:0", host=host, disk=str(tmp_path)
        ) as weights:
            for _ in range(20):
                assert torch.equal(model(IDS.cuda()).cpu(), expected)
            assert weights.stats()["reads"] > 0
        assert all(p.is_cuda for p in model.parameters())
        assert torch.equal(model(IDS.cuda()).cpu(), expected)


def test_a_cache_on_top_knows_what_the_plain_model_computed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.fixture_model import load_tiny

    model = load_tiny()
    ids = torch.randint(32, 120, (1, 200), generator=torch.Generator().manual_seed(5))
    asked: Any = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    place = f"{tmp_path / 'kv'}:1GiB"
    with flowkv.attach(model, disk=place) as kv:
        plain, name = model.generate(ids, **asked), kv.namespace
    weights = flowkv.attach_weights(model, budget="70%", disk=str(tmp_path))
    with flowkv.attach(model, disk=place) as kv:
        assert kv.namespace == name
        assert kv.explain(ids[0].tolist()).known > 0
        for _ in range(2):
            assert torch.equal(model.generate(ids, **asked), plain)
        assert kv.namespace == name, "weights that come and go are the same weights"
        model.lm_head.weight.mul_(2)
        other = model.generate(ids, **asked)
        assert kv.namespace != name, "a changed weight is another weight"
    weights.detach()
    assert torch.equal(model.generate(ids, **asked), other)
    model.lm_head.weight.detach().div_(2)
    with flowkv.attach(model, disk=place) as kv:
        assert kv.namespace == name


def test_a_name_is_read_once(tmp_path: Path) -> None:
    """Later processes name weights by the manifest, without reading them."""
    torch.manual_seed(7)
    big = [nn.Linear(1100, 1100) for _ in range(5)]  # of several blocks
    model = nn.Sequential(*big, nn.Conv2d(3, 1, (1, 5)), nn.LayerNorm(7))
    plain = Weights().read(dict(model.named_parameters()))
    path = saved(model, tmp_path / "w.safetensors")
    for _ in range(2):
        weights = flowkv.attach_weights(model, path, budget="80%", disk=str(tmp_path))
        named, found = dict(model.named_parameters()), Weights()
        assert found.read(named) == plain
        assert found.counted()
        assert found.same()
        weights.detach()
        assert not found.counted(), "they have memory of their own now"
        assert found.read(named) == plain
        later = Checkpoint(path, tmp_path)
        assert sum(len(later.sums(stored)) for stored in later.tensors.values()) > 10 * 16
        assert later.verified_bytes == 0, "the manifest says it"
        later.close()
    with torch.no_grad():
        big[0].bias[3] += 1
    assert found.read(named) != plain
    weights = flowkv.attach_weights(model, budget="80%", disk=str(tmp_path))
    assert found.read(dict(model.named_parameters())) != plain
    weights.close()
    with pytest.raises(UnnamedError, match="closed"):
        Weights().read(dict(model.named_parameters()))


def test_a_write_without_a_count_to_a_weight_that_stays_is_found(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    with flowkv.attach_weights(model, budget="80%", disk=str(tmp_path)):
        model(torch.ones(1, 64))
        found = Weights()
        found.read(dict(model.named_parameters()))
        while not found.passes:
            assert found.roll(1)
        stays = next(p for p in model.parameters() if p.numel() == 64 * 64)
        stays.data.numpy()[3, 5] += 1
        assert found.counted()
        assert not found.same()
        passes = found.passes
        with pytest.raises(StopIteration):
            while found.passes == passes:
                if not found.roll(1 << 16):
                    raise StopIteration


@pytest.mark.parametrize(
    "change",
    [
        *(lambda p: setattr(p, "data", p.data.t()), lambda p: setattr(p, "data", p.data[:1])),
        lambda p: setattr(p, "data", p.data[:1].expand(64, 64)),
        *(lambda p: p.data.copy_(p.data.flip(0)), lambda p: p.data.numpy().fill(3)),
    ],
)
def test_a_weight_that_stays_is_named_by_what_it_is(tmp_path: Path, change: Any) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(*(Scaled(64) for _ in range(12)))
    with flowkv.attach_weights(model, budget="80%", disk=str(tmp_path)):
        model(torch.ones(1, 64))
        named = dict(model.named_parameters())
        before = Weights().read(named)
        stays = next(p for p in model.parameters() if p.numel())
        address = stays.data_ptr()
        change(stays)
        assert stays.data_ptr() == address
        after = Weights().read(named)
        assert after != before, "a cache that is attached now would be served what others computed"
        found = model(torch.ones(1, 64))
        assert Weights().read(named) == after
    assert torch.equal(model(torch.ones(1, 64)), found)
    assert Weights().read(named) == after, "it has the name of the same weights in memory"


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.expand(64, 64) / 64


def test_a_copy_of_a_weight_is_named_by_its_own_content(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    with flowkv.attach_weights(model, budget="80%", disk=str(tmp_path)):
        before = Weights().read(dict(model.named_parameters()))
        weight = copy.copy(model[3].weight)  # with all attributes
        weight.data = torch.rand(64, 64)
        model[3].weight = weight
        assert Weights().read(dict(model.named_parameters())) != before


class Clock:
    """Seconds that only pass where somebody computes, or waits for the link; stands for `time`."""

    time_ns = staticmethod(time.time_ns)

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Job:
    """What a link was asked for; a future."""

    def __init__(self, link: Link, value: Any, n_bytes: int) -> None:
        self.link, self.value, self.n_bytes, self.asked_s = link, value, n_bytes, link.clock.now_s

    def done(self) -> bool:
        return self.link.end_s(self) <= self.link.clock.now_s

    def result(self) -> Any:
        self.link.clock.now_s = max(self.link.clock.now_s, self.link.end_s(self))
        return self.value

    exception = result

    def cancel(self) -> bool:
        begun_s = self.link.end_s(self) - self.n_bytes / self.link.rate
        if begun_s <= self.link.clock.now_s:
            return False
        self.link.jobs.remove(self)
        return True


class Link:
    """One read after the other, at a rate, on the clock of a simulator; an executor."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self.clock, self.rate, self.jobs = clock, rate, list[Job]()

    def submit(self, function: Any, *args: Any) -> Job:
        n_bytes = args[2].read_bytes if len(args) > 2 else 0
        self.jobs.append(Job(self, function(*args), n_bytes))
        return self.jobs[-1]

    def end_s(self, job: Job) -> float:
        free_s = 0.0
        for one in self.jobs:
            free_s = max(free_s, one.asked_s) + one.n_bytes / self.rate
            if one is job:
                return free_s
        raise AssertionError("a job that was called off is waited for")

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("budget", [25, 50, 75])
@pytest.mark.parametrize("layers", [96, pytest.param(160, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("busy", [0.5, 0.8, 0.9, 2.0])
def test_nobody_waits_where_the_link_keeps_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, layers: int, busy: float
) -> None:
    """A step takes what it computes, or what the link needs for what must be read."""
    clock = Clock()
    link = Link(clock, 1e9)
    monkeypatch.setattr(weights_module, "time", clock)
    monkeypatch.setattr(weights_module, "ThreadPoolExecutor", lambda *_: link)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers)))

    def compute(*_: object) -> None:
        clock.now_s += 1 / layers

    for module in model:
        module.register_forward_hook(compute)
    attached = flowkv.attach_weights(model, budget=f"{budget}%", disk=str(tmp_path))
    x = torch.ones(1, 256)
    model(x)
    before = attached.stats()
    model(x)
    read = attached.stats()["read_bytes"] - before["read_bytes"]
    link.rate = read / busy
    for _ in range(2):
        model(x)
    before, began_s = attached.stats(), clock.now_s
    for _ in range(4):
        model(x)
    step_s = (clock.now_s - began_s) / 4
    blocked_s = (attached.stats()["blocked_s"] - before["blocked_s"]) / 4
    # Of three units that pass through two buffers, the last is asked for when the first is left.
    most = 1.06 if (busy, budget) == (0.9, 25) else 1.05
    assert step_s <= most * max(1, busy)
    if busy < 1:
        assert blocked_s <= (most - 1) * step_s
    attached.detach()


def test_ctrl_c_anywhere_in_a_forward_leaves_nothing_taken(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder(3, 48)
    ids = torch.arange(9)[None]
    theirs = model(ids)
    weights = flowkv.attach_weights(model, budget="60%", disk=f"{tmp_path}:64MiB")
    torch.testing.assert_close(model(ids), theirs, rtol=0, atol=0)
    only = ("tensors/weights.py",)
    count, came = places(lambda: model(ids), only=only), 0
    with collectable():
        for at in chosen(count, 40):
            came += run(lambda: model(ids), Tracer(at, only=only))
            assert free(weights._lock) and not weights._stack
            assert not any(unit.pins for unit in weights._units)
            assert torch.equal(model(ids), theirs)
    assert came > 20
    weights.detach()
    assert torch.equal(model(ids), theirs)


def test_what_ends_the_process_within_a_module_leaves_nothing_taken(tmp_path: Path) -> None:
    model = Decoder(3, 48)
    ids = torch.arange(9)[None]
    theirs = model(ids)
    weights = flowkv.attach_weights(model, budget="60%", disk=f"{tmp_path}:64MiB")
    for error in (KeyboardInterrupt, SystemExit, ValueError):

        def fail(module: nn.Module, args: Any, error: type[BaseException] = error) -> None:
            raise error

        handle = model.layers[1].up.register_forward_pre_hook(fail)
        with pytest.raises(error):
            model(ids)
        handle.remove()
        assert free(weights._lock) and not weights._stack
        assert torch.equal(model(ids), theirs)
    weights.detach()


def test_hooks_of_a_module_find_its_weights(tmp_path: Path) -> None:
    model, seen = Decoder(3, 48), list[int]()
    weights = flowkv.attach_weights(model, budget="60%", disk=f"{tmp_path}:64MiB")
    up: Any = model.layers[1].up
    up.register_forward_pre_hook(lambda module, args: seen.append(module.weight.numel()))
    up.register_forward_hook(lambda module, args, out: seen.append(module.weight.numel()))
    model(torch.arange(9)[None])
    assert seen == [48 * 96] * 2
    weights.detach()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("budget", ["50%", "64MiB"])
def test_a_forked_child_never_waits_for_the_parents_reader(tmp_path: Path, budget: str) -> None:
    """It computes what is in memory, and refuses the rest at once; so for a lock of the parent."""
    model, x = stack(12, 64), torch.rand(2, 64)
    wanted = model(x)
    with flowkv.attach_weights(model, budget=budget, disk=str(tmp_path)) as weights:
        assert torch.equal(model(x), wanted)

        def computes() -> int:
            with contextlib.nullcontext() if budget == "64MiB" else pytest.raises(StateError):
                assert torch.equal(model(x), wanted)
            with pytest.raises(StateError):
                weights.detach()
            assert weights.stats()["units"] > 0
            weights.close()
            return 0

        with held(weights._lock):
            assert in_child(computes) == 0
        assert torch.equal(model(x), wanted)
