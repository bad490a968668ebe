"""What the compiler makes of the Triton kernels: registers, spills, shared memory, instructions.

Needs no GPU. A driver without a device lets the real launch code run on small CPU tensors, so that
exactly what a GPU would be given is compiled for it, and every launch is recorded and dropped:

    python -m bench.codegen                    # a table of all cases for sm_90
    python -m bench.codegen --arch 80 --json   # one JSON object per kernel
    python -m bench.codegen -k decode --sass sass

`inst/el`: thread-instructions of the main loop per K or V element it reads. An H200 issues 128 a
clock and processor while 8.9 bfloat16 elements arrive, so 14.4 is where decode stops being bound by
memory; far below it, there is time to wait for loads.

TRITON_INTERPRET must not be set: interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flowkv.core.geometry import Geometry
from flowkv.core.layout import page_layout
from flowkv.kernels import (
    triton_attend,
    triton_few,
    triton_launch,
    triton_many,
    triton_move,
    triton_task,
)
from flowkv.kernels.operands import Pages, Ragged, Scoring
from flowkv.kernels.triton_launch import Traits

TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TRAITS = {
    80: Traits(8, 108, 163 << 10),
    89: Traits(8, 128, 99 << 10),
    90: Traits(9, 132, 227 << 10),
    100: Traits(10, 148, 227 << 10),
}
MMA = ("HMMA", "IMMA", "HGMMA", "UTCHMMA", "DMMA")


class Case(NamedTuple):
    """A call whose kernels are compiled; `budget` bounds inst/el of the kernel named `kernel`."""

    name: str
    op: str = "decode"  # or prefill, suffix, append, dense, copy, merge
    head_dim: int = 128
    value_dim: int = 0
    group: int = 4
    page: int = 64
    dtype: str = "bfloat16"
    new: int = 1
    options: tuple[str, ...] = ()
    budget: float | None = None


CASES = (
    Case("decode", budget=1.4),
    Case("decode-d64", head_dim=64, budget=1.8),
    Case("decode-d80", head_dim=80, budget=3.0),
    Case("decode-d96", head_dim=96, budget=2.5),
    Case("decode-d256", head_dim=256, budget=1.4),
    Case("decode-p16", page=16, budget=3.0),
    Case("decode-p32", page=32, budget=2.0),
    Case("decode-p128", page=128, budget=1.4),
    Case("decode-g1", group=1, budget=1.4),
    Case("decode-g8", group=8, budget=1.4),
    Case("decode-fp16", dtype="float16", budget=1.4),
    Case("decode-fp32", dtype="float32"),
    Case("decode-fp32-d64", dtype="float32", head_dim=64),
    Case("decode-fp32-d256", dtype="float32", head_dim=256),
    Case("decode-dv64", value_dim=64, budget=1.8),
    Case("decode-d192", head_dim=192, value_dim=128, budget=2.2),
    Case("decode-all", options=("window", "softcap", "sinks", "lse"), budget=2.2),
    Case("verify", new=4, budget=2.2),
    Case("prefill", "prefill", new=2048),
    Case("prefill-d64", "prefill", head_dim=64, new=2048),
    Case("prefill-d80", "prefill", head_dim=80, new=2048),
    Case("prefill-d96", "prefill", head_dim=96, new=2048),
    Case("prefill-d256", "prefill", head_dim=256, new=2048),
    Case("prefill-d192", "prefill", head_dim=192, value_dim=128, new=2048),
    Case("prefill-fp32", "prefill", dtype="float32", new=2048),
    Case("prefill-all", "prefill", new=2048, options=("window", "softcap", "sinks", "lse")),
    Case("suffix", "suffix", new=64),
    Case("merge", "merge"),
    Case("append", "append"),
    Case("dense", "dense"),
    Case("copy", "copy"),
)


class NoDevice:
    """A Triton driver for one architecture: compiles as for a device, launches nothing."""

    binary_ext = "cubin"

    def __init__(self, arch: int) -> None:
        self.arch, self.utils = arch, self
        self.launcher_cls = lambda src, metadata: lambda *args: None

    def load_binary(self, *args: Any) -> tuple[int, ...]:
        return 1, 2, 32, 0, 1024

    def unload_module(self, *args: Any) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": TRAITS[self.arch].shared_bytes,
            "multiprocessor_count": TRAITS[self.arch].processors,
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # kernels are cached by device

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_interface(self) -> None: ...

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def record(case: Case, arch: int) -> list[tuple[str, dict[str, Any], Any]]:
    """Run the call of a case; (name, constants, compiled kernel) of each launch."""
    launches = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        compiled = kernel[grid](*args, **constants, enable_fp_fusion=True)
        launches.append((kernel.__name__, constants, compiled))

    driver.set_active(NoDevice(arch))
    modules = triton_attend, triton_few, triton_many, triton_move, triton_task
    for module in modules:
        module.launch = launch
        if hasattr(module, "traits"):
            module.traits = lambda device: TRAITS[arch]
    try:
        call(case)
    finally:
        for module in modules:
            module.launch = triton_launch.launch
            if hasattr(module, "traits"):
                module.traits = triton_launch.traits
    return launches


def call(case: Case) -> None:
    """The operation of a case on tensors that nobody reads."""
    heads, dtype = 8, getattr(torch, case.dtype)
    geometry = Geometry.uniform(
        layers=2,
        kv_heads=heads,
        head_dim=case.head_dim,
        value_dim=case.value_dim or case.head_dim,
        dtype=case.dtype,
        page_size=case.page,
    )
    layout = page_layout(geometry.groups[0], case.page)
    rows = 2 if case.op == "decode" else 1
    lines = torch.zeros(rows, 16, dtype=torch.int32)
    index = torch.arange(rows, dtype=torch.int32)
    starts = case.new * torch.arange(rows + 1, dtype=torch.int32)
    length = 1 << 16
    batch = Ragged(lines, index, torch.full_like(index, length), starts, case.new, length)
    pages = Pages(torch.zeros(layout.page_bytes, dtype=torch.uint8), layout, 0)
    k = torch.zeros(rows * case.new, heads, case.head_dim, dtype=dtype)
    if case.op == "append":
        triton_move.append(k, k, pages, batch)
    elif case.op == "dense":
        triton_move.gather_dense(pages, batch, 16)
    elif case.op == "copy":
        triton_move.copy_pages(pages.arena, index, index, layout.granules)
    elif case.op == "merge":
        lse = torch.zeros(k.shape[:2])
        triton_attend.merge([(k, lse), (k, lse)])
    else:
        q = torch.zeros(rows * case.new, heads * case.group, case.head_dim, dtype=dtype)
        triton_attend.paged_attention(
            q,
            pages,
            batch,
            Scoring(
                scale=case.head_dim**-0.5,
                window=4096 if "window" in case.options else None,
                softcap=50.0 if "softcap" in case.options else None,
                sinks=torch.zeros(heads * case.group) if "sinks" in case.options else None,
                return_lse="lse" in case.options,
            ),
        )


def tool(name: str, *args: str, cubin: bytes) -> str:
    """Output of a tool of the CUDA binary utilities, which Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / name), *args, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")


