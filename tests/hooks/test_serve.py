"""`flowkv serve`, as a client over HTTP sees it, beside `transformers serve`."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig
from transformers.utils.import_utils import is_serve_available

import flowkv
from flowkv import cli
from tests.clock import wait_for
from tests.hooks import test_images as images
from tests.hooks.chat import tiny_chat
from tests.hooks.compare import attached
from tests.inside import CacheControl, errors, serve

pytestmark = pytest.mark.skipif(
    not is_serve_available(), reason="the packages of `transformers serve` are not installed"
)

SYSTEM = "import os\nimport sys\n\n\nclass Stack:\n    def push(self, item):\n" * 6
OPTIONS = ["--dtype", "float32", "--device", "cpu"]
OURS = "from flowkv.cli import main; raise SystemExit(main())"
LOADING = f"""
import flowkv.cache.restore, flowkv.policy.restore
from tests.cache.fakes import Halves
flowkv.cache.restore.make_restore_policy = lambda _: Halves(0.0)
for asked in ("worth", "pays_to_store"):
    setattr(flowkv.policy.restore.LoadGate, asked, lambda *_: True)
{OURS}
"""
"""As `OURS`; pages are stored and loaded, however slow the disk: see `all_is_loaded`."""
THEIRS = "from transformers.cli.transformers import app; app()"


class Server:
    """A server on a port of its own."""

    def __init__(self, program: str, words: list[str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        words = [sys.executable, "-c", program, *words, "--port", str(self.port)]
        with log.open("wb") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=out)

    def wait(self) -> Server:
        end = time.monotonic() + 200
        while time.monotonic() < end and self.process.poll() is None:
            try:
                assert self.send("GET", "/health")[0] == 200
                return self
            except OSError:
                time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-4000:])

    def connect(self, method: str, path: str, body: Any = None, key: str = "") -> Any:
        link = http.client.HTTPConnection("localhost", self.port, timeout=120)
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        link.request(method, path, None if body is None else json.dumps(body), headers)
        return link

    def send(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, str]:
        link = self.connect(method, path, body, key)
        answer = link.getresponse()
        text = answer.read().decode()
        link.close()
        return answer.status, text

    def chat(self, *messages: Any, key: str = "", **more: Any) -> Any:
        body = {"messages": list(messages), "max_tokens": 12, "temperature": 0, **more}
        status, text = self.send("POST", "/v1/chat/completions", body, key)
        assert status == 200, text
        return events(text) if more.get("stream") else json.loads(text)

    def metric(self, name: str) -> float:
        found = re.findall(
            rf"^flowkv_{name}(?:{{[^}}]*}})? (\S+)$", self.send("GET", "/metrics")[1], re.M
        )
        return sum(map(float, found))

    def stop(self, how: int = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait(60)


@contextmanager
def served(program: str, words: list[str], log: Path) -> Iterator[Server]:
    server = Server(program, words, log)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """FlowKV's server, and the plain one."""
    root = tmp_path_factory.mktemp("serve")
    model = str(tiny_chat(root / "tiny"))
    ours = ["serve", "--store", f"{root / 'kv'}:256MiB", "--gpu", "64MiB", model, *OPTIONS]
    with ExitStack() as stack:
        both = [
            stack.enter_context(served(OURS, ours, root / "ours.log")),
            stack.enter_context(served(THEIRS, ["serve", model, *OPTIONS], root / "theirs.log")),
        ]
        yield both[0].wait(), both[1].wait()


