"""What suspended sequences need again, bit for bit, of pages that others know too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from flowkv.core.layout import CODEC_SHIFT

if TYPE_CHECKING:
    from flowkv.runtime.devices import Devices
    from flowkv.runtime.index import Block


AT_ONCE_BYTES = 1 << 26
"""Of pages in one transfer: they take as much again of a device that is full."""


class Keepsake:
    """A known page that suspended sequences need again as it is now. Callers hold the KV lock.

    While the page stays where it is, nothing is copied: a prefix that many share costs nothing to
    suspend, and whoever comes back before it is needed for others moves no byte. Just before it is
    given up, encoded or erased, it is copied once for all of them.

    Args:
        block: Whose page.

    Attributes:
        codec: Index of its codec.
        content: Its bytes in host memory, once it is not there any more.
        users: Suspended sequences that need it.
    """

    __slots__ = ("block", "codec", "content", "users")

    def __init__(self, block: Block) -> None:
        self.block, self.codec = block, block.page >> CODEC_SHIFT
        self.content: torch.Tensor | None = None
        self.users = 0
        block.keepsake = self

    @classmethod
    def of(cls, block: Block) -> Keepsake:
        """The one of a block, for one more sequence."""
        keepsake = block.keepsake or cls(block)
        keepsake.users += 1
        return keepsake

    def save(self, store: Devices) -> None:
        """The page is about to change, or to go: copies it."""
        self.content = download(store, self.block.group, [self.block.page])[0]
        self.block.keepsake = None

    def let_go(self) -> bool:
        """A sequence needs it no more; whether that was the last one."""
        self.users -= 1
        if not self.users and self.block.keepsake is self:
            self.block.keepsake = None
        return not self.users


def download(store: Devices, group: int, pages: list[int]) -> list[torch.Tensor]:
    """Copies of pages of one group and codec in host memory, in as few transfers as may be."""
    if not pages:
        return []
    pool, n_bytes = store.pool(group), store.forms[group].of(pages[0]).page_bytes
    copies: list[torch.Tensor] = []
    for part in _parts(len(pages), n_bytes):
        some = [pool.page_bytes(page, n_bytes) for page in pages[part]]
        if len(some) == 1:  # as when one is evicted from a device without memory for a copy
            copies.append(some[0].to("cpu", copy=True))
        else:
            copies += torch.stack(some).to("cpu")
    return copies


def upload(store: Devices, group: int, pages: list[int], contents: list[torch.Tensor]) -> None:
    """Puts such copies into pages of the same codec."""
    if not pages:
        return
    pool, n_bytes = store.pool(group), contents[0].numel()
    for part in _parts(len(pages), n_bytes):
        some: Iterable[torch.Tensor] = contents[part]
        if pool.device.type != "cpu":
            some = torch.stack(contents[part]).to(pool.device)
        for page, content in zip(pages[part], some, strict=True):
            pool.page_bytes(page, n_bytes).copy_(content)


def _parts(pages: int, n_bytes: int) -> Iterator[slice]:
    most = max(1, AT_ONCE_BYTES // n_bytes)
    return (slice(first, first + most) for first in range(0, pages, most))
