"""`transformers serve` with an engine in place of its calls of `generate`.

Its command, server, handlers and streams stay. A manager of generations, which handlers call,
submits tokens to the engine; a middleware reads tenant and hints of an HTTP request, and writes
reused tokens into the `usage` of the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
import transformers
from transformers.cli import serve as entry
from transformers.cli.serving import server, utils
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import app as commands
from transformers.utils.import_utils import is_serve_available

from flowkv.cache.kv import KV
from flowkv.core import errors
from flowkv.hooks.huggingface.cache_control import CacheControl, cache_control, without_hints
from flowkv.hooks.huggingface.inputs import Names
from flowkv.hooks.huggingface.load import explanation
from flowkv.observe.events import Hinted

_SERVED = "/v1/chat/completions /v1/completions /v1/responses /v1/models /health".split()
"""Routes that keep tenants apart. Others run the attached model for no tenant, or replace it."""

_FIELDS = "cache_control ignore_eos min_tokens".split()
"""Fields of a request, of other servers, that are read here: transformers refuses them."""

_CREDENTIALS = "authorization x-api-key api-key".split()
"""Headers with an API key, of clients of several vendors."""

_TOKENS = (
    "bad_words_ids sequence_bias suppress_tokens begin_suppress_tokens eos_token_id pad_token_id "
    "forced_bos_token_id forced_eos_token_id"
).split()
"""Options of `generate` that are tokens, or hold some."""

_OPTIONAL = "pad_token_id eos_token_id suppress_tokens begin_suppress_tokens".split()
"""Of them, options with -1 for none; the first one, only where no rows are padded."""

_BARRED = {"chat_template", "padding", "tokenizer_kwargs", "processor_kwargs"}
"""Arguments of a chat template with which a request could block the server, or fill its memory."""

_LONGEST = 32 << 20
"""Bytes of the longest body."""

_GRACE = 25
"""Seconds that answers have to end after SIGTERM: Kubernetes kills a process after 30."""

_FAILED = b'data: {"error": "'
"""Beginning of the last event of a stream that failed."""


class HttpCall:
    """One HTTP request.

    Attributes:
        tenant: Name of its tenant; None without an API key.
        body: Its JSON body, hints included.
        reused: Tokens of the prompt that were not computed.
        hints: Breakpoints of the prompt.
        hinted: What its usage says of them.
        gone: The client is gone.
        answer: The engine's answer, if it has the request.
        begun: Done once the request is accepted, or refused with an error.
    """

    def __init__(self, tenant: str | None = None, body: dict[str, Any] | None = None) -> None:
        self.tenant, self.body = tenant, body or {}
        self.reused, self.gone, self.hints = 0, False, CacheControl()
        self.hinted: dict[str, int] = {}
        self.answer: Any = None
        self.begun = Future[None]()
        self.begun.set_running_or_notify_cancel()  # a cancelled wait for it does not cancel it

    def begin(self, error: BaseException | None = None) -> None:
        """Settle `begun`, if it is not yet."""
        if not self.begun.done():
            self.begun.set_exception(error) if error else self.begun.set_result(None)

    def call_off(self) -> None:
        """Cancel the request: its client is gone."""
        self.gone = True
        if (answer := self.answer) is not None:  # another thread may take it away
            answer.cancel()

    def record_reuse(self, kv: KV, reused: int) -> None:
        """Record reused tokens, and count the hints."""
        self.reused, hinted = reused, self.hints.tokens
        if self.hints.retain or self.hints.dropped:
            pages = 0 if kv.private else hinted - hinted % kv.page_size
            made, read = max(0, pages - reused), min(reused, hinted)
            kv.bus.emit(Hinted(read_tokens=read, created_tokens=made, dropped=self.hints.dropped))
            self.hinted = {"cache_read_input_tokens": read, "cache_creation_input_tokens": made}

    def fill_usage(self, found: Any) -> None:
        """Write reused tokens into the usage of an answer or event, if it has one."""
        found = found.get("response") or found if isinstance(found, dict) else {}
        if not isinstance(usage := found.get("usage"), dict):
            return
        name = "prompt_tokens_details" if "prompt_tokens" in usage else "input_tokens_details"
        usage |= {name: {**(usage.get(name) or {}), "cached_tokens": self.reused}, **self.hinted}


_Parts = tuple[Any, threading.Lock, Callable[..., CacheControl]]
"""The engine, the lock of calls of the model's own `generate`, and the reader of breakpoints."""

_CALL = ContextVar("flowkv_call", default=HttpCall())  # noqa: B039 - replaced for each request


