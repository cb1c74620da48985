"""zstd and lz4 for the column block of a batch: done by the producer, undone by the consumer.

    code   name    frame
    0      none    the block itself
    1      zstd    one zstd frame
    2      lz4     one lz4 frame

Both packages are optional and imported at first use. An inflate is always bounded: the caller
says how many bytes must come out, and one byte more is a `ProtocolError`. A size that a frame
claims for itself is never believed (a zstd frame of 3 KB can claim, and fill, 100 MB).
"""

from importlib import import_module
from types import ModuleType
from typing import Final

from onward.errors import InvalidRequest, ProtocolError

NONE: Final = 0
ZSTD: Final = 1
LZ4: Final = 2

CODES: Final = {None: NONE, "none": NONE, "zstd": ZSTD, "lz4": LZ4}

# What every zstd decoder should be able to hold (RFC 8878, 3.1.1.1.2); more is refused.
_ZSTD_WINDOW_BYTES: Final = 8 * 1024 * 1024


def compression_code(name: str | None) -> int:
    """Return the code of a compression's name.

    >>> compression_code("zstd")
    1
    """
    try:
        return CODES[name]
    except KeyError:
        raise InvalidRequest(f"unknown compression {name!r}: there are zstd and lz4") from None


def deflate(block: bytes, *, code: int) -> bytes:
    """Compress a column block.

    >>> len(deflate(bytes(100_000), code=ZSTD)) < 100
    True
    """
    if code == ZSTD:
        packed: bytes = _load("zstandard", "zstd").ZstdCompressor(level=3).compress(block)
    elif code == LZ4:
        packed = _load("lz4.frame", "lz4").compress(block)
    else:
        packed = block
    return packed


def inflate(block: bytes | memoryview, *, code: int, raw_bytes: int) -> bytes:
    """Undo `deflate`: exactly `raw_bytes` bytes come out, or it is a `ProtocolError`.

    What follows the compressed frame (a batch is padded to 8) is ignored.

    >>> inflate(deflate(b"a" * 50, code=LZ4), code=LZ4, raw_bytes=50) == b"a" * 50
    True
    """
    raw = _inflate_zstd(block, raw_bytes) if code == ZSTD else _inflate_lz4(block, raw_bytes)
    if len(raw) != raw_bytes:
        more = "more" if len(raw) > raw_bytes else "fewer"
        raise ProtocolError(
            f"a compressed batch inflates to {more} than the {raw_bytes} bytes it states"
        )
    return raw


def _inflate_zstd(block: bytes | memoryview, raw_bytes: int) -> bytes:
    zstandard = _load("zstandard", "zstd")
    window = max(raw_bytes, _ZSTD_WINDOW_BYTES)
    try:
        # Not decompress(max_output_size=...): it allocates what the frame claims.
        reader = zstandard.ZstdDecompressor(max_window_size=window).stream_reader(block)
        raw: bytes = reader.read(raw_bytes + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise ProtocolError(f"a batch's zstd frame is damaged: {error}") from None
    return raw


def _inflate_lz4(block: bytes | memoryview, raw_bytes: int) -> bytes:
    decompressor = _load("lz4.frame", "lz4").LZ4FrameDecompressor()
    try:
        raw: bytes = decompressor.decompress(block, max_length=raw_bytes + 1)
    except (RuntimeError, MemoryError) as error:
        raise ProtocolError(f"a batch's lz4 frame is damaged: {error}") from None
    return raw


def _load(module: str, name: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError:
        raise InvalidRequest(f"{name} needs: pip install onward[compression]") from None
