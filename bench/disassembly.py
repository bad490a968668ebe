"""Contents of a compiled kernel: registers, spills, shared memory, instructions of its loop."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import subprocess
import tempfile
from collections import Counter
from functools import cache
from typing import Any

import triton

TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MMA = ("HMMA", "IMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA", "DMMA")


def tool(name: str, *args: str, cubin: bytes) -> str:
    """Output of a tool of the CUDA binary utilities, which Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / name), *args, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def listing(compiled: Any) -> str:
    """Assembly of a compiled kernel."""
    if "amdgcn" in compiled.asm:
        return compiled.asm["amdgcn"]
    return tool("nvdisasm", "-c", cubin=compiled.asm["cubin"])


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


def sass_facts(cubin: bytes) -> dict[str, Any]:
    """Facts of a binary for NVIDIA's devices."""
    usage = tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    ops, inner = loops(tool("nvdisasm", "-c", cubin=cubin))
    local = int(re.search(r" LOCAL:(\d+)", usage)[1]) + int(re.search(r"STACK:(\d+)", usage)[1])
    memory = Counter(op for op in ops if op.startswith(("LDG", "STG", "LDS", "STS", "UTMA", "CP")))
    facts = {
        "regs": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": sum(op.startswith(("LDL", "STL")) for op in ops),
        "local_bytes": local,
        "fused": sum(op.startswith("FFMA") for op in ops),
        "instructions": len(ops),
        "mma": sorted({".".join(op.split(".")[:2]) for op in ops if op.split(".")[0] in MMA}),
        "memory": dict(sorted(memory.items())),
    }
    # The loop without masks is the one that copies ahead; the peeled ones behind it do not.
    main = [(a, b) for a, b in inner if any(op.startswith("LDGSTS") for op in ops[a : b + 1])]
    if main:
        begin, end = max(main, key=lambda span: span[1] - span[0])
        facts["loop"] = end - begin + 1
        facts["loop_ops"] = dict(Counter(op.split(".")[0] for op in ops[begin : end + 1]))
    return facts


def amdgcn_facts(text: str) -> dict[str, Any]:
    """Facts of the assembly for AMD's devices; accumulation registers count as registers."""

    def count(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    ops = re.findall(r"^\s+([a-z][a-z0-9_]+)\b", text, re.MULTILINE)
    memory = Counter(op for op in ops if op.startswith(("global_", "buffer_", "ds_", "scratch_")))
    return {
        "regs": count("vgpr_count"),
        "spills": count("vgpr_spill_count") + count("sgpr_spill_count"),
        "local_bytes": count("private_segment_fixed_size"),
        "instructions": len(ops),
        "mma": sorted({op for op in ops if op.startswith("v_mfma")}),
        "memory": dict(sorted(memory.items())),
    }


@cache
def _kept() -> pathlib.Path:
    """Where facts of binaries seen before lie: a folder for each state of this file."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    state = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:16]
    return pathlib.Path(home, "flowkv", "codegen", state)


def facts(compiled: Any) -> dict[str, Any]:
    """Facts of a compiled kernel, from the cache if its binary was taken apart before."""
    text = compiled.asm.get("amdgcn") or compiled.asm["cubin"]
    digest = hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
    path = _kept() / f"{digest}.json"
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        found = amdgcn_facts(text) if isinstance(text, str) else sass_facts(text)
    try:  # without a home, or with a full one, it is only slower
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found))
        part.replace(path)
    except OSError:
        pass
    return found
