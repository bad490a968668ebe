"""Carries warmed prompts from one cache to another in a file: pages of any codec, and states."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

import torch

from flowkv.runtime.archive import ArchiveReader, ArchiveWriter, Found
from flowkv.runtime.guard import Guard
from flowkv.runtime.index import Block
from flowkv.runtime.states import LAYOUT
from flowkv.runtime.store import Store
from flowkv.tiers.base import FrameInfo
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.frame import Header

_BUSY_S = 0.1
_PATIENCE_S = 10.0


class Exported(NamedTuple):
    """What a file got.

    Attributes:
        frames: Pages and states.
        n_bytes: Length of the file.
        missing: Blocks that were known and could not be read any more.
    """

    frames: int
    n_bytes: int
    missing: int


class Loaded(NamedTuple):
    """What a file gave.

    Attributes:
        frames: Pages and states that are known now.
        known: Those that were known before.
        foreign: Those of another model, geometry, page size or codec, refused.
        damaged: Those that are not what was written, refused.
        no_room: Those that neither the device nor a tier had room for.
    """

    frames: int
    known: int
    foreign: int
    damaged: int
    no_room: int


def write(
    store: Store,
    guard: Guard,
    path: str | os.PathLike[str],
    envelope: Envelope,
    blocks: Iterable[Block],
) -> Exported:
    """Writes blocks to a file, wherever they lie. Takes the KV lock for one block at a time.

    Raises:
        StoreError: The file cannot be written.
    """
    missing = 0
    with ArchiveWriter(path, envelope) as archive:
        for block in blocks:
            with guard:
                found = _content(store, block)
            if found is None:
                missing += 1
            else:
                archive.add(block.key, *found)
    return Exported(archive.frames, archive.n_bytes, missing)


def _content(store: Store, block: Block) -> tuple[FrameInfo, bytes] | None:
    """What a block's frame says and holds, from the nearest place that gives it."""
    if block.page >= 0 and not block.gone:
        page = block.page
        content = store.pool(block.group).page_bytes(
            page, store.forms[block.group].of(page).page_bytes
        )
        return store.describe(block), content.cpu().numpy().tobytes()
    for number in range(len(store.tiers)):
        holds = block.tiers >> number & 1 or store.source(block) == number
        if holds and not block.gone:
            found = store.read(block, number)
            if found is not None:
                return found
    return None


def read(
    store: Store,
    guard: Guard,
    path: str | os.PathLike[str],
    envelope: Envelope,
    namespace: bytes,
) -> Loaded:
    """Makes the frames of a file known: on the device while pages are free, else on the tiers.

    Takes the KV lock for one frame at a time.

    Args:
        store: What gets them.
        guard: The KV lock.
        path: The file.
        envelope: How its frames must be wrapped.
        namespace: Frames of another one are refused.

    Raises:
        StoreError: The file cannot be read, or was never an exported cache.
    """
    counts = dict.fromkeys(Loaded._fields, 0)
    with ArchiveReader(path, envelope) as archive:
        for found in archive.frames():
            counts[_take(store, guard, archive, found, namespace)] += 1
    return Loaded(**counts)


def _take(
    store: Store, guard: Guard, archive: ArchiveReader, found: Found, namespace: bytes
) -> str:
    """Takes one frame; which count of `Loaded` it goes into."""
    header = found.header
    if header is None:
        return "damaged"
    if header.info.namespace != namespace or not _readable(store, header, found.n_bytes):
        return "foreign"
    with guard:
        known = store.index.find(header.key)
        if known is not None and known.somewhere and known.fidelity <= header.info.fidelity:
            return "known"
    body = memoryview(bytearray(header.body_bytes))
    if not archive.read(found, body):
        return "damaged"
    for _ in range(round(_PATIENCE_S / _BUSY_S)):
        with guard:
            if _place(store, header, body):
                return "frames"
            if not store.mover.storing():
                return "no_room"
            store.drain(_BUSY_S)
    return "no_room"


def _place(store: Store, header: Header, body: memoryview) -> bool:
    """Makes a frame known; False if there is no room for it now."""
    info, block = header.info, store.index.find(header.key)
    if block is not None:
        store.supersede(block)
    block = store.index.publish(header.key, info.parent, info.group, info.kind)
    block.tenant, block.namespace, block.fidelity = info.tenant, info.namespace, info.fidelity
    if info.kind != "page":
        block.tail = info.tokens
        return store.save_state(block, info, bytes(body))
    pool, layout = store.pool(info.group), store.forms[info.group].layouts[info.codec]
    for page in pool.allocate(layout.granules, 1, info.codec) or ():
        pool.page_bytes(page, layout.page_bytes).copy_(torch.frombuffer(body, dtype=torch.uint8))
        store.publish(block, page)
        store.insert([block])
        store.write_down(block)
        return True
    numbers = [n for n, tier in enumerate(store.tiers) if tier.writable]
    placed = any(store.admits(block, n) and store.save(block, n, info, body) for n in numbers)
    store.settle(block)
    return placed


def _readable(store: Store, header: Header, n_bytes: int) -> bool:
    """Whether a frame could be one of this cache's own."""
    info = header.info
    if info.fidelity > store.fidelity:
        return False
    if info.kind == "state":
        return info.layout == LAYOUT and header.body_bytes <= n_bytes
    if info.kind != "page" or info.group >= len(store.forms):
        return False
    layout = store.forms[info.group].layouts.get(info.codec)
    fits = layout is not None and layout.fingerprint() == info.layout
    return fits and layout is not None and header.body_bytes == layout.page_bytes
