"""Encode the frames of a block: unchanged, or losslessly compressed by zstandard."""

import importlib.util
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

LEVEL = 1  # higher levels save a few percent, and take many times as long
PACKAGE = "zstandard"


class Codec(NamedTuple):
    """Two functions that are inverse to each other."""

    encode: Callable[[np.ndarray], Any]  # frames [n, B] of one environment to bytes
    decode: Callable[[Any, tuple[int, int]], np.ndarray]  # (bytes, shape) to frames [n, B]
    is_packed: bool


def is_installed() -> bool:
    """Return whether blocks can be compressed."""
    return importlib.util.find_spec(PACKAGE) is not None


def _encode(frames: np.ndarray) -> bytes:
    packed: bytes = _tools()[0].compress(np.ascontiguousarray(frames).data.cast("B"))
    return packed


def _decode(data: Any, shape: tuple[int, int]) -> np.ndarray:
    return np.frombuffer(_tools()[1].decompress(data), np.uint8).reshape(shape)


_OF_THREAD = threading.local()  # zstandard's objects may be used by one thread at a time


def _tools() -> tuple[Any, Any]:
    if not hasattr(_OF_THREAD, "tools"):
        import zstandard

        _OF_THREAD.tools = zstandard.ZstdCompressor(level=LEVEL), zstandard.ZstdDecompressor()
    tools: tuple[Any, Any] = _OF_THREAD.tools
    return tools


RAW = Codec(
    lambda frames: np.ascontiguousarray(frames).data.cast("B"),
    lambda data, shape: np.frombuffer(data, np.uint8).reshape(shape),
    is_packed=False,
)
ZSTD = Codec(_encode, _decode, is_packed=True)
