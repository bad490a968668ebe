"""Pages written, copied, sealed and demoted; to and from pinned memory; all checked bitwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.machine import Call, Machine
from bench.gpu.pool import Case, layouts, prepare
from flowkv.core.geometry import GRANULE_BYTES, PageLayout
from flowkv.kernels import (
    append,
    copy_pages,
    gather_dense,
    gather_pages,
    paged_attention,
    scatter_pages,
    transcode,
)

K = 1024
CASE = Case("moves", (4 * K,) * 64, (1,) * 64, page=64)
SEALS = (
    *(("raw", "kv8"), ("raw", "k8v4"), ("raw", "kv4c"), ("raw", "kv4h"), ("kv8", "kv4c")),
    *(("kv8", "kv4h"), ("kv8", "raw"), ("kv4c", "raw")),
)


def checked(
    machine: Machine, name: str, call: Call, right: Callable[[], bool], **work: float
) -> dict[str, Any]:
    """Time a call if what it writes is right; `work` is the bytes it moves, by ceiling."""
    call()
    if not right():
        return {"case": name, "wrong": True}
    result = {"case": name, **machine.timed([call])}
    for limit, n_bytes in work.items():
        result["bytes_s"] = 1e6 * n_bytes / result["us"]
        result[f"of_{limit}_ceiling"] = result["bytes_s"] / machine.limits[f"{limit}_bytes_s"]
    return result


def moves(machine: Machine) -> Iterator[dict[str, Any]]:
    """Page moves and append."""
    case = CASE.shrunk() if machine.dry else CASE
    step = prepare(case, machine, 2)
    pages, batch, layout = step.pages, step.batches[0], step.pages.layout
    frames = pages.arena.view(-1, layout.page_bytes)
    count = len(frames) // 2
    order = torch.randperm(2 * count).to(machine.device)
    at, to = order[:count], order[count:]
    source, target = ((x * layout.granules).int() for x in (at, to))
    copied = 2 * count * layout.page_bytes
    for place, limits in (("", ("copy", "copy")), (" pinned", ("to_host", "to_device"))):
        room = torch.full(
            (count, layout.page_bytes),
            0xFF,
            dtype=torch.uint8,
            device="cpu" if place else machine.device,
            pin_memory=bool(place) and not machine.dry,
        )
        amount = copied // 2 if place else copied
        yield checked(
            machine,
            f"gather pages{place}",
            lambda room=room: gather_pages(pages.arena, source, layout.granules, room),
            lambda room=room: torch.equal(room.to(machine.device), frames[at]),
            **{limits[0]: amount},
        )
        yield checked(
            machine,
            f"scatter pages{place}",
            lambda room=room: scatter_pages(pages.arena, target, layout.granules, room),
            lambda room=room: torch.equal(room.to(machine.device), frames[to]),
            **{limits[1]: amount},
        )
    yield checked(
        machine,
        "copy pages",
        lambda: copy_pages(pages.arena, source, target, layout.granules),
        lambda: torch.equal(frames[at], frames[to]),
        copy=copied,
    )
    tokens = len(case.lengths)
    k = machine.noise(tokens, layout.kv_heads, layout.head_dim, dtype=step.q.dtype)
    yield checked(
        machine,
        f"append {tokens} tokens",
        lambda: append(k, k, pages, batch),
        lambda: torch.equal(gather_dense(pages, batch, 1)[0][:, :, 0], k),
        copy=4 * k.nbytes,
    )
    columns = max(case.lengths)
    dense = gather_dense(pages, batch, columns, backend="reference")
    yield checked(
        machine,
        "gather dense",
        lambda: gather_dense(pages, batch, columns),
        lambda: all(map(torch.equal, gather_dense(pages, batch, columns), dense)),
        copy=4 * dense[0].nbytes,
    )


def seals(machine: Machine) -> Iterator[dict[str, Any]]:
    """Sealing and demotion; the bytes are what is read and written, without padding."""
    for old, new in SEALS:
        case = CASE._replace(page=128, layers=4, lengths=(2 * K,) * 64, codecs=(old, new))
        case = case.shrunk() if machine.dry else case
        forms = layouts(case)
        yield seal(machine, f"{old} to {new}", forms[old], forms[new], forms["raw"])


def seal(
    machine: Machine, name: str, old: PageLayout, new: PageLayout, raw: PageLayout
) -> dict[str, Any]:
    count = 4 if machine.dry else 1024
    places, end = {}, 0
    for role, layout in (("raw", raw), ("old", old), ("new", new), ("again", new)):
        places[role] = end + layout.granules * torch.arange(count, dtype=torch.int32)
        end += layout.granules * count
    arena = torch.full((end * GRANULE_BYTES,), 0xFF, dtype=torch.uint8, device=machine.device)
    dtype = getattr(torch, raw.dtype)
    arena[: raw.page_bytes * count].view(dtype).normal_()
    places = {role: x.to(machine.device) for role, x in places.items()}
    source = "raw" if old.codec == "raw" else "old"
    if source == "old":
        assert not transcode(arena, places["raw"], places["old"], raw, old).any()
    frames = {
        role: arena[int(places[role][0]) * GRANULE_BYTES :][: new.page_bytes * count]
        for role in ("new", "again")
    }
    few = slice(0, 8)  # the oracle is slow

    def right() -> bool:
        transcode(arena, places[source][few], places["again"][few], old, new, backend="reference")
        n_bytes = new.page_bytes * len(places["again"][few])
        return torch.equal(frames["new"][:n_bytes], frames["again"][:n_bytes])

    return checked(
        machine,
        f"transcode {name}",
        lambda: transcode(arena, places[source], places["new"], old, new),
        right,
        copy=count * raw.layers * (old.stripe_bytes + new.stripe_bytes),
    )


def streamed(machine: Machine) -> dict[str, Any]:
    """A decode step whose pages come from pinned memory, layer by layer, behind the layer before.

    `exposed_us` is the step's time without what the same step takes with all pages resident.
    """
    case = Case("stream", (2 * K + 1,) * 16, (1,) * 16, layers=16, page=128)
    case = case.shrunk() if machine.dry else case
    hidden, inner = (64, 128) if machine.dry else (4096, 14336)
    step = prepare(case, machine, 1)
    pages, batch, layout = step.pages, step.batches[0], step.pages.layout
    full = [line[: (n - 1) // case.page] for line, n in zip(batch.table, case.lengths, strict=True)]
    target = torch.cat(full).contiguous()
    stripe = layout.stripe_stride_bytes // GRANULE_BYTES
    shape = len(target), layout.stripe_stride_bytes
    host = [
        torch.empty(shape, dtype=torch.uint8, pin_memory=not machine.dry)
        for _ in range(case.layers)
    ]
    for layer, room in enumerate(host):
        gather_pages(pages.arena, target, layout.granules, room, part=(layer * stripe, stripe))
    x = machine.noise(len(case.lengths), hidden, dtype=step.q.dtype)
    up = machine.noise(hidden, inner, dtype=step.q.dtype)
    side = None if machine.dry else torch.cuda.Stream()

    def compute(layer: int) -> None:
        paged_attention(step.q, pages._replace(layer=layer), batch)
        for _ in range(3):  # as much as a layer of an 8-billion-parameter model
            _ = (x @ up) @ up.t()

    def load(layer: int) -> None:
        part = layer * stripe, stripe
        scatter_pages(pages.arena, target, layout.granules, host[layer], part=part)

    def streaming() -> None:
        if side is None:
            for layer in range(case.layers):
                load(layer)
                compute(layer)
            return
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for layer in range(case.layers):
            with torch.cuda.stream(side):
                load(layer)
                loaded = torch.cuda.Event()
                loaded.record()
            main.wait_event(loaded)
            compute(layer)
        main.wait_stream(side)

    def resident() -> None:
        for layer in range(case.layers):
            compute(layer)

    def loads() -> None:
        for layer in range(case.layers):
            load(layer)

    before = pages.arena.clone()
    for call in (streaming, loads):
        call()
        if not torch.equal(before, pages.arena):
            return {"case": "decode step streamed from pinned memory", "wrong": True}
    us, alone, copies = (machine.timed([call], 20)["us"] for call in (streaming, resident, loads))
    n_bytes = sum(room.nbytes for room in host)
    return {
        "case": "decode step streamed from pinned memory",
        "us": us,
        "resident_us": alone,
        "copy_us": copies,
        "exposed_us": us - alone,
        "hidden_share": 1 - (us - alone) / copies,
        "bytes_s": 1e6 * n_bytes / us,
    }