def turn(content: str, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def events(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.strip()]


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def streamed(found: list[Any]) -> str:
    deltas = (e["choices"][0]["delta"].get("content") or "" for e in found)
    return "".join(deltas)


def test_answers_are_those_of_the_plain_server(servers: tuple[Server, Server]) -> None:
    ours, plain = servers
    for number in range(3):
        chat = [turn(SYSTEM, "system"), turn(f"# question {number}")]
        wanted, first, again = plain.chat(*chat), ours.chat(*chat), ours.chat(*chat)
        assert content(first) == content(again) == content(wanted)
        usage = {k: v for k, v in again["usage"].items() if k != "prompt_tokens_details"}
        assert usage == {k: v for k, v in wanted["usage"].items() if k in usage}
        assert cached(again) == wanted["usage"]["prompt_tokens"] - 1
        assert cached(first) == 0 if number == 0 else cached(first) >= len(SYSTEM)
        stream = ours.chat(*chat, stream=True)
        assert streamed(stream) == content(wanted)
        assert cached(stream[-1]) == cached(again)
        assert [e for e in stream[:-1] if "usage" in e] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "details"),
    [
        ("/v1/completions", {"prompt": SYSTEM, "max_tokens": 8}, "prompt_tokens_details"),
        ("/v1/responses", {"input": SYSTEM, "max_output_tokens": 8}, "input_tokens_details"),
    ],
)
def test_other_endpoints_say_what_was_cached(
    servers: tuple[Server, Server], path: str, body: Any, details: str, stream: bool
) -> None:
    ours, plain = servers
    body = {**body, "temperature": 0, "stream": stream}
    told = []
    for server in (plain, ours, ours):
        status, text = server.send("POST", path, body, key="others")
        assert status == 200, text
        last = events(text)[-1] if stream else json.loads(text)
        last = last.get("response", last)
        told.append((last.get("output") and last["output"][0]["content"], last["usage"]))
    assert told[0][0] == told[1][0] == told[2][0]
    usage = told[2][1]
    total = usage.get("prompt_tokens") or usage["input_tokens"]
    assert usage[details]["cached_tokens"] == total - 1


def test_keys_share_nothing(servers: tuple[Server, Server]) -> None:
    ours, _ = servers
    chat = [turn("secret " * 40), turn("answer", "assistant"), turn("and?")]
    assert [cached(ours.chat(*chat, key=key)) > 0 for key in ("a", "b", "", "a", "b", "")] == [
        *(False, False, False),
        *(True, True, True),
    ]


def test_credentials_of_any_form_are_tenants(servers: tuple[Server, Server]) -> None:
    ours, _ = servers
    body = {"messages": [turn("private " * 40)], "max_tokens": 2, "temperature": 0}

    def reused(*pairs: tuple[str, str]) -> bool:
        link = http.client.HTTPConnection("localhost", ours.port, timeout=120)
        link.putrequest("POST", "/v1/chat/completions")
        text = json.dumps(body).encode()
        length = ("content-length", str(len(text)))
        for pair in (("content-type", "application/json"), length, *pairs):
            link.putheader(*pair)
        link.endheaders(text)
        found = cached(json.loads(link.getresponse().read())) > 0
        link.close()
        return found

    asks = "authorization"
    forms: list[list[tuple[str, str]]] = [
        *([], [(asks, "Bearer one")], [(asks, "Basic one")], [(asks, "two")], [(asks, "Bearerx")]),
        *([("x-api-key", "three")], [("api-key", "four")], [(asks, "Bearer\tfive")]),
        [(asks, "Bearer one"), (asks, "Bearer six")],
        [(asks, "Bearer one"), ("x-api-key", "seven")],
    ]
    assert [reused(*form) for form in forms * 2] == [False] * len(forms) + [True] * len(forms)
    for same in ([(asks, "bearer  one ")], [("x-api-key", "one")], [(asks, "Bearer")]):
        assert reused(*same)


