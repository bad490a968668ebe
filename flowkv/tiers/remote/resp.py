"""The wire of Redis and Valkey (RESP2): requests out of frames, payloads into their slots.

A client library opens the connection (addresses, names, TLS, passwords, clusters); from then on its
socket belongs to a `Wire`. A payload is received by one system call into the memory where it is
wanted: no buffer in between, and one turn of the interpreter's lock for a whole frame.

Every exchange ends with an echoed number. A reply that was lost, sent twice or meant for another
request is noticed before anything is believed, and a wire that was ever in doubt is `broken`: it
can only be closed. Lengths are compared with what was asked for before memory is touched.
"""

from __future__ import annotations

import re
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from flowkv.core.errors import StoreError

Bytes: TypeAlias = bytes | bytearray | memoryview
Reply: TypeAlias = "int | bytes | ServerError | list[Reply] | None"
Replies: TypeAlias = list[Reply]

MAX_LINE_BYTES = 4096
MAX_REPLY_BYTES = 8 << 20
MAX_ITEMS = 1 << 16
MAX_DEPTH = 4

_BUFFER_BYTES = 1 << 16
_SIP_BYTES = 64  # enough for the line before a payload, and little to copy of what follows it
_MOST_PARTS = 512  # below IOV_MAX
_CRLF = b"\r\n"
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]{0,18})")
_TIMEVAL = struct.Struct("@ll")


class WireError(StoreError):
    """A connection that can only be closed.

    Args:
        reason: "deadline", "closed" or "protocol".
        problem: What is wrong, one sentence without a full stop.
    """

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem, "Close the connection and open another one")
        self.reason = reason


class ServerError(StoreError):
    """An error that the server answered; the connection is in order.

    Attributes:
        code: Its first word: "OOM", "MOVED", "LOADING", "NOPERM", "WRONGTYPE", "ERR", ...
    """

    def __init__(self, line: bytes) -> None:
        text = line[:200].decode("ascii", "replace")
        super().__init__(f"the server answered {text!r}", "Look at its configuration and its log")
        self.code, self.text = text.split(" ", 1)[0], text


