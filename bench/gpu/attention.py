"""Decode, verify, prefill and cascade: checked against plain torch, then timed beside rivals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.machine import Machine
from bench.gpu.pool import Case, Step, prepare, read_bytes
from bench.gpu.rivals import NOISE, RIVALS, Absent
from flowkv.kernels import Ragged, cascade_attention, gather_dense, paged_attention, plan_cascade

K = 1024
A, B = "decode 32 x 4k", "decode 1 x 128k"
LONG = (128 * K, 64 * K, 32 * K, 16 * K, 8 * K, 4 * K, 2 * K, K, K)
CODECS = ("kv8", "k8v4", "kv4c", "kv4h")


def decode(name: str, lengths: tuple[int, ...], **changes: Any) -> Case:
    """A step of one new token a row; that token begins an open page where lengths are even."""
    return Case(name, tuple(n + 1 for n in lengths), (1,) * len(lengths), **changes)


CASES = (
    decode(A, (4 * K,) * 32),
    *(decode(f"{A} {codec}", (4 * K,) * 32, codecs=(codec,), of=A) for codec in CODECS),
    decode(f"{A} kv8 and kv4c", (4 * K,) * 32, codecs=("kv8", "kv4c"), of=A),
    decode(B, (128 * K,)),
    *(decode(f"{B} {codec}", (128 * K,), codecs=(codec,), of=B) for codec in CODECS),
    decode("decode 8 x 32k", (32 * K,) * 8),
    decode("decode ragged 1k-128k", LONG, of="decode 8 x 32k"),
    decode("decode 8 x 32k kv4c", (32 * K,) * 8, codecs=("kv4c",)),
    decode("decode ragged 1k-128k kv4c", LONG, codecs=("kv4c",), of="decode 8 x 32k kv4c"),
    decode("decode 1 x 1k", (K,)),
    decode("decode 1 x 16k", (16 * K,)),
    decode("decode 1 x 16k kv4c", (16 * K,), codecs=("kv4c",), of="decode 1 x 16k"),
    decode("decode 256 x 1k", (K,) * 256),
    decode("decode 32 x 4k page 16", (4 * K,) * 32, page=16, of=A),
    decode("decode 32 x 4k page 64", (4 * K,) * 32, page=64, of=A),
    decode("decode 32 x 4k page 64 kv4c", (4 * K,) * 32, page=64, codecs=("kv4c",), of=A),
    decode("decode 32 x 4k D=64", (4 * K,) * 32, dim=64),
    decode("decode 32 x 4k D=80", (4 * K,) * 32, dim=80),
    decode("decode 32 x 4k D=256", (4 * K,) * 32, dim=256, kv_heads=4),
    decode("decode 32 x 4k MHA", (4 * K,) * 32, kv_heads=32, group=1),
    decode("decode 32 x 4k group 8", (4 * K,) * 32, group=8),
    decode("decode 32 x 4k float32", (4 * K,) * 32, dtype="float32"),
    decode("decode 32 x 16k window 1k", (16 * K,) * 32, window=K),
    Case("verify 32 x 4k T=4", (4 * K + 4,) * 32, (4,) * 32),
    Case("verify 32 x 4k T=4 kv4c", (4 * K + 4,) * 32, (4,) * 32, codecs=("kv4c",)),
    Case("prefill 1 x 2k", (2 * K,), (2 * K,)),
    Case("prefill 1 x 16k", (16 * K,), (16 * K,)),
    Case("prefill 1 x 2k D=64", (2 * K,), (2 * K,), dim=64),
    Case("prefill 1 x 2k D=256", (2 * K,), (2 * K,), dim=256),
    Case("suffix 64 over 32k", (32 * K + 64,), (64,)),
    Case("mixed 2k chunk, 31 x 4k", (8 * K, *(4 * K,) * 31), (2 * K, *(1,) * 31)),
)
CHUNKED = (
    Case("prefill 16k in 2k chunks", (16 * K,), (2 * K,)),
    Case("prefill 16k in 2k chunks kv8", (16 * K,), (2 * K,), codecs=("kv8",)),
    Case("prefill 16k in 2k chunks kv4c", (16 * K,), (2 * K,), codecs=("kv4c",)),
)
CASCADES = (
    decode("cascade 32k x 64", (33 * K,) * 64, shared=32 * K),
    decode("cascade 32k x 64 kv4c", (33 * K,) * 64, shared=32 * K, codecs=("kv4c",)),
)
TOLERANCE = {"raw": 1e-2, "kv8": 2e-2, "k8v4": 4e-2, "kv4c": 4e-2, "kv4h": 4e-2}
"""Of the norm of the difference over the norm of the answer, from the same decoded K and V."""


def exact(step: Step, batch: Ragged) -> torch.Tensor:
    """Attention in float32 over gathered pages, query block by query block."""
    case, layout = step.case, step.pages.layout
    k, v = gather_dense(step.pages, batch, max(case.lengths), backend="reference")
    out, n = torch.empty_like(step.q, dtype=torch.float32), 0
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    for b, length in enumerate(lengths):
        new = starts[b + 1] - starts[b]
        keys, values = k[b, :, -length:].float(), v[b, :, -length:].float()
        seen = torch.arange(length, device=keys.device)
        for begin in range(0, new, 256):
            q = step.q[n : n + min(256, new - begin)].float()
            rows = len(q)
            q = q.unflatten(1, (layout.kv_heads, -1)).permute(1, 2, 0, 3)  # [Hk, G, T, D]
            at = length - new + begin + torch.arange(rows, device=keys.device)
            mask = seen[None] <= at[:, None]
            if case.window:
                mask &= seen[None] > at[:, None] - case.window
            s = (q @ keys[:, None].transpose(2, 3)) * case.dim**-0.5
            p = s.masked_fill(~mask, -torch.inf).softmax(-1)
            out[n : n + rows] = (p @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
            n += rows
    return out


def error_of(got: torch.Tensor, right: torch.Tensor) -> float:
    """In norms: averages of thousands of random values are small, and so is any error in them."""
    return float((got.float() - right).norm() / right.norm())


def flops_of(lengths: tuple[int, ...], new: tuple[int, ...], case: Case) -> float:
    """Multiply-adds of the scores that are seen, counted as two operations each."""
    total = 0.0
    for length, t in zip(lengths, new, strict=True):
        seen = min(length, case.window + t - 1) if case.window else length
        total += 4 * (t * (seen - t) + t * (t + 1) / 2) * case.kv_heads * case.group * case.dim
    return total


def compare(
    result: dict[str, Any], step: Step, calls: list[Callable[[], torch.Tensor]], machine: Machine
) -> bool:
    """Check a call over poisoned memory; False, and said so, if its answer is wrong."""
    shape = *step.q.shape[:2], step.pages.layout.value_dim
    machine.poison(shape, shape, dtype=step.q.dtype)
    got = calls[0]()
    result["relative_error"] = error_of(got, exact(step, step.batches[0]))
    limit = TOLERANCE[step.case.codecs[-1]] if step.case.dtype != "float32" else 1e-4
    if result["relative_error"] <= limit:
        return True
    result["wrong"] = True
    return False


def attention(case: Case, machine: Machine) -> dict[str, Any]:
    """One case of decode, verify or prefill."""
    step = prepare(case, machine)
    result: dict[str, Any] = {"case": case.name, "of": case.of, "codecs": list(case.codecs)}
    calls = [
        lambda batch=batch: paged_attention(step.q, step.pages, batch, window=case.window)
        for batch in step.batches
    ]
    if not compare(result, step, calls, machine):
        return result
    result |= machine.timed(calls)
    result["eager_us"] = machine.eager(calls)["us"]
    rates(result, step.kv_bytes, flops_of(case.lengths, case.new, case), machine)
    if case.codecs == ("raw",):
        result["rivals"] = rivals(step, machine, result["us"])
    return result


def rates(result: dict[str, Any], n_bytes: float, flops: float, machine: Machine) -> None:
    seconds = result["us"] / 1e6
    result["bytes_s"], result["flop_s"] = n_bytes / seconds, flops / seconds
    result["of_read_ceiling"] = result["bytes_s"] / machine.limits["read_bytes_s"]
    result["of_matmul_ceiling"] = result["flop_s"] / machine.limits["bfloat16_flop_s"]


def rivals(step: Step, machine: Machine, us: float) -> dict[str, Any]:
    """Each rival's time and ours beside it, or the sentence that says why there is none."""
    right, found = exact(step, step.batches[0]), {}
    for name, make in RIVALS.items():
        try:
            calls = make(step, machine)
            found[name] = {} if name in NOISE else {"relative_error": error_of(calls[0](), right)}
            found[name] |= machine.timed(calls)
            found[name]["times"] = found[name]["us"] / us
        except Absent as absent:
            found[name] = {"skipped": str(absent)}
        except Exception as error:  # theirs to fail, and no reason to stop
            found[name] = {"skipped": f"It failed: {type(error).__name__}: {error}"[:300]}
    return found