def test_requests_run_beside_each_other(servers: tuple[Server, Server]) -> None:
    ours, plain = servers
    chats = [[turn(SYSTEM, "system"), turn(f"def number_{n}():")] for n in range(8)]
    wanted = [content(plain.chat(*chat, max_tokens=40)) for chat in chats]
    steps = ours.metric("engine_steps_total")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda chat: content(ours.chat(*chat, max_tokens=40)), chats))
    assert found == wanted
    assert ours.metric("engine_steps_total") - steps < 8 * 40


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(servers: tuple[Server, Server], stream: bool) -> None:
    ours, _ = servers
    gone = ours.metric("finished_total")
    body = {"messages": [turn("go on")], "max_tokens": 3000, "temperature": 0, "stream": stream}
    link = ours.connect("POST", "/v1/chat/completions", body)
    wait_for(lambda: ours.metric("open_sequences") == 1)
    if stream:
        assert link.getresponse().read(20)
    link.sock.close() if link.sock else link.close()
    link.close()
    wait_for(lambda: ours.metric("open_sequences") == 0)
    wait_for(lambda: ours.metric("finished_total") == gone + 1)
    assert 'finished_total{reason="cancelled"}' in ours.send("GET", "/metrics")[1]


def test_draws_and_stops_are_those_of_the_plain_server(servers: tuple[Server, Server]) -> None:
    ours, plain = servers
    chat = [turn(SYSTEM, "system"), turn("# drawn")]
    for more in (
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1.5, "top_p": 0.8, "seed": 6, "frequency_penalty": 0.1},
        {"temperature": 1.5, "seed": -1},
        {"temperature": 1e-8, "seed": 7},  # as some clients ask for the likeliest token
        {"stop": ["e"]},
        {"logit_bias": {str(ord("x")): 50.0}},
    ):
        config = {"generation_config": json.dumps({"do_sample": True, "max_new_tokens": 12})}
        more |= config if "seed" in more else {}
        assert content(ours.chat(*chat, **more)) == content(plain.chat(*chat, **more))


def test_end_tokens_stay_away_as_benchmarks_ask(servers: tuple[Server, Server]) -> None:
    ours, _ = servers
    ends = json.dumps({"eos_token_id": ord("e"), "max_new_tokens": 12, "do_sample": False})
    chat = [turn(SYSTEM, "system"), turn("# ends"), turn("def push(s", "assistant")]
    for more, wanted in (
        ({}, range(1, 9)),
        ({"ignore_eos": True}, [12]),
        ({"min_tokens": 9}, range(9, 13)),
    ):
        answer = ours.chat(*chat, generation_config=ends, max_tokens=12, **more)
        assert answer["usage"]["completion_tokens"] in wanted, (more, answer)
        assert "e" not in content(answer)[: min(wanted)][:-1]


def test_a_least_number_of_tokens_is_a_number(servers: tuple[Server, Server]) -> None:
    body = {"messages": [turn("# least")], "min_tokens": "x"}
    status, text = servers[0].send("POST", "/v1/chat/completions", body)
    assert (status, "min_tokens='x'" in text) == (400, True)


def test_options_that_the_engine_lacks_go_through_generate(servers: tuple[Server, Server]) -> None:
    ours, plain = servers
    beams = json.dumps({"num_beams": 2, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0})
    chat = [turn(SYSTEM, "system"), turn("# beams")]
    wanted = content(plain.chat(*chat, generation_config=beams))
    steps = ours.metric("engine_steps_total")
    answers = [ours.chat(*chat, generation_config=beams, key="beams") for _ in range(2)]
    assert [content(answer) for answer in answers] == [wanted, wanted]
    assert cached(answers[0]) == 0 < cached(answers[1])
    assert ours.metric("engine_steps_total") == steps
    wait_for(lambda: ours.metric("open_sequences") == 0)


def test_a_refused_request_holds_no_pages(servers: tuple[Server, Server]) -> None:
    ours, _ = servers
    for number in range(4):
        body = {"messages": [turn(f"refused {number}")], "stop": ""}
        assert ours.send("POST", "/v1/chat/completions", body)[0] == 400
        assert ours.metric("open_sequences") == 0