def pack(*arguments: Bytes) -> bytes:
    """One request of short arguments."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        parts += (b"$%d\r\n" % len(argument), argument, _CRLF)  # type: ignore[arg-type]
    return b"".join(parts)


def pack_set(key: bytes, value: Sequence[memoryview], *options: bytes) -> list[Bytes]:
    """A SET whose value is sent from where it lies, in parts."""
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
        *(3 + len(options), len(key), key),
        sum(part.nbytes for part in value),
    )
    tail = b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)
    return [head, *value, _CRLF + tail]


class Wire:
    """One connection, used by one thread at a time.

    Args:
        sock: Connected and logged in; TLS or not. It is the wire's from now on.

    Attributes:
        broken: An exchange did not come to its proper end; only `close` is left.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.broken = False
        self._socket, self._tls = sock, isinstance(sock, ssl.SSLSocket)
        if not self._tls:
            sock.settimeout(None)  # deadlines are given to the kernel instead
        self._number = secrets.randbits(62)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._low = self._high = self._budget = self._items = 0
        self._end_s = 0.0

    def fetch(self, key: bytes, offset: int, target: memoryview, end_s: float) -> int:
        """Receives bytes of a value, from `offset` on, as many as `target` holds or the value has.

        Args:
            key: Of the value.
            offset: First byte wanted.
            target: Writable bytes; undefined beyond what is returned, and after an error.
            end_s: When to give up (`time.monotonic`).

        Returns:
            Bytes received; 0 if the key is not there.

        Raises:
            ServerError: The server refused.
            WireError: The connection is broken.
        """
        span = b"%d" % offset, b"%d" % (offset + target.nbytes - 1)
        echo = self._send([pack(b"GETRANGE", key, *span)], end_s)
        line = self._line(_SIP_BYTES)
        if line[:1] == b"-":
            self._finish(echo)
            raise ServerError(line[1:])
        size = self._size(line, b"$", target.nbytes)
        if size is None:
            raise _doubt("a range of a value is nothing at all")
        end = memoryview(bytearray(len(_CRLF + echo)))
        self._fill([target[:size], end])
        if end != _CRLF + echo:
            raise _doubt("a value is not followed by the end of its exchange")
        self.broken = False
        return size

    def call(
        self,
        requests: Sequence[Iterable[Bytes]],
        end_s: float,
        fits: Callable[[Reply], bool] = lambda reply: True,
    ) -> list[Reply]:
        """Sends requests, each in parts, and returns their short replies.

        Errors that the server answers are among the replies.

        Args:
            requests: Their parts.
            end_s: When to give up (`time.monotonic`).
            fits: Whether a reply that is no error can be one to such a request.

        Raises:
            WireError: The connection is broken; which requests were carried out is not known.
        """
        echo = self._send([part for request in requests for part in request], end_s)
        self._budget, self._items = MAX_REPLY_BYTES, MAX_ITEMS
        replies = [self._reply(0) for _ in requests]
        if not all(isinstance(reply, ServerError) or fits(reply) for reply in replies):
            raise _doubt("a reply is none to its request")
        self._finish(echo)
        return replies

    def close(self) -> None:
        """Closes the connection."""
        self.broken = True
        self._socket.close()

    # --- sending -----------------------------------------------------------------------------

    def _send(self, parts: list[Bytes], end_s: float) -> bytes:
        """Sends requests and the echo that ends them; returns the reply to that."""
        if self.broken:
            raise WireError("closed", "a broken connection was used again")
        self.broken = True  # until the echo has come
        self._end_s = end_s
        if self._low != self._high:
            raise _doubt("there is a reply to no request")
        self._number += 1
        number = b"%016x" % self._number
        views = [memoryview(part) for part in (*parts, pack(b"ECHO", number))]
        try:
            while views:
                left_s = self._arm(socket.SO_SNDTIMEO)
                if self._tls:
                    self._socket.settimeout(left_s)
                    self._socket.sendall(views.pop(0))
                else:
                    views = _beyond(views, self._socket.sendmsg(views[:_MOST_PARTS]))
        except OSError as error:
            raise _broken(error) from error
        return b"$%d\r\n%b\r\n" % (len(number), number)

    def _arm(self, option: int) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if not self._tls:
            whole = int(left_s)
            timeval = _TIMEVAL.pack(whole, max(1, int((left_s - whole) * 1e6)))
            self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)
        return left_s

    # --- receiving ---------------------------------------------------------------------------

    def _receive(self, views: list[memoryview], flags: int = 0) -> int:
        """Receives what there is, waiting for the first byte; how many bytes came."""
        try:
            left_s = self._arm(socket.SO_RCVTIMEO)
            if self._tls:
                self._socket.settimeout(left_s)
                count = self._socket.recv_into(views[0])
            else:
                count = self._socket.recvmsg_into(views, 0, flags)[0]
        except OSError as error:
            raise _broken(error) from error
        if not count:
            raise WireError("closed", "the server closed the connection")
        return count

    def _fill(self, views: list[memoryview]) -> None:
        """Fills all views: what is left in the buffer first, then from the socket."""
        views = _beyond(views, 0)
        while views and self._low < self._high:
            count = min(views[0].nbytes, self._high - self._low)
            views[0][:count] = self._view[self._low : self._low + count]
            self._low += count
            views = _beyond(views, count)
        while views:
            views = _beyond(views, self._receive(views, socket.MSG_WAITALL))

    def _line(self, appetite: int = _BUFFER_BYTES) -> bytes:
        """The next line, without its end."""
        while (end := self._buffer.find(_CRLF, self._low, self._high)) < 0:
            held = self._high - self._low
            if held > MAX_LINE_BYTES:
                raise _doubt("a line does not end")
            self._view[:held] = bytes(self._view[self._low : self._high])
            self._low, self._high = 0, held
            self._high += self._receive([self._view[held : held + appetite]])
        line = bytes(self._view[self._low : end])
        self._low = end + len(_CRLF)
        if len(line) > MAX_LINE_BYTES:
            raise _doubt("a line is too long")
        return line

    def _finish(self, echo: bytes) -> None:
        end = memoryview(bytearray(len(echo)))
        self._fill([end])
        if end != echo:
            raise _doubt("an exchange did not end with its number")
        self.broken = False

    def _reply(self, depth: int) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        self._items -= 1
        if self._items < 0 or depth > MAX_DEPTH:
            raise _doubt("a reply has too many parts")
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest)
        if kind == b":":
            return _number(rest)
        if kind == b"*":
            count = self._size(line, b"*", self._items)
            return None if count is None else [self._reply(depth + 1) for _ in range(count)]
        size = self._size(line, b"$", self._budget)
        if size is None:
            return None
        self._budget -= size
        data = bytearray(size + len(_CRLF))
        self._fill([memoryview(data)])
        if not data.endswith(_CRLF):
            raise _doubt("a value does not end where it said")
        return bytes(data[:size])

    def _size(self, line: bytes, kind: bytes, most: int) -> int | None:
        """The length that a line announces; None where it announces nothing."""
        if line[:1] != kind:
            raise _doubt(f"a reply begins with {line[:16]!r}")
        size = _number(line[1:])
        if size == -1:
            return None
        if not 0 <= size <= most:
            raise _doubt(f"a reply announces {size} bytes or parts, {most} are possible")
        return size


def _number(digits: bytes) -> int:
    if not _NUMBER.fullmatch(digits):
        raise _doubt(f"{digits[:24]!r} is no number")
    return int(digits)


def _beyond(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of views after their first `count` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *(v for v in views[index + 1 :] if v.nbytes)]
        count -= view.nbytes
    return []


def _doubt(problem: str) -> WireError:
    return WireError("protocol", problem)


def _broken(error: OSError) -> WireError:
    if isinstance(error, TimeoutError | BlockingIOError):
        return WireError("deadline", "the server did not answer in time")
    return WireError("closed", f"the connection failed ({error.strerror or error})")
