"""Layers on two devices: no operation takes tensors of both.

Memory of the CPU stands in for both. What a device computes is marked as its own, until it is
copied to the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowkv import KV, Geometry
from tests.cache.toy import advance, geometry, make_kv, opened


class Apart(TorchDispatchMode):
    """Follows which device's pool tensors come from.

    Args:
        kv: The pools.
    """

    def __init__(self, kv: KV) -> None:
        super().__init__()
        assert kv.planner is not None
        self.pools = {
            pool.arena.untyped_storage().data_ptr(): name
            for name, pool in kv.planner.store.pools.items()
        }
        assert len(self.pools) == 2
        self.made: list[tuple[torch.Tensor, str]] = []  # kept: their memory is used by no other

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = {self.places.get(p) for p in memory((args, kwargs))} - {None}
        assert len(places) < 2, f"{func} takes tensors of {places}"
        out = func(*args, **(kwargs or {}))
        moves = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") is not None
        if places and not moves:  # to the host
            (place,) = places
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.made.append((leaf, str(place)))
        return out

    @property
    def places(self) -> dict[int, str]:
        return self.pools | {x.untyped_storage().data_ptr(): place for x, place in self.made}


def memory(values: Any) -> set[int]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.numel()}


@pytest.mark.parametrize("options", [{}, dict(codec="kv8", recent_tokens=0)], ids=["raw", "kv8"])
def test_no_operation_takes_tensors_of_both(options: dict[str, Any], tmp_path: Path) -> None:
    full, sliding = geometry().groups
    shape = Geometry(groups=(full, msgspec.structs.replace(sliding, device="cpu:0")), page_size=8)
    text = list(range(60))
    kv = make_kv(shape, pages=20, tiers=[f"disk:{tmp_path / 'kv'}:64MiB"], **options)
    with Apart(kv):
        seq = opened(kv, text)
        with kv.open(text[:52]) as again:
            assert again.length == 51
        twin = kv.fork(seq)
        advance(kv, [seq, twin], [[1, 2, 3], [4] * 20])
        kv.truncate(twin, 52)
        advance(kv, [seq, twin], [[1, 2, 3], [4] * 20])
        kv.suspend(twin)
        seq.close()
        for number in range(70, 76):
            opened(kv, [number] * 40).close()
        kv.resume(twin)
        twin.close()
        kv.defragment()
        with kv.open(text) as again:
            assert again.length >= 56
        kv.flush()