def test_breakpoints_are_counted_in_usage_and_metrics(servers: tuple[Server, Server]) -> None:
    ours, plain = servers
    hint = {"type": "ephemeral", "ttl": "1h"}
    parts = [{"type": "text", "text": SYSTEM, "cache_control": hint}]
    chat = [turn(parts, "system"), turn("# hinted")]  # type: ignore[arg-type]
    wanted = plain.chat(turn(SYSTEM, "system"), turn("# hinted"))
    first, again = (ours.chat(*chat, key="hints")["usage"] for _ in range(2))
    created = first["cache_creation_input_tokens"]
    assert 0 < len(SYSTEM) - created < 128  # whole pages before the breakpoint
    assert first["cache_read_input_tokens"] == again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] >= len(SYSTEM)
    assert first["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
    assert ours.metric("hinted_created_tokens_total") == created
    assert ours.metric("hinted_read_tokens_total") == again["cache_read_input_tokens"]
    other = {"type": "ephemeral", "ttl": "1d"}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    body = {"tools": [{**tool, "cache_control": other}], "cache_control": hint}
    usage = ours.chat(turn("with a tool " * 30), key="hints", **body)["usage"]
    assert (
        usage["prompt_tokens"]
        == (plain.chat(turn("with a tool " * 30), tools=[tool])["usage"]["prompt_tokens"])
    )
    assert usage["cache_creation_input_tokens"] >= 256
    assert ours.metric("hinted_dropped_total") == 1


def test_a_template_may_have_variables_of_any_name(servers: tuple[Server, Server]) -> None:
    names = dict.fromkeys(("tokenizer", "ids", "prepare"), 1)
    hint = {"type": "ephemeral"}
    answer = servers[0].chat(turn("named " * 30), chat_template_kwargs=names, cache_control=hint)
    assert "cache_read_input_tokens" in answer["usage"]


@pytest.mark.parametrize("path", ["/reset", "/load_model", "/v1/systemone", "/docs"])
def test_routes_that_mix_tenants_are_refused(servers: tuple[Server, Server], path: str) -> None:
    status, text = servers[0].send("POST", path, {"model": "other"})
    assert status == 404
    assert "keeps tenants apart" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        *(("", "required"), ("{", "decode"), ("[]", "dictionary"), ("[" * 200_000, "parsing")),
        *(("{}", "'messages'"), ('{"messages": 3}', "TypeError"), ('{"cache_control": 1}', "")),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "TextEncodeInput"),
        ('{"messages": [{"role": "user", "content": "x"}], "seed": "x"}', "ValueError"),
        ('{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": "y"}}', "'y'"),
        ('{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"256": 1}}', "below 256"),
        ('{"messages": [{"role": "user", "content": "x"}], "model": "y"}', "pinned"),
        (f'{{"prompt": "x", "generation_config": "{"[" * 90_000}"}}', "recursion"),
        ('{"messages": [{"role": "user", "content": "x"}], "odd": 1}', "'odd'"),
    ],
)
def test_odd_bodies_are_refused_with_the_cause(
    servers: tuple[Server, Server], body: str, cause: str
) -> None:
    link = http.client.HTTPConnection("localhost", servers[0].port, timeout=60)
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    link.request("POST", path, body, {"content-type": "application/json"})
    answer = link.getresponse()
    error = json.loads(answer.read())["error"]
    link.close()
    assert (answer.status in (400, 422), error["type"]) == (True, "invalid_request_error")
    assert cause in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("chat/completions", {"messages": [turn("x")]}, "max_tokens"),
        ("chat/completions", {"messages": [turn("x")]}, "max_completion_tokens"),
        ("completions", {"prompt": "x"}, "max_tokens"),
        ("responses", {"input": "x"}, "max_output_tokens"),
    ],
)
def test_no_tokens_are_no_answer(
    servers: tuple[Server, Server], path: str, body: Any, name: str, stream: bool
) -> None:
    for most in (-1, 0):
        asked = {**body, name: most, "stream": stream}
        status, text = servers[0].send("POST", f"/v1/{path}", asked)
        message = json.loads(text)["error"]["message"]
        assert (status, message) == (400, f"max_tokens={most}. Use a whole number, at least 1.")


