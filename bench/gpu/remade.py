"""Keys rotated as they come and as pages move, tokens dropped, sealed pages decoded to rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.machine import Call, Machine
from bench.gpu.moves import checked
from bench.gpu.pool import Case, Step, layouts, prepare, read_bytes
from flowkv.kernels import Rotary, append, drop_tokens, gather_dense, reposition, rotations

K = 1024
CASE = Case("remade", (4 * K,) * 32, (256,) * 32, page=64)
DENSE = ("kv8", "kv4c", "kv4h")
Oracle = Callable[[torch.Tensor], object]


def remade(machine: Machine) -> Iterator[dict[str, Any]]:
    """Each operation beside what its bytes would take to copy; oracles run on the same device."""
    step = prepare(CASE.shrunk() if machine.dry else CASE, machine, 1)
    yield append_rotated(machine, step)
    yield moved(machine, step)
    yield dropped(machine, step)
    for codec in DENSE:
        yield dense(machine, codec)


def same(arena: torch.Tensor, call: Call, oracle: Oracle) -> bool:
    """Whether a call and the oracle make the same of the same arena."""
    expected = arena.clone()
    oracle(expected)
    call()
    return torch.equal(arena, expected)


def speeds(dim: int) -> torch.Tensor:
    """Radians a token of the pairs of a head."""
    return 1e4 ** -(torch.arange(0, dim, 2) / dim)


def append_rotated(machine: Machine, step: Step) -> dict[str, Any]:
    pages, batch, case = step.pages, step.batches[0], step.case
    tokens, shape = sum(case.new), (pages.layout.kv_heads, pages.layout.head_dim)
    angle = torch.arange(max(case.lengths))[:, None].double() * speeds(shape[1]).double()
    rope = Rotary(*(x.float().to(machine.device) for x in (angle.cos(), angle.sin())))
    k = machine.noise(tokens, *shape, dtype=step.q.dtype)

    def call() -> None:
        append(k, k, pages, batch, rope)

    def oracle(x: torch.Tensor) -> None:
        append(k, k, pages._replace(arena=x), batch, rope, backend="reference")

    name = f"append {tokens} rotated tokens"
    return checked(machine, name, call, lambda: same(pages.arena, call, oracle), copy=4 * k.nbytes)


def moved(machine: Machine, step: Step) -> dict[str, Any]:
    arena, layout, table = step.pages.arena, step.pages.layout, step.batches[0].table
    pages = table[table >= 0]
    deltas = [1000 + 64 * (i % 7) for i in range(len(pages))]
    rope, turns = rotations(deltas, speeds(layout.head_dim), device=machine.device)

    def call() -> None:
        reposition(arena, pages, turns, rope, layout)

    def oracle(x: torch.Tensor) -> None:
        reposition(x, pages, turns, rope, layout, backend="reference")

    keys = len(pages) * layout.layers * layout.kv_heads * layout.page_size * layout.head_dim
    n_bytes = 2 * keys * step.q.element_size()
    return checked(machine, "reposition", call, lambda: same(arena, call, oracle), copy=n_bytes)


def dropped(machine: Machine, step: Step) -> dict[str, Any]:
    arena, layout, table = step.pages.arena, step.pages.layout, step.batches[0].table
    pages = table[table >= 0]
    half = len(pages) // 3
    source, target = pages[: 2 * half], pages[2 * half : 3 * half]
    kept = half * layout.page_size
    weight = torch.rand(layout.layers, layout.kv_heads, 2 * kept, device=machine.device)
    keep = weight.topk(kept, dim=2).indices.sort(dim=2).values.int()

    def call() -> None:
        drop_tokens(arena, source, target, keep, layout)

    def oracle(x: torch.Tensor) -> None:
        drop_tokens(x, source, target, keep, layout, backend="reference")

    n_bytes = 2 * half * layout.layers * layout.stripe_bytes
    return checked(
        machine, "drop half of the tokens", call, lambda: same(arena, call, oracle), copy=n_bytes
    )


def dense(machine: Machine, codec: str) -> dict[str, Any]:
    """Rows of sealed pages as dense keys and values."""
    case = CASE._replace(name=codec, new=(1,) * 32, page=128, codecs=(codec,))
    case = case.shrunk() if machine.dry else case
    step, columns = prepare(case, machine, 1), max(case.lengths)
    expected = gather_dense(step.pages, step.batches[0], columns, backend="reference")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return gather_dense(step.pages, step.batches[0], columns)

    return checked(
        machine,
        f"gather dense {codec}",
        call,
        lambda: all(map(torch.equal, call(), expected)),
        copy=read_bytes(case, layouts(case)) + 2 * expected[0].nbytes,
    )
