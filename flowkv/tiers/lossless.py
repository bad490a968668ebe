"""Lossless compression of 16-bit pages: separate byte planes, then zstd, stripe by stripe.

    stored stripe = stored bytes of the high plane u32 | of the low plane u32 | high | low

A plane is the high or the low byte of every 16-bit value. High bytes hold sign and exponent, and
compress; low bytes are nearly noise. A plane that does not shrink is stored unchanged, and a stripe
that does not shrink by a page of 4 KiB is stored whole, without this form (`tiers.frame`).

The size and the window that a zstd frame declares are compared with the expected ones before any
memory is touched, and planes are decompressed into preallocated memory. (`max_output_size` of
python-zstandard is no such limit: it is ignored when the frame declares a size.)
"""

from __future__ import annotations

import math
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from flowkv.compiled import compiling
from flowkv.compiled.machine_code import kept
from flowkv.core.clock import Clock
from flowkv.core.geometry import CODECS
from flowkv.core.memory import Scratch
from flowkv.tiers.base import BadFrame, Buffer, FrameInfo, aligned

LEVEL = 1
LEAST_GAIN = 1.05
MARGIN = 1.5
"""Factor by which decoding must outrun the tier. The rate of a tier is that of whole loads; once
those decompress, they are no faster than the decoder and would hide the tier's own rate. With the
margin, a tier that waits for the decoder is left uncompressed again."""
SAMPLES = 4
TIMED = 4
AGAIN = 256
"""Interval of retries: of the frames of an uncompressed layout, one in so many is tried again."""
_LAYOUTS = 1024  # most layouts with counters
_LEAST_PLANE_GAIN = 1.02
_LEAST_WINDOW_BYTES = 1024
_RAW = CODECS.index("raw")
_HEAD = struct.Struct("<II")


class CompressedBody(NamedTuple):
    """A compressed body.

    Attributes:
        sizes: u32 stored bytes of each stripe.
        data: The stored stripes, each aligned to 4 KiB.
    """

    sizes: bytes
    data: memoryview


@dataclass(slots=True)
class Measure:
    """Counters of one layout.

    Attributes:
        offered: Frames passed to `pack`.
        frames: Frames compressed.
        plain_bytes: Their bytes.
        stored_bytes: Their bytes after compression, padding of stripes included.
        low_bytes: Bytes of low planes.
        low_stored_bytes: Bytes of low planes after compression.
        decode_s: Seconds that one core took to decompress `decoded_bytes`.
        decoded_bytes: Bytes of stripes that were decompressed for this measurement.
    """

    offered: int = 0
    frames: int = 0
    plain_bytes: int = 0
    stored_bytes: int = 0
    low_bytes: int = 0
    low_stored_bytes: int = 0
    decode_s: float = 0.0
    decoded_bytes: int = 0

    @property
    def gain(self) -> float:
        """Return the compression ratio so far."""
        return self.plain_bytes / max(1, self.stored_bytes)

    @property
    def decode_bytes_per_s(self) -> float:
        """Return the plain bytes per second that one core decompresses."""
        if self.decode_s > 0:
            return self.decoded_bytes / self.decode_s
        return math.inf if self.decoded_bytes else 0.0  # a clock that stands still, or no sample

    @property
    def low_shrinks(self) -> bool:
        """Return whether compressing the low plane is worth a try."""
        return self.low_bytes >= _LEAST_PLANE_GAIN * self.low_stored_bytes


