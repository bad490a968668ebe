"""What the demo's processes tell each other, as files of JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from flowkv.demo.workload import Case, Sizes
from flowkv.observe.timeline import Timeline

PLAN = "plan.json"
FINDINGS = "{}-findings.json"


class Plan(msgspec.Struct, kw_only=True):
    """What both processes are told.

    Attributes:
        model: Folder or id of the model.
        store: Directory of the disk tier, with a size if need be ("./kv:20GiB").
        sizes: How much is asked.
        repeats: How often everything is measured.
        dtype: Of weights and cache.
        device: Where the model computes; "" chooses.
        threads: Threads of torch; 0 leaves torch's choice.
        trace: File that gets a Chrome trace of the restores that are watched; "" for none.
    """

    model: str
    store: str
    sizes: Sizes = Sizes()
    repeats: int = 3
    dtype: str = "float32"
    device: str = ""
    threads: int = 0
    trace: str = ""


class Sample(msgspec.Struct, kw_only=True):
    """One request, measured.

    Attributes:
        way: "cold" (without FlowKV, first process), "first" (FlowKV attached, nothing stored),
            "again" (pages in the pool of the same process), "recompute" (without FlowKV, second
            process), "disk" (second process, pages on disk), "watched" (the same once more, with
            its timeline taken).
        case: Name of the case.
        ttft_s: Time to the first token.
        ttft_cpu_s: CPU time of the calling thread meanwhile.
        tpot_s: Time per further token; 0 if only the first was asked for.
        identical: Whether the tokens are those of the model without FlowKV.
        seen: Prompt tokens that FlowKV was asked for.
        reused: Prompt tokens that were not computed.
        loaded_bytes: Read from tiers, by kind.
    """

    way: str
    case: str
    ttft_s: float
    ttft_cpu_s: float
    tpot_s: float
    identical: bool = True
    seen: int = 0
    reused: int = 0
    loaded_bytes: dict[str, int] = {}


class Watched(msgspec.Struct, kw_only=True):
    """A restore of the conversation's last turn, as it went.

    Attributes:
        timeline: What was computed, what was loaded, and when they met.
        bytes_per_s: Of the slow disk that was emulated; 0.0 for the disk as it is.
    """

    timeline: Timeline
    bytes_per_s: float = 0.0


class Findings(msgspec.Struct, kw_only=True):
    """What one process found out.

    Attributes:
        samples: In the order they were measured.
        tiers: `KV.stats()["tiers"]` and the device pools, at the end.
        machine: Device, threads and versions.
        attach_s: How long attaching took, the store's opening included.
        fresh: Whether the store knew nothing of this before.
        cases: The requests.
        texts: What the last turn asked and what was answered, to be shown.
        restores: Those that were watched.
    """

    samples: list[Sample]
    tiers: dict[str, Any]
    machine: dict[str, Any]
    attach_s: float = 0.0
    fresh: bool = True
    cases: list[Case] = []
    texts: list[str] = []
    restores: list[Watched] = []