def chunked(case: Case, machine: Machine) -> dict[str, Any]:
    """A prompt prefilled chunk after chunk, over the pages of the chunks before."""
    size, total = case.new[0], case.lengths[0]
    step = prepare(case, machine)
    result: dict[str, Any] = {"case": case.name, "codecs": list(case.codecs)}
    check = [lambda: paged_attention(step.q, step.pages, step.batches[0])]
    if not compare(result, step, check, machine):
        return result
    ends = list(range(size, total + 1, size))

    def parts(batch: Ragged) -> list[Ragged]:
        # A chunk's own pages are raw; those of the last one stand in for them.
        own = batch.table[:, (total - size) // case.page :]
        cut = []
        for end in ends:
            table = torch.cat([batch.table[:, : (end - size) // case.page], own], 1)
            cut.append(
                batch._replace(table=table, lengths=batch.lengths * 0 + end, most_length=end)
            )
        return cut

    def prompt(cut: list[Ragged]) -> None:
        for part in cut:
            paged_attention(step.q, step.pages, part)

    cuts = [parts(batch) for batch in step.batches]
    result |= machine.timed([lambda cut=cut: prompt(cut) for cut in cuts], 10)
    flops = sum(flops_of((end,), (size,), case) for end in ends)
    rates(result, step.kv_bytes, flops, machine)
    return result


def cascade(case: Case, machine: Machine) -> dict[str, Any]:
    """Rows that share a prefix, which is read once; beside the same rows without the cascade."""
    step = prepare(case, machine)
    plans = [plan_cascade(batch, case.page, least_tokens=1) for batch in step.batches]
    result: dict[str, Any] = {"case": case.name, "codecs": list(case.codecs)}
    calls = [
        lambda plan=plan: cascade_attention(step.q, step.pages, plan.batch, plan) for plan in plans
    ]
    if not compare(result, step, calls, machine):
        return result
    result |= machine.timed(calls)
    rates(result, step.kv_bytes, flops_of(case.lengths, case.new, case), machine)
    flat = [lambda batch=b: paged_attention(step.q, step.pages, batch) for b in step.batches]
    result["flat_us"] = machine.timed(flat)["us"]
    result["times_flat"] = result["flat_us"] / result["us"]
    apart = read_bytes(case._replace(shared=0), {x.codec: x for x in layouts_of(step)})
    result["flat_bytes"], result["bytes"] = apart, step.kv_bytes
    return result


def layouts_of(step: Step) -> tuple[Any, ...]:
    return step.pages.layout, *step.pages.sealed
