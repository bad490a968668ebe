"""Bases in files, which other programs than the one that learned them can open."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.core.files import MALFORMED, open_regular, replacing
from flowkv.core.geometry import LayerGroup, page_layout
from flowkv.kvt.basis import digest
from flowkv.kvt.codec import PageCoder, codable

_MAGIC = b"flowkv basis/1\n"


class BasisFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a file behind its first bytes and a digest.

    Attributes:
        model: Name of the model whose pages it was learned from.
        group: Their layer group.
        page_size: Tokens of these pages.
        data: The basis.
    """

    model: str
    group: LayerGroup
    page_size: int
    data: bytes


def save_basis(path: Path, basis: BasisFile) -> None:
    """Write a file of a basis.

    Raises:
        ConfigError: It cannot be written.
    """
    body = msgspec.msgpack.encode(basis)
    try:
        with replacing(path) as file:
            file.write(_MAGIC + digest(body) + body)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error})", "Name another file") from error


class OpenBasis(NamedTuple):
    """An opened file.

    Attributes:
        path: The file.
        model: Name of the model whose pages the basis was learned from.
        coder: Coder of these pages.
    """

    path: Path
    model: str
    coder: PageCoder

    def __str__(self) -> str:
        """Return the words for errors."""
        return f"the basis {self.path} of {self.model}"


def open_basis(path: Path) -> OpenBasis:
    """Read a file that `save_basis` wrote.

    Raises:
        ConfigError: There is no such file, or it is damaged.
    """
    remedy = "Make one: flowkv calibrate --model ... --text ... --out FILE"
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"the basis {path} cannot be read ({error})", remedy) from error
    start = len(_MAGIC) + 16
    try:
        if data[:start] != _MAGIC + digest(body := data[start:]):
            raise ValueError("its digest is another")
        found = msgspec.msgpack.decode(body, type=BasisFile)
        layout = page_layout(found.group, found.page_size)
        if not codable(layout):
            raise ValueError("pages that cannot be coded")
        return OpenBasis(path, found.model, PageCoder(layout, found.data))
    except MALFORMED as error:
        raise ConfigError(f"{path} holds no basis, or a damaged one ({error})", remedy) from error
