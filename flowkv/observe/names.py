"""Every metric by name: what it is, which labels it has, what it means."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from flowkv.observe.rules import Kind


class Name(NamedTuple):
    """What a metric is.

    Attributes:
        kind: "counter", "gauge" or "histogram".
        labels: What tells its series apart.
        meaning: One line for people.
    """

    kind: Kind
    labels: tuple[str, ...]
    meaning: str


def _table(text: str) -> dict[str, Name]:
    names = dict[str, Name]()
    for line in text.strip().splitlines():
        name, kind, labels, said = (cell.strip() for cell in line.split("|"))
        names[name] = Name(_KINDS[kind], tuple(labels.split()), said)
    return names


_KINDS: dict[str, Kind] = {"c": "counter", "g": "gauge", "h": "histogram"}

NAMES: Mapping[str, Name] = MappingProxyType(
    _table("""
requests_total | c | | Requests that an engine accepted
request_prompt_tokens_total | c | | Tokens of their prompts
requests_waiting | g | | Requests that wait for their first admission
requests_aside | g | | Preempted requests whose pages lie in host memory
admissions_total | c | resumed | Requests that entered the batch; resumed: again, after they were \
preempted
admitted_reused_tokens_total | c | resumed | Tokens that needed no computing when they entered
queue_seconds | h | resumed | Wait that ended with an admission
preemptions_total | c | kept | Requests that made room; kept: their pages went to host memory, \
else they were dropped
preempted_pages_total | c | kept | Device pages that they gave back
preempted_bytes_total | c | kept | Bytes of those pages
finished_total | c | reason | Requests that are over: stop, length, cancelled, deadline or failed
finished_tokens_total | c | reason | New tokens that they got
request_seconds | h | reason | From submission to the end
ttft_seconds | h | reason | From submission to the first new token
tpot_seconds | h | reason | Mean time of a further token of a request
inter_token_seconds | h | | Time between two tokens of a row
engine_steps_total | c | | Steps of engines
engine_step_seconds | h | | A whole step
engine_model_seconds | h | | The forward in it
engine_sampling_seconds | h | | The choice of tokens in it
prefill_tokens_total | c | | Prompt tokens that engines computed
decode_tokens_total | c | | Tokens of rows that decode, computed
made_tokens_total | c | | New tokens that requests got
engine_rows | g | | Rows of the last step
engine_pages | g | | Device pages that anybody held in the last step
engine_total_pages | g | | Device pages that there are
tokens_seen_total | c | | Prompt tokens that were looked up
tokens_reused_total | c | | Those of them that were found
open_sequences | g | | Sequences that are open
known_pages | g | | Pages and states that the index knows, wherever they lie
hits_total | c | tier | Prompts of which a part was found
hit_tokens_total | c | tier | Prompt tokens found
hit_bytes_total | c | tier | Bytes of what was found; 0 on the device
misses_total | c | | Prompts of which a part was found nowhere
miss_tokens_total | c | | Prompt tokens found nowhere
restores_total | c | tier | Loads of prefixes
restored_tokens_total | c | tier | Tokens of prefixes that were loaded
restored_bytes_total | c | tier | Bytes of them
restore_seconds | h | tier | From the beginning of such a load to its end
overlapped_restores_total | c | | Restores from both ends
overlapped_restore_seconds | h | | From the beginning of a restore to its end
restore_exposed_seconds | h | | The part of that in which somebody waited for loads
restore_computed_tokens_total | c | | Tokens that restores computed
restore_loaded_tokens_total | c | | Tokens that restores loaded
restore_failed_loads_total | c | | Loads that did not come and were recomputed
restore_spans_total | c | engine | Pieces of restores (not counted unless followed)
restore_span_bytes_total | c | engine | Bytes of them
published_total | c | group | Times that full pages became known to the index
published_tokens_total | c | group | Tokens of those pages
encodings_total | c | source target | Times that full pages were encoded
encoded_pages_total | c | source target | Pages that were encoded
encoded_source_bytes_total | c | source target | Their bytes before
encoded_bytes_total | c | source target | Their bytes afterwards
stores_total | c | tier | Writes to a tier
stored_pages_total | c | tier | Pages written
stored_bytes_total | c | tier | Bytes written
store_seconds | h | tier | From the beginning of a write to its end
evictions_total | c | tier reason | Times that a tier gave up pages: space, unused, lease, \
quota, prefetch or close
evicted_pages_total | c | tier reason | Pages that it gave up
evicted_bytes_total | c | tier reason | Bytes of them
promotions_total | c | source tier | Times that pages were copied to a faster tier
promoted_pages_total | c | source tier | Pages copied
promoted_bytes_total | c | source tier | Bytes of them
demotions_total | c | source tier | Times that pages moved to a slower tier to make room
demoted_pages_total | c | source tier | Pages moved
demoted_bytes_total | c | source tier | Bytes of them
layers_sent_total | c | | Layers of pages handed over to other processes
sent_pages_total | c | | Pages of them
sent_bytes_total | c | | Bytes of them
layers_arrived_total | c | | Layers of pages taken over from other processes
arrived_pages_total | c | | Pages of them
arrived_bytes_total | c | | Bytes of them
defragmentations_total | c | device | Times that pages moved within a pool
defragmented_pages_total | c | device | Pages moved
defragmented_bytes_total | c | device | Bytes of them
defragmented_slabs_total | c | device | Slabs that became empty
defragmentation_seconds | h | device | How long that took
fragmentation | g | device | Fragmentation right after the last one
device_used_bytes | g | device | Bytes of a pool in use
device_capacity_bytes | g | device | Bytes of a pool
device_fragmentation | g | device | Share of the bytes of occupied slabs that no page uses, 0 to 1
tier_used_bytes | g | tier | Bytes that a tier holds
tier_capacity_bytes | g | tier | Bytes that it may hold; +Inf without a limit
tier_answers | g | tier | 1 if the tier may be asked now, 0 if it owes answers or rests
tier_breaker | g | tier state | 1 for the state that the tier's breaker is in: closed, half-open \
or open
tier_breaker_trips_total | c | tier | Times that the breaker of a remote tier opened
tier_queued_bytes | g | tier | Bytes that wait to be moved
tier_in_flight_bytes | g | tier | Bytes under way
tier_loaded_bytes_total | c | tier | Bytes loaded, for whatever reason
tier_refused_total | c | tier | Frames that were damaged or of another kind
tier_dropped_total | c | tier | Pages that were not written, as the tier was too slow or away
tier_unpaid_total | c | tier | Pages that were not written, as loading them could not pay
tier_load_bytes_per_second | g | tier | Measured rate of loads
tier_store_bytes_per_second | g | tier | Measured rate of writes
prefetch_used_bytes_total | c | tier | Bytes brought early from a tier, and used
prefetch_wasted_bytes_total | c | tier | Bytes brought early from a tier, and evicted unused
prefetch_precision | g | tier | Used share of those of either kind, 0 to 1
audited_pages_total | c | tier codec | Restored pages that were recomputed and compared
audit_mismatches_total | c | | Those of them that were wrong
audit_skipped_total | c | | Sampled pages that could not be recomputed
audit_worst | g | | Greatest error of a sound page as a share of its bound
failures_total | c | tier operation | Operations that a tier did not do
failed_items_total | c | tier operation | Items of them
quarantined_total | c | tier | Stored pages that failed their check
steps_total | c | | Forward passes that were planned (not counted unless followed)
step_tokens_total | c | | New tokens of them
step_rows | h | | Rows of one
step_context_tokens | h | | Context tokens of one
warnings_total | c | code | Warnings
""")
)
"""Names, without their prefix `flowkv_`."""


def meaning(name: str) -> str:
    """One line about a metric; "" for one that is not FlowKV's own."""
    known = NAMES.get(name)
    return known.meaning if known else ""


def markdown() -> str:
    """The table of names as the documentation has it."""
    rows = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for name, (kind, labels, said) in NAMES.items():
        shown = ", ".join(f"`{label}`" for label in labels)
        rows.append(f"| `flowkv_{name}` | {kind} | {shown} | {said} |")
    return "\n".join(rows) + "\n"
