"""Code generated for the Triton kernels: registers, spills, shared memory, instructions.

Needs no GPU. A driver without a device lets the real launch code run on tensors of the CPU, so that
exactly what a GPU would be given is compiled for it, and every launch is recorded and dropped:

    python -m bench.codegen                              # a table of all cases for sm_90
    python -m bench.codegen --arch sm_80 gfx942 --json   # one JSON object per kernel
    python -m bench.codegen -k decode --sass sass        # the disassemblies into a folder

`inst/el`: thread-instructions of the main loop per K or V element it reads. An H200 issues 128 a
clock and processor while 8.9 bfloat16 elements arrive, so 14.4 is where decode stops being bound by
memory; far below it, there is time to wait for loads. 17.5 8-bit elements arrive (7.3), 34.5 of
4 bits (3.7).

TRITON_INTERPRET must not be set: interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import msgspec
import torch

from bench.disassembly import facts, listing
from bench.nodevice import ARCHES, Launch, no_device
from flowkv import kernels
from flowkv.core.geometry import Geometry, PageLayout, page_id, page_layout
from flowkv.kernels import Pages, Ragged

LENGTH = 1 << 16
HEADS = 8
SCOPES = ("every", "main", "full")


class Case(NamedTuple):
    """A call whose kernels are compiled.

    Attributes:
        name: What `-k` and the tests find it by.
        op: The operation of the registry, and of `CALLS`, that is called.
        codec: Of the sealed pages of the table; several, least lossy first, are joined by "+".
        kernel: Beginning of the names of those kernels whose inst/el `budget` bounds.
        rows: Rows of the batch, each with `new` new tokens.
        options: What else the call is given: switches of attention, or `plain` for the variant
            without inline PTX.
        scope: Where the tests compile it: "every" architecture; "main", sm_90 alone; or "full",
            only with `-m slow`, as they do all cases for all architectures.
    """

    name: str
    op: str = "paged_attention"
    codec: str = "raw"
    head_dim: int = 128
    value_dim: int = 0
    group: int = 4
    page: int = 64
    dtype: str = "bfloat16"
    rows: int = 2
    new: int = 1
    options: tuple[str, ...] = ()
    budget: float | None = None
    kernel: str = "attend"
    scope: str = "main"


ALL = ("window", "softcap", "sinks", "lse")
PREFILL = {"rows": 1, "new": 2048}
SEALED = {"kernel": "attend_lists"}
LATENT = {"head_dim": 576, "value_dim": 512, "options": ("latent",)}
CASES = (
    Case("decode", budget=1.4, scope="every"),
    Case("decode-d64", head_dim=64, budget=1.8, scope="full"),
    Case("decode-d80", head_dim=80, budget=3.0, scope="full"),
    Case("decode-d96", head_dim=96, budget=2.5, scope="full"),
    Case("decode-d256", head_dim=256, budget=1.4),
    Case("decode-p16", page=16, budget=3.0),
    Case("decode-p32", page=32, budget=2.0, scope="full"),
    Case("decode-p128", page=128, budget=1.4, scope="full"),
    Case("decode-g1", group=1, budget=1.4, scope="full"),
    Case("decode-g8", group=8, budget=1.4, scope="full"),
    Case("decode-fp16", dtype="float16", budget=1.4, scope="full"),
    Case("decode-fp32", dtype="float32", scope="full"),
    Case("decode-fp32-d64", dtype="float32", head_dim=64, scope="full"),
    Case("decode-fp32-d256", dtype="float32", head_dim=256, scope="full"),
    Case("decode-dv64", value_dim=64, budget=1.8, scope="full"),
    Case("decode-d192", head_dim=192, value_dim=128, budget=2.2, scope="full"),
    Case("decode-all", options=ALL, budget=2.2),
    Case("verify", new=4, budget=2.2),
    # Small tiles, many programs: bytes in flight cost instructions (`triton.flight`).
    Case("decode-kv8", codec="kv8", page=128, budget=1.7, scope="every", **SEALED),
    Case("decode-k8v4", codec="k8v4", page=128, budget=2.3, **SEALED),
    Case("decode-kv4c", codec="kv4c", page=128, budget=2.3, scope="every", **SEALED),
    Case("decode-kv4h", codec="kv4h", page=128, budget=2.3, scope="every", **SEALED),
    Case("decode-kv8-p64", codec="kv8", budget=1.5, scope="full", **SEALED),
    # Half a page of work for all of its channels: bound by instructions, sm_100 most.
    Case("decode-kv4c-p64", codec="kv4c", budget=2.7, scope="full", **SEALED),
    Case("decode-kv4h-p64", codec="kv4h", budget=2.0, scope="full", **SEALED),
    Case("decode-kv8-p16", codec="kv8", page=16, budget=7.0, scope="full", **SEALED),
    Case("decode-kv4c-p256", codec="kv4c", page=256, budget=2.0, scope="full", **SEALED),
    Case(
        "decode-kv4h-d64", codec="kv4h", page=128, head_dim=64, budget=3.0, scope="full", **SEALED
    ),
    Case(
        "decode-kv4h-d80", codec="kv4h", page=128, head_dim=80, budget=3.0, scope="full", **SEALED
    ),
    Case(
        "decode-kv8-d256", codec="kv8", page=128, head_dim=256, budget=1.6, scope="full", **SEALED
    ),
    Case(
        "decode-kv4h-d256", codec="kv4h", page=128, head_dim=256, budget=2.0, scope="full", **SEALED
    ),
    Case("decode-kv8-all", codec="kv8", page=128, options=ALL, budget=2.2, scope="full", **SEALED),
    Case("verify-kv4h", codec="kv4h", page=128, new=4, budget=4.0, **SEALED),
    Case("decode-mass", codec="kv4h", page=128, options=("mass",), budget=2.7, **SEALED),
    Case("decode-invariant", codec="kv4h", options=("invariant", "alibi"), **SEALED),
    Case("prefill", scope="every", **PREFILL),
    Case("prefill-d64", head_dim=64, scope="full", **PREFILL),
    Case("prefill-d80", head_dim=80, scope="full", **PREFILL),
    Case("prefill-d96", head_dim=96, scope="full", **PREFILL),
    Case("prefill-d256", head_dim=256, scope="full", **PREFILL),
    Case("prefill-d192", head_dim=192, value_dim=128, scope="full", **PREFILL),
    Case("prefill-fp32", dtype="float32", scope="full", **PREFILL),
    Case("prefill-all", options=ALL, **PREFILL),
    Case("prefill-alibi", options=("alibi",), **PREFILL),
    Case("prefill-kv8", codec="kv8", page=128, scope="every", **PREFILL),
    Case("prefill-k8v4", codec="k8v4", **PREFILL),
    Case("prefill-kv4c", codec="kv4c", page=128, **PREFILL),
    Case("prefill-kv4h", codec="kv4h", page=128, scope="full", **PREFILL),
    Case("prefill-kv4h-d96", codec="kv4h", head_dim=96, scope="full", **PREFILL),
    Case("prefill-kv4h-d256", codec="kv4h", head_dim=256, scope="full", **PREFILL),
    Case("prefill-mixed-cross", codec="kv8+kv4c", options=("cross",), scope="full", **PREFILL),
    Case("prefill-mass", codec="kv8", options=("mass",), **PREFILL),
    Case("suffix", rows=1, new=64),
    Case("suffix-tree", rows=1, new=64, options=("tree",), scope="full"),
    Case("suffix-invariant", rows=1, new=64, options=("invariant",), scope="full"),
    Case("latent-g16", group=16, budget=1.7, **LATENT),
    Case("latent-g128", group=128, budget=3.7, scope="every", **LATENT),
    Case("latent-prompt", group=16, new=256, budget=4.1, **LATENT),
    Case("cascade", "cascade_attention", codec="any", rows=32),
    Case("merge", "merge", codec="any"),
    Case("append", "append", scope="every"),
    Case("append-rope", "append", options=("rope",)),
    Case("append-rope-gptj", "append", options=("rope", "interleaved"), scope="full"),
    Case("reposition", "reposition"),
    Case("reposition-gptj", "reposition", options=("interleaved",), scope="full"),
    Case("drop", "drop_tokens"),
    Case("dense", "gather_dense", scope="every"),
    Case("dense-sealed", "gather_dense", codec="kv8+k8v4+kv4c+kv4h"),
    Case("seal-kv8", "transcode", codec="kv8"),
    Case("seal-k8v4", "transcode", codec="k8v4"),
    Case("seal-kv4c", "transcode", codec="kv4c", scope="every"),
    Case("seal-kv4h", "transcode", codec="kv4h"),
    Case("seal-kv4h-d80", "transcode", codec="kv4h", head_dim=80, scope="full"),
    Case("seal-kv4h-d256", "transcode", codec="kv4h", head_dim=256, page=128, scope="full"),
    Case("demote-kv4c", "transcode", codec="kv8+kv4c"),
    Case("decode-kv8-page", "transcode", codec="kv8+raw"),
    Case("decode-kv4h-page", "transcode", codec="kv4h+raw"),
    Case("check-raw", "transcode"),
    Case("checksum", "checksum", codec="any", scope="every"),
    Case("digest", "digest_pages", codec="any", scope="every"),
    Case("gather-digest", "gather_pages", codec="any", options=("digest",), scope="every"),
    Case("copy", "copy_pages", codec="any", scope="every"),
    Case("gather", "gather_pages", codec="any"),
    Case("scatter", "scatter_pages", codec="any"),
    Case("cold", "decode_cold", scope="every"),
    Case("cold-d80-fp16", "decode_cold", head_dim=80, page=24, dtype="float16", scope="full"),
    Case("cold-d256-fp32", "decode_cold", head_dim=256, page=128, dtype="float32", scope="full"),
)


class Scene(NamedTuple):
    """Operands of a case's call; nobody reads what they hold.

    Attributes:
        layouts: Of each codec that the case names; raw ones of a case that names none.
    """

    case: Case
    layouts: tuple[PageLayout, ...]
    pages: Pages
    batch: Ragged
    tokens: int
    dtype: torch.dtype

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.zeros(self.tokens, *shape, dtype=self.dtype)


def scene(case: Case) -> Scene:
    geometry = Geometry.uniform(
        layers=2,
        kv_heads=HEADS,
        head_dim=case.head_dim,
        value_dim=case.value_dim or case.head_dim,
        dtype=case.dtype,
        page_size=case.page,
    )
    if "latent" in case.options:
        latent = msgspec.structs.replace(geometry.groups[0], kind="latent", kv_heads=1)
        geometry = Geometry(groups=(latent,), page_size=case.page)
    raw = page_layout(geometry.groups[0], case.page)
    codecs = ["raw"] if case.codec == "any" else case.codec.split("+")
    layouts = tuple(page_layout(geometry.groups[0], case.page, codec) for codec in codecs)
    rows, columns = case.rows, LENGTH // case.page
    table = torch.zeros(rows, columns + 16, dtype=torch.int32)
    for first, codec in enumerate(codecs):  # the last page, at least, is open
        table[:, first : columns - 1 : len(codecs)] = page_id(1, codec)
    index = torch.arange(rows, dtype=torch.int32)
    starts = case.new * torch.arange(rows + 1, dtype=torch.int32)
    batch = Ragged(table, index, torch.full_like(index, LENGTH), starts, case.new, LENGTH)
    # As large as arenas are: beyond what 32 bits address. Nobody writes to it, so it costs nothing.
    arena = torch.empty(3 << 30, dtype=torch.uint8)
    sealed = tuple(layout for layout in layouts if layout.codec != "raw")
    pages = Pages(arena, raw, 0, sealed)
    return Scene(case, layouts, pages, batch, rows * case.new, getattr(torch, case.dtype))


Call = Callable[[Scene], Any]
CALLS: dict[str, Call] = {}


def calls(op: str) -> Callable[[Call], Call]:
    """The function that calls an operation with the operands of a case."""

    def keep(call: Call) -> Call:
        CALLS[op] = call
        return call

    return keep


@calls("paged_attention")
def attend(x: Scene) -> None:
    heads, options = x.pages.layout.kv_heads * x.case.group, x.case.options
    most_pages = -(-LENGTH // x.case.page)
    kernels.paged_attention(
        x.noise(heads, x.case.head_dim),
        x.pages,
        x.batch,
        window=4096 if "window" in options else None,
        softcap=50.0 if "softcap" in options else None,
        sinks=torch.zeros(heads) if "sinks" in options else None,
        alibi=torch.zeros(heads) if "alibi" in options else None,
        tree=torch.zeros(x.tokens, dtype=torch.int64) if "tree" in options else None,
        causal="cross" not in options,
        mass=torch.zeros(x.case.rows, most_pages, HEADS) if "mass" in options else None,
        return_lse="lse" in options,
        invariant="invariant" in options,
        backend="triton",
    )


@calls("cascade_attention")
def cascade(x: Scene) -> None:
    plan = kernels.plan_cascade(x.batch, x.case.page)
    q = x.noise(HEADS * x.case.group, x.case.head_dim)
    kernels.cascade_attention(q, x.pages, x.batch, plan, backend="triton")


@calls("append")
def append(x: Scene) -> None:
    k, v = x.noise(HEADS, x.case.head_dim), x.noise(HEADS, x.pages.layout.value_dim)
    rope = rotary(x) if "rope" in x.case.options else None
    kernels.append(k, v, x.pages, x.batch, rope, backend="triton")


def rotary(x: Scene) -> kernels.Rotary:
    lines = torch.zeros(2, LENGTH, x.case.head_dim // 2)
    return kernels.Rotary(*lines, "interleaved" in x.case.options)


@calls("reposition")
def reposition(x: Scene) -> None:
    index, layout = x.batch.rows, x.pages.layout
    kernels.reposition(x.pages.arena, index, index, rotary(x), layout, backend="triton")


@calls("drop_tokens")
def drop_tokens(x: Scene) -> None:
    index, layout = x.batch.rows, x.pages.layout
    keep = torch.zeros(layout.layers, HEADS, len(index) * layout.page_size, dtype=torch.int32)
    kernels.drop_tokens(x.pages.arena, index, index, keep, layout, backend="triton")


@calls("gather_dense")
def gather_dense(x: Scene) -> None:
    kernels.gather_dense(x.pages, x.batch, 16, backend="triton")


@calls("merge")
def merge(x: Scene) -> None:
    part = x.noise(HEADS, x.case.head_dim), torch.zeros(x.tokens, HEADS)
    kernels.merge([part, part], backend="triton")


@calls("checksum")
def checksum(x: Scene) -> None:
    kernels.checksum(x.pages.arena.view(torch.int64), 1 << 16, backend="triton")


@calls("digest_pages")
def digest_pages(x: Scene) -> None:
    layout = x.pages.layout
    kernels.digest_pages(
        x.pages.arena, x.batch.rows, layout.granules, layout.layers, backend="triton"
    )


@calls("copy_pages")
def copy_pages(x: Scene) -> None:
    kernels.copy_pages(
        x.pages.arena, x.batch.rows, x.batch.rows, x.pages.layout.granules, backend="triton"
    )


@calls("gather_pages")
def gather_pages(x: Scene) -> None:
    layout, index = x.pages.layout, x.batch.rows
    out = torch.zeros(len(index), layout.page_bytes, dtype=torch.uint8)
    digests = torch.zeros(len(index), layout.layers, 2, dtype=torch.int64)
    kernels.gather_pages(
        *(x.pages.arena, index, layout.granules, out),
        digests=digests if "digest" in x.case.options else None,
        backend="triton",
    )


@calls("scatter_pages")
def scatter_pages(x: Scene) -> None:
    layout, index = x.pages.layout, x.batch.rows
    data = torch.zeros(len(index), layout.page_bytes, dtype=torch.uint8)
    kernels.scatter_pages(x.pages.arena, index, layout.granules, data, backend="triton")


@calls("transcode")
def transcode(x: Scene) -> None:
    """From raw into the codec of the case, or from its first codec into its second."""
    old, new = (x.pages.layout, *x.layouts)[-2:]
    kernels.transcode(x.pages.arena, x.batch.rows, x.batch.rows, old, new, backend="triton")


@calls("decode_cold")
def decode_cold(x: Scene) -> None:
    """Pages in kvt, with 512 axes a chunk, 32 of them as floats."""
    from flowkv.kernels.triton import kvt

    layout, pages, chunks, pairs = x.pages.layout, 5, 16, kvt.power(x.case.head_dim) // 2
    tiles = 2 * layout.layers * layout.kv_heads
    elements = layout.layers * layout.kv_heads * (layout.head_dim + layout.value_dim)
    integers = (37 << 11,), (512 * chunks,), (chunks, 6), (tiles, 8), (3, 2, pairs)
    tables = (torch.zeros(*shape, dtype=torch.int32) for shape in integers)
    fine = torch.zeros(elements, 512, dtype=torch.int8)
    lines = torch.zeros(elements, 32), fine, torch.zeros(elements), torch.zeros(elements)
    speeds = torch.zeros(1, pairs, dtype=torch.float64)
    basis = kvt.BasisTables(*tables, *lines, speeds)
    places = (torch.zeros(pages, *shape, dtype=torch.int32) for shape in ((chunks, 4), (3,)))
    angles = torch.zeros(2, 1, pages, layout.page_size, pairs)
    batch = kvt.CodedBatch(x.pages.arena, *places, *angles)
    found = kvt.decode_symbols(basis, batch, layout.page_size)
    kvt.write_elements(basis, batch, found, x.pages.arena, layout)


def record(case: Case, arch: str) -> list[Launch]:
    """Run the call of a case; its launches."""
    with no_device(arch, ptx="plain" not in case.options) as launches:
        CALLS[case.op](scene(case))
    return launches


def report(case: Case, arch: str, launch: Launch) -> dict[str, Any]:
    """The facts of one compiled kernel."""
    metadata, found = launch.compiled.metadata, facts(launch.compiled)
    row = {
        "case": case.name,
        "op": case.op,
        "codec": case.codec,
        "arch": arch,
        "kernel": launch.kernel,
        "budget": case.budget if launch.kernel.startswith(case.kernel) else None,
        "warps": metadata.num_warps,
        "shared_bytes": metadata.shared,
        **found,
    }
    if "loop" in found and launch.kernel.startswith("attend"):
        known = launch.constants.get("S", launch.constants["C"])
        threads = metadata.num_warps * metadata.target.warp_size
        elements = known.TILE * (known.HEAD_DIM + known.VALUE_DIM)
        row |= {"tile": known.TILE, "inst_per_el": round(found["loop"] * threads / elements, 2)}
    return row


def chosen(names: str, scopes: Collection[str], part: str) -> list[Case]:
    """Part "i/n" of the cases in whose name the pattern `names` is found, of some scopes."""
    cases = [case for case in CASES if re.search(names, case.name) and case.scope in scopes]
    first, step = map(int, part.split("/"))
    return cases[first::step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", nargs="+", default=["sm_90"], choices=sorted(ARCHES))
    parser.add_argument("-k", default="", help="only cases in whose name this pattern is found")
    parser.add_argument("--scope", nargs="+", default=SCOPES, choices=SCOPES)
    parser.add_argument("--part", default="0/1", help="i/n: only every n-th case, from the i-th on")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel")
    parser.add_argument("--sass", type=pathlib.Path, help="write disassemblies into this folder")
    args = parser.parse_args()
    for arch in args.arch:
        for case in chosen(args.k, args.scope, args.part):
            for launch in record(case, arch):
                if args.sass:
                    args.sass.mkdir(parents=True, exist_ok=True)
                    path = args.sass / f"{case.name}-{launch.kernel}-{arch}.sass"
                    path.write_text(listing(launch.compiled))
                row = report(case, arch, launch)
                print(json.dumps(row) if args.json else line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    columns = ("warps", "regs", "spills", "local_bytes", "shared_bytes", "loop", "inst_per_el")
    values = " ".join(f"{row.get(name, '-'):>7}" for name in columns)
    return f"{row['arch']:6} {row['case']:16} {row['kernel']:16} {values}  {','.join(row['mma'])}"


if __name__ == "__main__":
    sys.exit(main())
