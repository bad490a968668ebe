"""The same attention by others, over the same keys and values, where they can be imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.machine import Call, Machine
from bench.gpu.pool import Step
from flowkv.kernels import gather_dense

sdpa = torch.nn.functional.scaled_dot_product_attention


class Absent(Exception):
    """Why a rival does not run, as a sentence."""


def _module(name: str, product: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a half-installed package raises
        raise Absent(f"{product} cannot be imported here ({error}).") from error


def views(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all raw pages of the arena, `[pages, Hk, P, D]`, where they lie."""
    layout = step.pages.layout
    dtype = getattr(torch, layout.dtype)
    item = dtype.itemsize
    pages = step.pages.arena.numel() // layout.page_bytes
    frames = step.pages.arena[: pages * layout.page_bytes].view(dtype).view(pages, -1)
    runs = frames[:, : layout.stripe_bytes // item].unflatten(1, (layout.kv_heads, 2, -1))
    both = runs.unflatten(3, (layout.page_size, layout.head_dim))
    return both[:, :, 0], both[:, :, 1]


def raw_only(step: Step) -> None:
    if step.pages.sealed or step.case.layers > 1:
        raise Absent("It has no such pages.")


def torch_sdpa(step: Step, machine: Machine) -> list[Call]:
    """Over K and V gathered beforehand, which is given for nothing."""
    case = step.case
    if len(set(case.lengths)) > 1 or len(set(case.new)) > 1 or case.window:
        raise Absent("It would need padding or a mask.")
    length, new, rows = case.lengths[0], case.new[0], len(case.new)
    if new not in (1, length):
        raise Absent("It has no causal mask for a chunk behind a prefix.")
    q = step.q.view(rows, new, -1, case.dim).transpose(1, 2)
    dense = [gather_dense(step.pages, batch, length) for batch in step.batches]

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = sdpa(q, k, v, is_causal=new > 1, enable_gqa=case.group > 1)
        return o.transpose(1, 2).flatten(0, 1)

    return [lambda k=k, v=v: call(k, v) for k, v in dense]


def flex_attention(step: Step, machine: Machine) -> list[Call]:
    """Compiled, over K and V gathered beforehand."""
    case = step.case
    flex = _module("torch.nn.attention.flex_attention", "FlexAttention")
    if len(set(case.lengths)) > 1 or set(case.new) != {1} or case.window:
        raise Absent("Only uniform decoding is compared with it.")
    attend = flex.flex_attention if machine.dry else torch.compile(flex.flex_attention)
    q = step.q[:, :, None]
    dense = [gather_dense(step.pages, batch, case.lengths[0]) for batch in step.batches]

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, enable_gqa=True)[:, :, 0]

    return [lambda k=k, v=v: call(k, v) for k, v in dense]


def flashinfer(tensor_cores: bool) -> Callable[[Step, Machine], list[Call]]:
    """Its decode wrapper over the very same pages."""

    def calls(step: Step, machine: Machine) -> list[Call]:
        raw_only(step)
        library, case = _module("flashinfer", "FlashInfer"), step.case
        if set(case.new) != {1}:
            raise Absent("Only decoding is compared with it.")
        made, layout = [], step.pages.layout
        counts = torch.tensor([-(-n // case.page) for n in case.lengths], dtype=torch.int32)
        starts = torch.nn.functional.pad(counts.cumsum(0).int(), (1, 0)).to(machine.device)
        last = torch.tensor([(n - 1) % case.page + 1 for n in case.lengths], dtype=torch.int32)
        for batch in step.batches:
            pages = [line[:n] for line, n in zip(batch.table, counts.tolist(), strict=True)]
            room = torch.empty(128 << 20, dtype=torch.uint8, device=machine.device)
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                room, "HND", use_tensor_cores=tensor_cores
            )
            wrapper.plan(
                starts,
                torch.cat(pages) // layout.granules,
                last.to(machine.device),
                case.kv_heads * case.group,
                case.kv_heads,
                case.dim,
                case.page,
                window_left=-1 if case.window is None else case.window - 1,
                data_type=getattr(torch, case.dtype),
                q_data_type=getattr(torch, case.dtype),
            )
            made.append(wrapper)
        both = views(step)
        return [lambda wrapper=wrapper: wrapper.run(step.q, both) for wrapper in made]

    return calls


def vllm(mode: str) -> Callable[[Step, Machine], list[Call]]:
    """Its Triton kernel: bf16 over the very same pages; 8 and 4 bits over pages full of noise."""

    def calls(step: Step, machine: Machine) -> list[Call]:
        from bench.gpu.vllm_shim import load

        raw_only(step)
        try:
            kernel, modes = load()
        except Exception as error:
            raise Absent(f"vLLM's Triton kernel cannot be imported here ({error}).") from error
        case = step.case
        if case.dtype != "bfloat16":
            raise Absent("Only bfloat16 is compared with it.")
        k, v = (x.transpose(1, 2) for x in views(step))  # [pages, P, Hk, D]
        options: dict[str, Any] = {}
        if mode != "NONE":
            packed = 2 if mode.startswith("INT4") else 1
            shape = *k.shape[:3], case.dim // packed
            kind = torch.uint8 if packed == 2 else torch.int8
            k, v = (
                torch.randint(0, 100, shape, dtype=kind, device=machine.device) for _ in range(2)
            )
            scales = [torch.rand(k.shape[:3], device=machine.device) for _ in range(2)]
            options = {"k_scale_cache": scales[0], "v_scale_cache": scales[1]}
        heads, segments = case.kv_heads * case.group, 16
        parts = {
            "softmax_segm_output": (len(step.q), heads, segments, case.dim),
            "softmax_segm_max": (len(step.q), heads, segments),
            "softmax_segm_expsum": (len(step.q), heads, segments),
        }
        options |= {name: torch.empty(x, device=machine.device) for name, x in parts.items()}

        def call(table: torch.Tensor, batch: Any) -> torch.Tensor:
            out = torch.empty_like(step.q)
            kernel(
                step.q, k, v, out, batch.starts, batch.most_new, batch.lengths, batch.most_length,
                case.dim**-0.5, True, ((case.window or 0) - 1, 0 if case.window else -1), table,
                0.0, None, None, None, seq_threshold_3D=128 // case.kv_heads,
                num_par_softmax_segments=segments, kv_quant_mode=getattr(modes, mode), **options,
            )  # fmt: skip
            return out

        tables = [batch.table // step.pages.layout.granules for batch in step.batches]
        pairs = zip(tables, step.batches, strict=True)
        return [lambda table=table, batch=batch: call(table, batch) for table, batch in pairs]

    return calls


RIVALS: dict[str, Callable[[Step, Machine], list[Call]]] = {
    "torch SDPA": torch_sdpa,
    "FlexAttention": flex_attention,
    "FlashInfer": flashinfer(tensor_cores=False),
    "FlashInfer, tensor cores": flashinfer(tensor_cores=True),
    "vLLM Triton": vllm("NONE"),
    "vLLM Triton int8": vllm("INT8_PER_TOKEN_HEAD"),
    "vLLM Triton int4": vllm("INT4_PER_TOKEN_HEAD"),
}
NOISE = ("vLLM Triton int8", "vLLM Triton int4")
"""Rivals whose pages hold noise of their own: their answers say nothing."""
