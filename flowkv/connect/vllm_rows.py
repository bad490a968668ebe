"""Rows of vLLM's host memory: what their bytes depend on, and their coding at 1 to 2 bits a value.

A row has the blocks of a chunk, of all layers and ranks. Importing this module imports vLLM.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.file_mapper import FileMapper

from flowkv.core.errors import ConfigError
from flowkv.core.geometry import COLD, FIDELITIES
from flowkv.kvt.file import OpenBasis, open_basis
from flowkv.kvt.rows import RowCoder, RowForm, row_bases
from flowkv.kvt.tier import CodecTier
from flowkv.tiers.base import Tier

_log = logging.getLogger("flowkv")
_LAYOUTS = "LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"
"""Layouts of vLLM in which a block's keys and values are together: C is a key and a value."""


def describe(spec: Any, row_bytes: int) -> dict[str, Any]:
    """Return all settings but weights and tokens that the bytes of a row depend on."""
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk)
    made_by = {
        **mapper.get_run_config(),  # groups, layers, dtype, parallel sizes, canonical format
        "layout": spec.config.kv_cache_layout,
        "row_bytes": row_bytes,
        "device": str(current_platform.device_name),
    }
    if current_platform.is_cpu():  # the layout of keys depends on the instruction set
        import torch

        amx, avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()
        made_by["instructions"] = [platform.machine(), amx, avx512]
    return made_by


class CodedRows:
    """Coding of a tier's rows by a basis.

    Args:
        basis: Basis of the model.
        spec: vLLM's.
        row_bytes: Bytes of a row.

    Attributes:
        named: Description of the codec, for the name of the rows.

    Raises:
        ValueError: Such rows have no code in this basis.
    """

    def __init__(self, basis: OpenBasis, spec: Any, row_bytes: int) -> None:
        form = _form_of(spec, basis.coder.layout.kv_heads, basis.coder.layout.head_dim)
        self._coder = RowCoder(basis, form, spec.config.model.name)
        self._group = getattr(spec.config.groups[0], "group_id", 0)
        self._row_bytes, self._tokens = row_bytes, form.tokens
        self._numbers = dict[bytes, int]()  # in their prompts, of the chunks being stored
        self.named = {"codec": [FIDELITIES[COLD], basis.coder.name.hex(), form.axes]}

    def over(self, layout: bytes) -> Callable[[Tier], Tier]:
        """Return what puts the coding over a tier; `layout` is the fingerprint of raw rows."""
        bases = row_bases(self._group, layout, self._row_bytes, self._coder)

        def coded(tier: Tier) -> Tier:
            over = CodecTier(tier, bases)
            over.page_of = self._numbers.get
            return over

        return coded

    def storing(self, name: bytes, end: int | None) -> None:
        """Record that a chunk is being stored that ends at a token of its prompt, if known."""
        if end and not end % self._tokens:
            self._numbers[name] = end // self._tokens - 1

    def stored(self, names: Iterable[bytes]) -> None:
        """Record that chunks are stored, or not."""
        for name in names:
            self._numbers.pop(name, None)


def code_rows(codec: str, basis: str, spec: Any, row_bytes: int) -> CodedRows | None:
    """Return the coding of rows that a configuration asks for; None if they stay as they are.

    Raises:
        ConfigError: There is no such codec, or no such basis.
    """
    if (codec, basis) == ("raw", ""):
        return None
    if codec != FIDELITIES[COLD] or not basis:
        raise ConfigError(
            f"FlowKV's tier has no codec {codec!r} with the basis {basis!r}",
            'Set "codec": "kvt", "basis": "FILE" with the file that `flowkv calibrate` wrote',
        )
    found = open_basis(Path(basis))
    try:
        return CodedRows(found, spec, row_bytes)
    except ValueError as error:
        said = "chunks are stored as they are, not in kvt with %s: %s. Make a basis of this model "
        said += 'with flowkv calibrate, or leave "codec" and "basis" out'
        _log.warning(said, found, error)
        return None


def _form_of(spec: Any, heads: int, dim: int) -> RowForm:
    """Return the form of rows with such heads.

    Raises:
        ValueError: Rows have another form.
    """
    config, parallel, layout = spec.config, spec.config.parallel, spec.config.kv_cache_layout
    if len(config.groups) != 1:
        raise ValueError("the layers are of several kinds")
    if layout not in _LAYOUTS:
        raise ValueError(f"keys and values of a block are apart in vLLM's layout {layout}")
    if parallel.world_size != parallel.tp_size or parallel.dcp_size > 1:
        raise ValueError("there is more than tensor parallelism")
    if config.model.dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"the cache is of {config.model.dtype}, not of 16 or 32 bits")
    ranks = 1 if config.canonical_layout else parallel.world_size
    (tokens,), blocks = spec.tokens_per_block, spec.blocks_per_chunk
    layers = len(config.groups[0].layer_names)
    sizes = {"R": ranks, "L": layers, "B": blocks, "H": heads // ranks, "N": tokens}
    form = RowForm("R" + layout[:-1], sizes, dim, config.model.dtype)
    own_bytes = config.worker_kv_bytes_per_block * blocks * parallel.world_size
    if heads % ranks or form.filled_bytes != own_bytes:
        raise ValueError(
            f"chunks of {own_bytes} bytes are not keys and values of {layers} layers of {heads} "
            f"heads of {dim} dims (latents, states, or another model)"
        )
    return form