class Lossless:
    """Compressor that decides by measurement which pages to compress. Thread-safe.

    Only raw pages are candidates: 8- and 4-bit codecs leave nothing to gain. The first frames of a
    layout are tried; then its pages are compressed as long as they become at least 1.05 times
    smaller, and as long as a core restores them 1.5 times as fast as the tier delivers bytes, so
    that a load takes no longer than without. No page is compressed before the tier's rate is known.

    Args:
        io_bytes_per_s: Returns the measured rate at which the tier loads plain bytes; 0 while
            unknown.
        decode_bytes_per_s: Returns the rate at which one core restores; default: measured.
        clock: Source of time.
    """

    def __init__(
        self,
        io_bytes_per_s: Callable[[], float],
        *,
        decode_bytes_per_s: Callable[[], float] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._io, self._decode = io_bytes_per_s, decode_bytes_per_s
        self._clock, self._lock = clock or compiling.SystemClock(), threading.Lock()
        self._layouts: OrderedDict[bytes, Measure] = OrderedDict()

    def worth(self, layout: bytes) -> bool:
        """Return whether pages of this layout are to be compressed, by the measurements so far."""
        seen = self._layouts.get(layout)
        if seen is None or seen.gain < LEAST_GAIN:
            return False
        rate = self._decode() if self._decode is not None else seen.decode_bytes_per_s
        return 0 < MARGIN * self._io() <= rate

    def pack(self, info: FrameInfo, body: memoryview) -> CompressedBody | None:
        """Return the compressed body, or None if it is to be stored uncompressed.

        Args:
            info: Description of the frame.
            body: Its stripes, of even length where they are candidates.
        """
        step = info.stripe_bytes
        if info.kind != "page" or info.codec != _RAW or step % 2 or step >= 1 << 32:
            return None
        with self._lock:
            seen = self._layouts.setdefault(info.layout, Measure())
            if len(self._layouts) > _LAYOUTS:
                self._layouts.popitem(last=False)
            trial = seen.frames < SAMPLES or seen.offered % AGAIN == 0
            seen.offered += 1
        if not trial and not self.worth(info.layout):
            return None
        packed = _pack(body, step, seen, low=trial or seen.low_shrinks)
        small = len(body) >= LEAST_GAIN * aligned(len(packed.data))
        if trial and small and self._decode is None:
            self._time(packed, step, seen)
        return packed if small and self.worth(info.layout) else None

    def _time(self, packed: CompressedBody, step: int, seen: Measure) -> None:
        offset = 0
        for (size,) in struct.iter_unpack("<I", packed.sizes):
            if size < step:
                break
            offset += step
        stripe = packed.data[offset : offset + size]
        target, times_ns = memoryview(bytearray(step)), list[int]()
        for _ in range(TIMED):  # each run may be interrupted
            start_ns, spent_ns = self._clock.now_ns(), compiling.spent_ns()
            unpack_stripe(stripe, target)
            # while a thread compiles, the clock may stand still
            if compiling.spent_ns() == spent_ns:
                times_ns.append(self._clock.now_ns() - start_ns)
        if times_ns:
            seen.decode_s += min(times_ns) / 1e9
            seen.decoded_bytes += step


def unpack_stripe(stored: Buffer, target: memoryview) -> None:
    """Decompress a stripe into memory of exactly its length.

    Raises:
        BadFrame: "digest": the bytes are no such stripe.
    """
    view, half = memoryview(stored), len(target) // 2
    if len(view) < _HEAD.size or len(target) % 2:
        raise BadFrame("digest", f"a compressed stripe of {len(view)} bytes")
    high, low = _HEAD.unpack_from(view)
    if not (0 < high <= half and 0 < low <= half and _HEAD.size + high + low == len(view)):
        raise BadFrame("digest", f"planes of {high} and {low} bytes in {len(view)}")
    scratch, middle = _SCRATCH.array("planes", np.uint8, 2, half), _HEAD.size + high
    planes = (_inflate(view[_HEAD.size : middle], scratch[0]), _inflate(view[middle:], scratch[1]))
    _join(*planes, np.frombuffer(target, np.uint8))


def _inflate(stored: memoryview, plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if len(stored) == len(plane):
        return np.frombuffer(stored, np.uint8)
    try:
        says = zstandard.get_frame_parameters(stored)
        window = max(len(plane), _LEAST_WINDOW_BYTES)
        if says.content_size != len(plane) or says.window_size > window:
            raise BadFrame("digest", f"a plane of {says.content_size} bytes, not {len(plane)}")
        reader = _thread.decompressor.stream_reader(stored)
        n_bytes = reader.readinto(plane.data)
    except zstandard.ZstdError as error:
        raise BadFrame("digest", f"a plane that zstd cannot read ({error})") from None
    if n_bytes != len(plane):
        raise BadFrame("digest", f"a plane that ends after {n_bytes} bytes")
    return plane


def _pack(body: memoryview, step: int, seen: Measure, *, low: bool) -> CompressedBody:
    out, sizes, offset, end = memoryview(bytearray(len(body))), [], 0, 0
    for at in range(0, len(body), step):
        stripe = body[at : at + step]
        parts = _pack_stripe(stripe, seen, low=low)
        if aligned(sum(map(len, parts))) >= step:
            parts = [stripe]
        end = offset
        for part in parts:
            out[end : end + len(part)] = part
            end += len(part)
        sizes.append(end - offset)
        offset = aligned(end)
    seen.frames += 1
    seen.plain_bytes += len(body)
    seen.stored_bytes += min(len(body), aligned(end))
    return CompressedBody(struct.pack(f"<{len(sizes)}I", *sizes), out[:end])


def _pack_stripe(stripe: memoryview, seen: Measure, *, low: bool) -> list[Buffer]:
    half, planes = len(stripe) // 2, _SCRATCH.array("planes", np.uint8, 2, len(stripe) // 2)
    _split(np.frombuffer(stripe, np.uint8), planes[0], planes[1])
    parts: list[Buffer] = []
    for plane, tried in zip(planes, (True, low), strict=True):
        part: Buffer = _thread.compressor.compress(plane.data) if tried else b""
        parts.append(part if 0 < len(part) < half else bytes(plane.data))
    if low:
        seen.low_bytes += half
        seen.low_stored_bytes += len(parts[1])
    return [_HEAD.pack(*map(len, parts)), *parts]


class _Zstd(threading.local):
    """The two zstd objects of one thread; neither may be shared."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_thread, _SCRATCH = _Zstd(), Scratch()


@kept(nogil=True)
def _split(stripe, high, low):  # type: ignore[no-untyped-def]
    for i in range(len(high)):
        low[i] = stripe[2 * i]
        high[i] = stripe[2 * i + 1]


@kept(nogil=True)
def _join(high, low, stripe):  # type: ignore[no-untyped-def]
    for i in range(len(high)):
        stripe[2 * i] = low[i]
        stripe[2 * i + 1] = high[i]
