"""Breakpoints of `cache_control` find their place in the tokens of any chat template."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import flowkv
from flowkv.data import tiny_path
from tests.hooks.chat import LATEST, PLAIN, STRICT, byte_tokenizer
from tests.hooks.compare import PAST
from tests.inside import cache_control, without_hints

SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
HINTS = [None, SHORT, {"type": "ephemeral", "ttl": "5m"}, LONG]
TIMES = {"5m": 300.0, "1h": 3600.0}
TOKENIZERS = {template: byte_tokenizer(template) for template in (PLAIN, STRICT, LATEST)}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "d", "parameters": {}},
}


def found_in(
    messages: list[Any], template: str = PLAIN, **more: Any
) -> tuple[Any, str, list[tuple[str, float]]]:
    """Return the hints, the text, and the text before the end of each span with its seconds."""
    tokenizer = TOKENIZERS[template]
    plain = {**more, "tools": without_hints(more.get("tools") or []) or None}
    whole = tokenizer.apply_chat_template(without_hints(messages), tokenize=False, **plain)
    ids = list(whole.encode())
    hints = cache_control(messages, tokenizer, ids, **more)
    spans = [(bytes(ids[: span.stop]).decode(), span.for_s) for span in hints.retain]
    assert [span.start for span in hints.retain] == [0, *(s.stop for s in hints.retain)][:-1]
    assert hints.tokens == max([0, *(span.stop or 0 for span in hints.retain)])
    return hints, whole, spans


@given(
    st.sampled_from([PLAIN, STRICT]),
    st.lists(st.tuples(st.integers(0, 9999), st.sampled_from(HINTS)), min_size=1, max_size=9),
)
def test_a_span_ends_behind_the_text_of_its_message(
    template: str, turns: list[tuple[int, Any]]
) -> None:
    roles = ["system", *(["user", "assistant"] * 5)][: len(turns) + 1]
    turns = [(0, None), *turns]
    messages = [
        {"role": role, "content": f"text {at} of {number}é.", "cache_control": hint}
        for at, (role, (number, hint)) in enumerate(zip(roles, turns, strict=True))
    ]
    hints, _, spans = found_in(messages, template, add_generation_prompt=True)
    marked = [(at, hint) for at, (_, hint) in enumerate(turns) if hint]
    kept = marked[-4:]
    assert hints.dropped == len(marked) - len(kept)
    assert len(spans) == len(kept)
    for number, ((text, seconds), (at, _)) in enumerate(zip(spans, kept, strict=True)):
        assert text.endswith(messages[at]["content"])
        assert seconds == max(TIMES[hint.get("ttl", "5m")] for _, hint in kept[number:])


@pytest.mark.parametrize("within", [False, True])
def test_parts_and_tools_are_places_too(within: bool) -> None:
    parts = [
        {"type": "text", "text": "one", "cache_control": LONG},
        {"type": "text", "text": "two"},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "three"}]

    def joined(chat: list[Any]) -> list[Any]:
        return [
            {**m, "content": " ".join(p["text"] for p in m["content"])}
            if isinstance(m["content"], list)
            else m
            for m in chat
        ]

    tokenizer = TOKENIZERS[PLAIN]
    inside = {**TOOL, "function": {**TOOL["function"], "cache_control": SHORT}}
    tools = [inside if within else {**TOOL, "cache_control": SHORT}, TOOL]
    whole = tokenizer.apply_chat_template(
        joined(without_hints(messages)), tools=without_hints(tools), tokenize=False
    )
    assert "cache_control" not in whole
    hints = cache_control(messages, tokenizer, list(whole.encode()), joined, tools=tools)
    ends = [whole[: span.stop] for span in hints.retain]
    assert hints.dropped == 0
    assert ends[0].count("tool {") == 2 and ends[0].count("look") == 1  # up to the second tool
    assert ends[1].endswith("user: one")
    assert [span.for_s for span in hints.retain] == [3600.0, 3600.0]


@pytest.mark.parametrize(
    "hint", [{"type": "lasting"}, {"type": "ephemeral", "ttl": "2h"}, "ephemeral", {"ttl": "5m"}]
)
def test_a_breakpoint_of_an_unknown_kind_is_dropped_and_counted(hint: Any) -> None:
    hints, _, spans = found_in([{"role": "user", "content": "a", "cache_control": hint}])
    assert (hints.dropped, spans) == (1, [])


def test_a_breakpoint_without_text_in_the_prompt_is_dropped_and_counted() -> None:
    answer = {"role": "assistant", "content": "thought", "cache_control": SHORT}
    messages = [{"role": "user", "content": "a"}, answer, {"role": "user", "content": "b"}]
    assert found_in(messages, LATEST)[0] == ((), 1, 0)
    call = {"role": "assistant", "content": None, "cache_control": SHORT}
    kept = {"role": "user", "content": "b", "cache_control": SHORT}
    hints, whole, spans = found_in([{"role": "user", "content": "a"}, call, kept], LATEST)
    assert hints.dropped == 1
    assert spans == [(whole, 300.0)]


def test_a_prompt_of_other_tokens_drops_all() -> None:
    messages = [{"role": "user", "content": "a", "cache_control": SHORT}]
    assert cache_control(messages, TOKENIZERS[PLAIN], [1, 2, 3]) == ((), 1, 0)


def test_a_retained_prefix_outlives_newer_pages() -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
    tokenizer = TOKENIZERS[PLAIN]
    chats = [[{"role": "system", "content": f"{n} " + "import os\n" * 25}] for n in range(4)]

    def ask(kv: flowkv.KV, chat: list[Any], hinted: bool) -> int:
        told = [{**chat[0], "cache_control": SHORT}] if hinted else chat
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = torch.tensor([list(text.encode())])
        hints = cache_control(told, tokenizer, ids[0].tolist())
        cache = kv.cache(input_ids=ids, retain=hints.retain)
        model.generate(ids, **{PAST: cache}, max_new_tokens=1, pad_token_id=0)
        return int(cache.reused)

    reused = []
    for hinted in (False, True):
        with flowkv.attach(model, gpu="3MiB", page_size=16, policy="lru") as kv:
            ask(kv, chats[0], hinted)
            for chat in chats[1:]:
                ask(kv, chat, False)
            reused.append(ask(kv, chats[0], False))
            kv.detach()
    assert reused[0] < 100 < reused[1]