class _Generation:
    """A model as the manager calls it for one request: `generate` goes to the engine."""

    def __init__(self, parts: _Parts, model: Any) -> None:
        self._parts, self._model, self._call = parts, model, _CALL.get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **given: Any) -> torch.Tensor:
        """Return `[1, S]`, prompt and new tokens; arguments are those of the model's `generate`."""
        try:
            return self._generate(**given)
        except BaseException as error:
            self._call.begin(error)
            raise
        finally:
            self._call.begin()  # a stream waits for it, whatever `generate` calls

    def _generate(self, streamer: Any = None, **given: Any) -> torch.Tensor:
        call, (engine, _, read) = self._call, self._parts
        options = {name: given.pop(name) for name in ("generation_config", "tokenizer")}
        ids, config, seed = given["input_ids"], options["generation_config"], call.body.get("seed")
        limit, text = config.max_new_tokens, self._model.config.get_text_config(decoder=True)
        if limit is not None and limit < 1:
            raise errors.ConfigError(f"max_tokens={limit}", "Use a whole number, at least 1")
        room = _positions(text) - ids.shape[1]
        if limit and room >= 0:  # behind the last position one token can still be drawn
            config.max_new_tokens = limit = min(limit, room or 1)
        if 0 < (most := _positions(text, "linear")) < ids.shape[1]:
            told = f"the prompt has {ids.shape[1]} tokens, the model {most} positions"
            raise errors.ConfigError(told, "Shorten it")
        if least := limit if call.body.get("ignore_eos") else call.body.get("min_tokens"):
            if not isinstance(least, int):
                raise errors.ConfigError(f"min_tokens={least!r}", "Use a whole number")
            config.min_new_tokens = least
        config.stop_strings = None if config.stop_strings == [] else config.stop_strings
        if not isinstance(call.body.get("suffix"), str | None):
            raise errors.ConfigError("suffix is no text", "Pass a string")
        _check(config, self._model.generation_config, text.vocab_size, engine.kv.config.max_rows)
        if isinstance(seed, int):
            seed %= 1 << 64  # as torch does
        call.hints = read(call.body, options["tokenizer"], ids[0].tolist())
        care: dict[str, Any] = {"tenant": call.tenant, "retain": call.hints.retain}
        try:
            if given.keys() - {"input_ids", "attention_mask"}:
                raise errors.UnsupportedModelError("the prompt is more than tokens", "Use generate")
            more = {"options": options, "seed": seed, **care}
            answer = engine.submit(ids[0], max_new_tokens=limit, **more)
        except (errors.CapacityError, errors.ConfigError, errors.UnsupportedModelError):
            return self._alone(given, {**options, "streamer": streamer}, care)
        call.answer = answer
        try:
            if call.gone:
                answer.cancel()
            if streamer is not None:
                streamer.put(ids)
                for token in answer:
                    call.begin()  # some options fail at the first token
                    streamer.put(torch.tensor([token]))
            done = answer.result()
            call.record_reuse(engine.kv, done.reused_tokens)
            if streamer is not None:
                streamer.end()
        except (LookupError, TypeError, ValueError):  # of the request's own options
            call.answer = None
            raise
        finally:
            answer.cancel()  # a streamer raises once its client is gone
        return torch.cat([ids, ids.new_tensor([done.tokens])], dim=1)

    def _alone(self, given: dict[str, Any], options: Any, care: dict[str, Any]) -> torch.Tensor:
        """Answer as without an engine, one request at a time: images, beams, ..."""
        call, (engine, alone, _) = self._call, self._parts
        with alone:
            try:
                cache = engine.kv.cache(**given, **care)
            except errors.StateError as error:
                if engine.kv.closed:
                    raise
                raise errors.UnsupportedModelError(error.problem, "Leave that input out") from error

            def stops(ids: Any, *_: Any, **__: Any) -> bool:  # behind the first forward
                if not call.begun.done():
                    call.record_reuse(engine.kv, getattr(cache, "reused", 0) // len(ids))
                    call.begin()
                return call.gone

            given |= {Names(self._model).cache: cache, "stopping_criteria": [stops]}
            try:
                return self._model.generate(**given, **options)
            finally:  # an error would hold the cache; one that became native has no pages
                getattr(cache, "close", int)()


def _check(config: Any, own: Any, vocabulary: int, rows: int) -> None:
    """Refuse options that fail behind the first token, or end all work of a GPU.

    Raises:
        ConfigError: A token or number is out of range. Those of the model itself may be.
    """
    bias = config.sequence_bias or ()  # clients send whole numbers
    pairs = bias.items() if isinstance(bias, dict) else bias
    config.sequence_bias = {tuple(ids): float(value) for ids, value in pairs} or None
    made = config.num_beams or 1, config.num_return_sequences or 1  # they share their rows
    optional = _OPTIONAL[made != (1, 1) :]
    for name in _TOKENS:
        if (given := getattr(config, name, None)) == getattr(own, name, None):
            continue
        for token in _whole_numbers(list(given) if isinstance(given, dict) else given):
            if not -(name in optional) <= token < vocabulary:
                name = name.replace("sequence", "logit_bias or sequence")
                remedy = f"Use tokens from 0 on, below {vocabulary}"
                raise errors.ConfigError(f"{name} has token {token}", remedy)
    if not all(abs(value) <= 1e6 for value in (config.sequence_bias or {}).values()):
        raise errors.ConfigError("a bias is out of range", "Use numbers from -1e6 to 1e6")
    if config.do_sample and not 1e-30 <= (config.temperature or 1) <= 1e6:
        raise errors.ConfigError(f"temperature={config.temperature}", "Use 0, or 1e-30 to 1e6")
    if config.exponential_decay_length_penalty and config.eos_token_id is own.eos_token_id is None:
        raise errors.ConfigError("a length penalty without an end token", "Give eos_token_id")
    for number in made:
        if not 1 <= number <= rows:
            raise errors.ConfigError(f"{number} beams or sequences", f"Ask for 1 to {rows}")
    stops = config.stop_strings if config.stop_strings != own.stop_strings else None
    if len("".join(stops or "")) > 512:  # each is compared with the whole vocabulary
        raise errors.ConfigError("stop strings of over 512 characters", "Shorten them")


def _whole_numbers(value: Any) -> Iterator[int]:
    """Yield the whole numbers in an option, at any depth."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _whole_numbers(part)


def _positions(text: Any, *more: str) -> int:
    """Return the number of positions that a model encodes, scaled ones too; 0 without a bound.

    Args:
        text: Its config.
        *more: Further kinds of scaling: as long contexts are trained with some, not with others.
    """
    most = getattr(text, "max_position_embeddings", None) or 0
    rope: Any = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_type") in ("yarn", "dynamic", *more):
            trained = part.get("original_max_position_embeddings") or most
            most = max(most, int(trained * (part.get("factor") or 1)))
    return int(most)


class _Manager(utils.GenerateManager):
    """Manager of generations on as many threads as there are requests."""

    def __init__(self, parts: _Parts) -> None:
        self._parts, self.submit = parts, (submit := ThreadPoolExecutor(256).submit)
        self.async_submit = lambda *given, **named: asyncio.wrap_future(submit(*given, **named))

    def generate_streaming(self, model: Any, *given: Any, **named: Any) -> Any:
        return super().generate_streaming(_Generation(self._parts, model), *given, **named)

    def generate_non_streaming(self, model: Any, *given: Any, **named: Any) -> Any:
        return super().generate_non_streaming(_Generation(self._parts, model), *given, **named)


class _Middleware:
    """ASGI middleware: gives requests their `HttpCall`, and their answers the reused tokens."""

    def __init__(self, app: Any, kv: KV) -> None:
        self._app, self._kv = app, kv

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import PlainTextResponse

        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if (path := scope["path"]) == "/metrics":
            return await PlainTextResponse(self._kv.metrics.prometheus())(scope, receive, send)
        if path not in _SERVED:
            use = f"{path}: FlowKV keeps tenants apart. Use {', '.join(_SERVED)} or /metrics"
            return await _error(404, use)(scope, receive, send)
        request, read = Request(scope, receive), bytearray()
        try:
            async for part in request.stream():
                read += part
                if len(read) > _LONGEST:
                    use = f"the body is longer than {_LONGEST >> 20} MiB. Send less at once."
                    return await _error(413, use)(scope, receive, send)
        except ClientDisconnect:
            return None
        call, body = _read_call(_tenant(request.headers), bytes(read))
        unread, begun = [{"type": "http.request", "body": body}], list[Any]()

        async def replay() -> Any:
            return unread.pop() if unread else await receive()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            call.call_off()

        async def begin(message: Any) -> None:
            begun.append(message)
            await send(message)

        _CALL.set(call)
        watching = asyncio.ensure_future(watch())
        try:
            if barred := _BARRED.intersection(call.body.get("chat_template_kwargs") or ()):
                problem = f"chat_template_kwargs holds {', '.join(sorted(barred))}"
                raise errors.ConfigError(problem, "Leave it out, or save it with the tokenizer")
            await self._app(scope, replay, _completing(call, begin))
        except Exception as error:
            if begun:  # streams write theirs
                raise
            told = _explained(error, request.method == "POST" and call.answer is None)
            await _error(*told)(scope, receive, send)
        finally:
            watching.cancel()
            call.call_off()  # if the server itself ends it


def _error(status: int, message: str) -> Any:
    """Return an error as an answer, in the form of OpenAI's servers."""
    from starlette.responses import Response

    kind = "invalid_request_error" if status < 500 else "server_error"
    body = json.dumps({"error": {"message": message, "type": kind}})  # ASCII: halves of pairs, too
    return Response(body, status, media_type="application/json")


def _explained(error: Exception, unread: bool) -> tuple[int, str]:
    """Return status and message for an error; `unread`: a prompt was not computed yet."""
    if isinstance(error, errors.FlowKVError):
        return 400 if isinstance(error, ValueError | TypeError) else 503, str(error)
    cause = f"({type(error).__name__}: {str(error).rstrip('.')})"
    failed = isinstance(error, RuntimeError | MemoryError)
    if unread and (not failed or isinstance(error, RecursionError)):  # nested too deep
        return 400, f"the request is malformed {cause}. Correct the value that is named."
    logging.getLogger("flowkv").error("a request failed", exc_info=error)
    return 500, f"the server failed {cause}. Look into its log."


def _tenant(headers: Any) -> str | None:
    """Return a name for the credentials of a request, of any form; None without any."""
    told = (value for name in _CREDENTIALS for value in headers.getlist(name))
    keys = (re.sub(r"(?i)^bearer(\s+|$)", "", value).strip() for value in told)
    secret = "\n".join(dict.fromkeys(filter(None, keys)))
    return hashlib.sha256(secret.encode()).hexdigest()[:32] if secret else None  # for reports


def _read_call(tenant: str | None, body: bytes) -> tuple[HttpCall, bytes]:
    """Return the `HttpCall` of a request, and the body that the server gets, without hints."""
    asked: Any = None
    with suppress(ValueError, RecursionError):
        asked = json.loads(body)
    if not isinstance(asked, dict):
        return HttpCall(tenant), body
    messages, hint = asked.get("messages"), asked.get("cache_control")
    if hint and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        messages[-1].setdefault("cache_control", hint)
    plain = {name: value for name, value in asked.items() if name not in _FIELDS}
    if isinstance(asked.get("tools"), list):
        plain["tools"] = without_hints(asked["tools"])
    return HttpCall(tenant, asked), body if plain == asked else json.dumps(plain).encode()


def _completing(call: HttpCall, send: Any) -> Any:
    """Return a `send` that completes the usage in an answer, whole or streamed."""
    start, parts = list[Any](), list[bytes]()

    async def complete(message: Any) -> None:
        body = message.get("body", b"")
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            if b"application/json" in kind:
                return start.append(message)  # its length changes
            if b"event-stream" in kind:
                await asyncio.wrap_future(call.begun)
        elif start:
            parts.append(body)
            if message.get("more_body"):
                return None
            body, first = _completed(call, b"".join(parts)), start.pop()
            if first["status"] >= 400 and (detail := json.loads(body).get("detail")):
                told = detail if isinstance(detail, str) else detail[0]["msg"]
                body = _error(first["status"], told).body
            kept = [pair for pair in first["headers"] if pair[0] != b"content-length"]
            length = b"content-length", str(len(body)).encode()
            await send({**first, "headers": [*kept, length]})
            message = {"type": message["type"], "body": body}
        elif b'"usage"' in body:
            lines = [_completed(call, line) for line in body.split(b"\n")]
            message = {**message, "body": b"\n".join(lines)}
        elif _FAILED in body:  # its text is not escaped
            before, _, told = body.partition(_FAILED)
            text = told.rpartition(b'"}')[0].decode(errors="replace")
            message = {**message, "body": before + b"data: " + _error(500, text).body + b"\n\n"}
        return await send(message)

    return complete


def _completed(call: HttpCall, text: bytes) -> bytes:
    """Return JSON, or a line of an event stream, with the usage completed."""
    start = b"data: " if text.startswith(b"data: ") else b""
    if b'"usage"' in text:
        with suppress(ValueError):
            found = json.loads(text.removeprefix(start))
            call.fill_usage(found)
            return start + json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
    return text


def _reader(handler: utils.BaseHandler, modality: Any) -> Callable[..., CacheControl]:
    """Return a function that reads the breakpoints out of a body, as the handler renders it."""
    prepare = partial(handler.get_processor_inputs_from_messages, modality=modality)

    def read(body: dict[str, Any], processor: Any, ids: list[int]) -> CacheControl:
        if not isinstance(messages := body.get("messages"), list):
            return CacheControl()
        template = {**handler.chat_template_kwargs, **(body.get("chat_template_kwargs") or {})}
        template |= {"add_generation_prompt": True, "tools": body.get("tools")}
        tokenizer = getattr(processor, "tokenizer", processor)
        return cache_control(messages, tokenizer, ids, prepare, **template)

    return read


async def _try_port(host: str, port: int) -> None:
    """Bind a port for a moment, as uvicorn will, before a model is loaded.

    Raises:
        ConfigError: The port or the host cannot be used.
    """
    try:
        if not 0 <= port < 1 << 16:
            raise OverflowError("ports are 0 to 65535")
        loop = asyncio.get_running_loop()
        (await loop.create_server(asyncio.Protocol, host, port)).close()
    except (OSError, OverflowError, UnicodeError) as error:
        problem = f"{host}:{port} cannot be used ({getattr(error, 'strerror', None) or error})"
        raise errors.ConfigError(problem, "Choose another --port or --host") from error


def run(model: str, options: Sequence[str], start: Callable[[Any], Any]) -> None:
    """Run `transformers serve`, until it is stopped.

    Args:
        model: Folder or id of the model, which is loaded at once.
        options: Further words of the command.
        start: Attaches the loaded model, and makes a `flowkv.Engine`.

    Raises:
        ConfigError: An option is wrong, or this release of transformers has another server.
        MissingDependencyError: Packages of the server are missing.
    """
    if not is_serve_available():
        raise errors.MissingDependencyError("flowkv serve", "serve")
    for option in {"--continuous-batching", "--compile"}.intersection(options):
        raise errors.ConfigError(f"{option} has a cache of its own", f"Leave {option} out")
    import uvicorn
    from starlette.middleware.cors import CORSMiddleware

    code = entry.Serve.__init__.__code__
    if "build_server" not in code.co_varnames + code.co_cellvars:
        raise errors.ConfigError(
            f"`transformers serve` of transformers {transformers.__version__} has another shape",
            "Use a release from 5.17 to 5.24",
        )

    built = list[Any]()

    def build(*given: Any, **named: Any) -> Any:
        built.append(given)
        app, parts = make(*given, **named), [*given, *named.values()]
        (models,) = (part for part in parts if isinstance(part, ModelManager))
        (state,) = (part for part in parts if isinstance(part, utils.GenerationState))
        handler = next(part for part in parts if isinstance(part, utils.BaseHandler))
        (timed,) = models.loaded_models.values()
        modality = models.get_model_modality(timed.model, processor=timed.processor)
        engine = start(timed.model)
        manager = _Manager((engine, threading.Lock(), _reader(handler, modality)))
        state.get_manager = lambda *_, **__: manager
        state.is_cb_alive = lambda: not engine.closed  # which /health asks
        known = {"id": model, "object": "model", "created": 0, "owned_by": "flowkv"}
        vars(models)["get_gen_models"] = lambda: [known]  # others are not served
        engine.kv.metrics.follow_steps(engine.kv.bus)
        app.add_middleware(_Middleware, kv=engine.kv)
        app.user_middleware.sort(key=lambda each: each.cls is not CORSMiddleware)  # outermost
        return app

    @wraps(entry.Serve.__init__)
    def begin(*given: Any, **named: Any) -> None:
        asyncio.run(_try_port(named["host"], named["port"]))
        init(*given, **named)

    make, server.build_server = server.build_server, build
    init, entry.Serve.__init__ = entry.Serve.__init__, begin
    plain = uvicorn.Config
    uvicorn.Config = partial(plain, timeout_graceful_shutdown=_GRACE)
    try:
        if commands(["serve", model, *options], standalone_mode=False) == 130:
            raise KeyboardInterrupt
    except Exception as error:
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error  # as releases of typer differ
        if hasattr(error, "format_message"):  # of the command itself
            remedy = "See `transformers serve --help`"
            raise errors.ConfigError(error.format_message().rstrip(".?"), remedy) from error
        if built or isinstance(error, errors.FlowKVError):
            raise
        raise explanation(model, error) from error
    finally:
        server.build_server, entry.Serve.__init__, uvicorn.Config = make, init, plain