def test_answers_end_at_the_last_position_of_the_model(servers: tuple[Server, Server]) -> None:
    ours, _ = servers
    steps = ours.metric("engine_steps_total")
    for stream in (False, True):
        answer = ours.chat(turn("x" * 4060), max_tokens=10**30, stream=stream)
        last = answer[-1] if stream else answer
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["usage"]["total_tokens"] == 4096
    assert ours.metric("engine_steps_total") >= steps + 36
    full = {"prompt": "x" * 4096, "max_tokens": 5, "temperature": 0}
    status, text = ours.send("POST", "/v1/completions", full)
    assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 1), text


def test_a_stream_of_what_generate_refuses_does_not_begin(servers: tuple[Server, Server]) -> None:
    beams = json.dumps({"num_beams": 2, "max_new_tokens": 9})
    body = {"messages": [turn("x")], "generation_config": beams, "stream": True}
    status, text = servers[0].send("POST", "/v1/chat/completions", body)
    assert (status, "streamer" in json.loads(text)["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"bad_words_ids": [[1, 256]]}, "bad_words_ids has token 256"),
        ({"sequence_bias": [[[10**30], 1.0]]}, "logit_bias or sequence_bias has token 1000"),
        ({"suppress_tokens": [256]}, "suppress_tokens has token 256"),
        ({"begin_suppress_tokens": [-2]}, "begin_suppress_tokens has token -2"),
        ({"eos_token_id": [3, 256]}, "eos_token_id has token 256"),
        ({"pad_token_id": -1, "num_beams": 2}, "pad_token_id has token -1"),
        ({"max_time": "x"}, "the request is malformed (TypeError"),
        ({"is_assistant": True}, "the request is malformed (TypeError"),
        ({"stop_strings": ["x" * 500, "y" * 13]}, "stop strings of over 512 characters"),
        ({"forced_bos_token_id": 256}, "forced_bos_token_id has token 256"),
        ({"forced_eos_token_id": [256]}, "forced_eos_token_id has token 256"),
        ({"sequence_bias": [[[1], 1e39]]}, "a bias is out of range"),
        ({"temperature": 1e-40, "do_sample": True}, "temperature=1e-40"),
        ({"num_beams": -2}, "-2 beams or sequences"),
        ({"num_return_sequences": 10**9, "do_sample": True}, "1000000000 beams or sequences"),
        ({"exponential_decay_length_penalty": [1, 2.0]}, "a length penalty without an end token"),
    ],
)
def test_options_out_of_range_are_refused_before_the_first_token(
    servers: tuple[Server, Server], options: dict[str, Any], told: str, stream: bool
) -> None:
    config = json.dumps({"max_new_tokens": 4, **options})
    body = {"messages": [turn("x")], "generation_config": config, "stream": stream}
    status, text = servers[0].send("POST", "/v1/chat/completions", body)
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(told)


def test_options_that_only_differ_from_tokens_are_served(servers: tuple[Server, Server]) -> None:
    ours, plain = servers
    options = {"eos_token_id": -1, "sequence_bias": [[[ord("z")], 100.0]], "max_new_tokens": 5}
    options |= {"bad_words_ids": [[1]], "suppress_tokens": [0, 255, -1], "pad_token_id": -1}
    config = json.dumps({**options, "begin_suppress_tokens": [-1]})
    answers = [content(each.chat(turn("x"), generation_config=config)) for each in (ours, plain)]
    assert answers == ["z" * 12] * 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x", "suffix": 3}),
        ("completions", {"prompt": "x" * 4097}),
        *(
            ("chat/completions", {"chat_template_kwargs": odd})
            for odd in (
                {"return_assistant_tokens_mask": True},
                {"chat_template": "{% for i in range(9) %}x{% endfor %}"},
                {"padding": "max_length", "max_length": 10},
            )
        ),
    ],
)
def test_what_no_answer_can_have_is_refused_before_it(
    servers: tuple[Server, Server], path: str, body: Any
) -> None:
    steps = servers[0].metric("engine_steps_total")
    body = body if "prompt" in body else {"messages": [turn("x")], **body}
    status, text = servers[0].send("POST", f"/v1/{path}", body)
    assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error")
    assert servers[0].metric("engine_steps_total") == steps