def loops(sass: str) -> tuple[list[str], list[tuple[int, int]]]:
    """(Opcodes, innermost loops): a loop is the span that a backward branch closes."""
    code, labels, found = [], {}, []
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = len(code)
        elif match := _INSTRUCTION.search(line):
            code.append((match[1], match[2]))
    for end, (op, rest) in enumerate(code):
        to = re.search(r"`\((\.L_x_\d+)\)", rest) if op.startswith("BRA") else None
        if to and labels.get(to[1], end) < end:
            found.append((labels[to[1]], end))
    inner = [a for a in found if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return [op for op, _ in code], inner


def report(name: str, constants: dict[str, Any], compiled: Any) -> dict[str, Any]:
    """The facts of one compiled kernel."""
    cubin = compiled.asm["cubin"]
    usage = tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    ops, inner = loops(tool("nvdisasm", "-c", cubin=cubin))
    local = int(re.search(r" LOCAL:(\d+)", usage)[1]) + int(re.search(r"STACK:(\d+)", usage)[1])
    facts = {
        "kernel": name,
        "warps": compiled.metadata.num_warps,
        "regs": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": sum(op.startswith(("LDL", "STL")) for op in ops),
        "local_bytes": local,
        "shared_bytes": compiled.metadata.shared,
        "instructions": len(ops),
        "mma": sorted({".".join(op.split(".")[:2]) for op in ops if op.split(".")[0] in MMA}),
    }
    memory = Counter(op for op in ops if op.startswith(("LDG", "STG", "LDS", "STS", "UTMA", "CP")))
    facts["memory"] = dict(sorted(memory.items()))
    # The loop without masks is the one that copies ahead; the peeled ones behind it do not.
    main = [(a, b) for a, b in inner if any(op.startswith("LDGSTS") for op in ops[a : b + 1])]
    if main and "TILE" in constants:
        begin, end = max(main, key=lambda span: span[1] - span[0])
        facts["loop"] = end - begin + 1
        elements = constants["TILE"] * (constants["HEAD_DIM"] + constants["VALUE_DIM"])
        facts["inst_per_el"] = round(facts["loop"] * facts["warps"] * 32 / elements, 2)
        facts["loop_ops"] = dict(Counter(op.split(".")[0] for op in ops[begin : end + 1]))
        facts["tile"] = constants["TILE"]
    return facts


def measure(arch: int, names: str = "") -> list[dict[str, Any]]:
    """Facts of every kernel of the cases in whose name the pattern `names` is found."""
    rows = []
    for case in CASES:
        if re.search(names, case.name):
            for name, constants, compiled in record(case, arch):
                facts = report(name, constants, compiled)
                budget = case.budget if name == "attend_few" else None
                rows.append({"case": case.name, "arch": arch, "budget": budget, **facts})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=sorted(TRAITS))
    parser.add_argument("-k", default="", help="only cases in whose name this pattern is found")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel")
    parser.add_argument("--sass", type=pathlib.Path, help="write disassemblies into this folder")
    args = parser.parse_args()
    for arch in args.arch:
        if args.sass:
            args.sass.mkdir(parents=True, exist_ok=True)
            for case in CASES:
                for name, _, compiled in record(case, arch) if re.search(args.k, case.name) else ():
                    sass = tool("nvdisasm", "-c", cubin=compiled.asm["cubin"])
                    (args.sass / f"{case.name}-{name}-sm{arch}.sass").write_text(sass)
        for row in measure(arch, args.k):
            if args.json:
                print(json.dumps(row), flush=True)
                continue
            columns = ("warps", "regs", "spills", "local_bytes", "shared_bytes", "loop")
            values = " ".join(f"{row.get(name, '-'):>7}" for name in (*columns, "inst_per_el"))
            mma = ",".join(row["mma"])
            print(f"sm_{arch} {row['case']:13} {row['kernel']:13} {values}  {mma}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