def test_beams_may_all_be_returned(servers: tuple[Server, Server]) -> None:
    ours, plain = servers
    options = {"num_beams": 17, "num_return_sequences": 17, "max_new_tokens": 2, "pad_token_id": 0}
    config = json.dumps({**options, "do_sample": False})
    answers = [content(each.chat(turn("x"), generation_config=config)) for each in (ours, plain)]
    assert answers[0] == answers[1]


def test_a_call_is_called_off_while_its_answer_ends() -> None:
    class Call(serve.HttpCall):
        answers: Any = iter([Mock(), None])
        answer = property(lambda call: next(call.answers), lambda *_: None)  # type: ignore[assignment]

    Call().call_off()


def test_cached_tokens_are_those_of_one_prompt(servers: tuple[Server, Server]) -> None:
    config = json.dumps({"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 3})
    drawn = {"generation_config": config, "temperature": 0.9}
    answers = [servers[0].chat(turn("two " * 40), **drawn) for _ in range(2)]
    total = answers[1]["usage"]["prompt_tokens"]
    assert 128 <= cached(answers[1]) < total


def test_bodies_have_a_bound(servers: tuple[Server, Server]) -> None:
    for most, status in (((32 << 20) - 100, 400), (33 << 20, 413)):
        got, text = servers[0].send("POST", "/v1/completions", {"odd": "x" * most})
        assert (got // 100, got == 413) == (4, status == 413)
        error = json.loads(text)["error"]
        assert error["type"] == "invalid_request_error"
        assert ("32 MiB" in error["message"]) == (status == 413)


def test_a_bias_may_be_whole(servers: tuple[Server, Server]) -> None:
    assert content(servers[0].chat(turn("x"), logit_bias={str(ord("z")): 100})) == "z" * 12


def test_empty_options_are_none(servers: tuple[Server, Server]) -> None:
    ours, plain = servers
    wanted = content(plain.chat(turn("x")))
    assert content(ours.chat(turn("x"), logit_bias={}, stop=[])) == wanted


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "default"}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "dynamic", "factor": 2.0}, 2048),
    ],
)
def test_scaled_positions_are_positions(rope: dict[str, Any], most: int) -> None:
    named = {"rope_parameters": {"rope_theta": 1e4, **rope}}
    assert serve._positions(LlamaConfig(max_position_embeddings=1024, **named)) == most


def test_a_stream_begins_whatever_generate_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    serve._CALL.set(call := serve.HttpCall())
    monkeypatch.setattr(serve._Generation, "_generate", lambda *_, **__: None)
    serve._Generation((None, threading.Lock(), CacheControl), None).generate()
    assert call.begun.done()


def test_the_served_model_is_listed(servers: tuple[Server, Server]) -> None:
    status, text = servers[0].send("GET", "/v1/models")
    (model,) = json.loads(text)["data"]
    assert (status, model["object"]) == (200, "model")
    assert servers[0].chat(turn("x"), model=model["id"])["model"].startswith(model["id"])


def test_a_client_that_leaves_within_its_body_is_no_error(servers: tuple[Server, Server]) -> None:
    ours, _ = servers
    before = ours.log.read_text().count("Traceback")
    with socket.create_connection(("localhost", ours.port)) as link:
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        link.shutdown(socket.SHUT_WR)
        assert link.recv(100) == b""
    assert ours.log.read_text().count("Traceback") == before


def test_a_restart_restores_from_the_store(tmp_path: Path) -> None:
    model = str(tiny_chat(tmp_path / "tiny"))
    words = ["serve", "--store", str(tmp_path / "kv"), "--gpu", "64MiB", model, *OPTIONS]
    chat, answers = [turn(SYSTEM, "system"), turn("# later")], []
    for how in (signal.SIGTERM, signal.SIGINT):
        with served(LOADING, words, tmp_path / "log") as server:
            answers.append(server.wait().chat(*chat, key="kept"))
            server.stop(how)
            assert server.process.returncode in (130, 143, -how)
            assert "Traceback" not in server.log.read_text()
    assert content(answers[0]) == content(answers[1])
    assert (cached(answers[0]), cached(answers[1]) > len(SYSTEM)) == (0, True)


def test_a_stop_does_not_wait_without_end_and_errors_keep_their_headers(tmp_path: Path) -> None:
    short = f"import flowkv.hooks.huggingface.serve as s\ns._GRACE = 1\n{OURS}"
    model = str(tiny_chat(tmp_path / "tiny"))
    words = ["serve", "--gpu", "64MiB", model, *OPTIONS, "--enable-cors"]
    with served(short, words, tmp_path / "log") as server:
        server.wait()
        for path, status in (("/odd", 404), ("/v1/completions", 400), ("/metrics", 200)):
            link = http.client.HTTPConnection("localhost", server.port, timeout=60)
            link.request("GET" if status == 200 else "POST", path, "[", {"origin": "http://a"})
            answer = link.getresponse()
            assert (answer.status in (status, 422), bool(answer.read())) == (True, True)
            assert answer.headers["access-control-allow-origin"] in ("*", "http://a")
            link.close()
        body = {"messages": [turn("x")], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        link = server.connect("POST", "/v1/chat/completions", body)
        assert link.getresponse().read(9)
        server.stop()
        link.close()
        assert server.process.returncode in (143, -signal.SIGTERM)
        assert "timeout graceful shutdown exceeded" in server.log.read_text()


def test_a_failed_engine_is_reported_with_its_cause(tmp_path: Path) -> None:
    lost = "import flowkv.engine.engine as e\ndef turn(self): raise RuntimeError('device lost')\n"
    words = ["serve", "--gpu", "64MiB", str(tiny_chat(tmp_path / "tiny")), *OPTIONS]
    with served(f"{lost}e.Loop.turn = turn\n{OURS}", words, tmp_path / "log") as server:
        body = {"messages": [turn("hello")]}
        server.wait()
        for _ in range(2):
            status, text = server.send("POST", "/v1/chat/completions", body)
            assert (status, "device lost" in json.loads(text)["error"]["message"]) == (503, True)
        assert server.send("GET", "/health")[0] == 503


def test_images_are_answered_without_the_engine_and_within_their_tenant() -> None:
    model, twin = images.made("qwen2_vl"), images.made("qwen2_vl")
    config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    before, behind = images.text(30, 1), images.text(20, 2)
    talks = [images.asked(before, picture, behind) for picture in (images.CAT, images.DOG)]
    talks.append(images.asked(torch.cat([before, behind], 1)))
    wanted = [twin.generate(**talk, generation_config=config) for talk in talks]
    assert not torch.equal(wanted[0], wanted[1])
    with attached(model) as kv, flowkv.Engine(model, kv) as engine:
        parts, reused = (engine, threading.Lock(), lambda *_: CacheControl()), []
        for key in ("a", "a", "b"):
            for talk, want in zip(talks, wanted, strict=True):
                call = serve.HttpCall(key)
                serve._CALL.set(call)
                given = {**talk, "generation_config": config, "tokenizer": None}
                generation = serve._Generation(parts, model)
                assert torch.equal(generation.generate(**given), want)
                reused.append(call.reused > 0)
    # The prompts of one tenant have their first page of text in common.
    assert reused == [False, *[True] * 5, False, *[True] * 2]


def test_a_client_that_leaves_ends_what_the_engine_lacks() -> None:
    model = images.made("qwen2_vl")
    config = GenerationConfig(max_new_tokens=40, do_sample=False, pad_token_id=0, num_beams=2)
    talk = images.asked(images.text(30, 1))
    with attached(model) as kv, flowkv.Engine(model, kv) as engine:
        serve._CALL.set(call := serve.HttpCall())
        generation = serve._Generation((engine, threading.Lock(), lambda *_: CacheControl()), model)
        call.call_off()
        made = generation.generate(**talk, generation_config=config, tokenizer=None)
        assert made.shape[1] <= talk["input_ids"].shape[1] + 1
        assert kv.metrics.prometheus().count("flowkv_open_sequences 0") == 1


def through(app: Any) -> list[Any]:
    """What the middleware sends for an application."""
    sent = list[Any]()

    async def receive() -> Any:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(serve._Middleware(app, None)(scope, receive, send))  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.CapacityError("no room", "Wait"), 503),
        (errors.ConfigError("odd", "Mend"), 400),
        *((errors.UnsupportedModelError("odd", "Mend"), 400), (KeyError("role"), 400)),
        *((ValueError("half \ud800"), 400), (RuntimeError("device lost"), 500)),
    ],
)
def test_refusals_name_cause_and_remedy(error: Exception, status: int) -> None:
    calls = list[Any]()

    async def app(*_: Any) -> None:
        calls.append(serve._CALL.get())
        raise error

    start, body = through(app)
    found = json.loads(body["body"])["error"]
    assert (start["status"], str(error) in found["message"]) == (status, True)
    assert found["type"] == ("invalid_request_error" if status == 400 else "server_error")
    assert found["message"].count(".") == 2
    assert calls[0].gone


def test_the_error_of_a_stream_is_json_whatever_its_text() -> None:
    told = 'odd "quotes", \\ and\nlines'

    async def app(_: Any, __: Any, send: Any) -> None:
        serve._CALL.get().begin()
        head = {"headers": [(b"content-type", b"text/event-stream")], "status": 200}
        await send({"type": "http.response.start", **head})
        text = f'data: {{"choices": []}}\n\ndata: {{"error": "{told}"}}\n\n'
        await send({"type": "http.response.body", "body": text.encode()})

    first, last = events(through(app)[1]["body"].decode())
    assert (first, last["error"]["message"]) == ({"choices": []}, told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{}/none", "--port", "0"], "the Hugging Face hub has no model"),
        (["{}/none", "--port", "x"], "'x' is not a valid integer"),
        (["{}/none", "--prot", "1"], "--prot"),
    ],
)
def test_what_cannot_be_served_is_said(
    tmp_path: Path, words: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *(word.format(tmp_path) for word in words)]) == 2
    error = capfd.readouterr().err
    assert (told in error, "unexpected" in error) == (True, False)


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [
        *(("localhost", "", "in use"), ("localhost", "99999", "65535")),
        *(("a.invalid", "0", "--host"), ("a..b", "0", "--host")),
    ],
)
def test_a_port_that_cannot_be_used_is_said_before_the_model_is_loaded(
    host: str, port: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = port or str(taken.getsockname()[1])
        assert cli.main(["serve", str(tmp_path / "none"), "--host", host, "--port", port]) == 2
    error = capfd.readouterr().err
    assert (told in error, "hub" in error, "Choose another" in error) == (True, False, True)


@pytest.mark.parametrize("option", ["--continuous-batching", "--compile"])
def test_other_caches_are_refused(
    tmp_path: Path, option: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_chat(tmp_path / "tiny"))
    assert cli.main(["serve", model, option]) == 2
    assert f"{option} has a cache of its own" in capfd.readouterr().err


def test_another_shape_of_the_server_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve.entry.Serve, "__init__", lambda self: None)
    assert cli.main(["serve", "nowhere"]) == 2
    assert "has another shape" in capfd.readouterr().err
    assert os.environ.get("FLOWKV_CONFIG") is None
