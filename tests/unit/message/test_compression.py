import struct
import tracemalloc
from types import ModuleType

import pytest
from crc32c import crc32c

from onward.errors import InvalidRequest, ProtocolError
from onward.message import compression
from onward.message.batch import check_batch, decode_batch, encode_batch, largest_body_bytes
from onward.message.compression import LZ4, ZSTD, deflate, inflate

MIB = 1 << 20


@pytest.fixture(scope="module")
def bombs() -> dict[int, bytes]:
    """100 MiB of zeros, in a few bytes."""
    return {code: deflate(bytes(100 * MIB), code=code) for code in (ZSTD, LZ4)}


def peak_bytes(code: int, packed: bytes, limit: int) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            inflate(packed, code=code, raw_bytes=limit)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("code", [ZSTD, LZ4])
def test_a_bomb_takes_memory_by_its_limit_and_not_by_its_size(
    code: int, bombs: dict[int, bytes]
) -> None:
    assert len(bombs[code]) < MIB
    # The output once, and once more while it is handed over.
    assert peak_bytes(code, bombs[code], limit=MIB) < 2.1 * MIB


@pytest.mark.parametrize("code", [ZSTD, LZ4])
@pytest.mark.parametrize("stated", [49, 51, 0, 1000])
def test_a_block_that_inflates_to_another_size_than_stated_is_refused(
    code: int, stated: int
) -> None:
    with pytest.raises(ProtocolError, match="inflates to"):
        inflate(deflate(b"a" * 50, code=code), code=code, raw_bytes=stated)


@pytest.mark.parametrize("code", [ZSTD, LZ4])
@pytest.mark.parametrize("damage", [b"", b"\x00" * 20, b"garbage!" * 4])
def test_a_damaged_block_is_a_protocol_error(code: int, damage: bytes) -> None:
    with pytest.raises(ProtocolError):
        inflate(damage, code=code, raw_bytes=50)


@pytest.mark.parametrize("code", [ZSTD, LZ4])
def test_a_cut_block_is_a_protocol_error_at_every_byte(code: int) -> None:
    raw = bytes(range(256)) * 4
    packed = deflate(raw, code=code)
    for kept in range(len(packed) - 8):
        with pytest.raises(ProtocolError):
            inflate(packed[:kept], code=code, raw_bytes=len(raw))


@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_a_batch_that_states_more_than_the_limit_is_refused_before_inflating(name: str) -> None:
    packed = bytearray(encode_batch([bytes(5000), b""], compression=name))
    header = check_batch(packed)
    with pytest.raises(ProtocolError, match="over the limit of 4096"):
        decode_batch(packed, raw_bytes_max=4096)
    with pytest.raises(ProtocolError, match="over the limit of 4096"):
        largest_body_bytes(packed, 0, header, raw_bytes_max=4096)


@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_a_batch_whose_block_inflates_to_more_than_it_states_is_refused(name: str) -> None:
    small, large = (encode_batch([bytes(n), b"x"], compression=name) for n in (1000, 100_000))
    lie = bytearray(small[:56] + large[56:])
    struct.pack_into("<I", lie, 4, len(lie))
    struct.pack_into("<I", lie, 8, crc32c(bytes(lie[12:])))
    check_batch(lie)
    with pytest.raises(ProtocolError, match="inflates to more"):
        decode_batch(lie, raw_bytes_max=MIB)


@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(module: str) -> ModuleType:
        raise ImportError(module)

    packed = encode_batch([b"hello"], compression=name)
    monkeypatch.setattr(compression, "import_module", missing)
    with pytest.raises(InvalidRequest, match=rf"{name} needs: pip install onward\[compression\]"):
        encode_batch([b"hello"], compression=name)
    with pytest.raises(InvalidRequest, match=rf"{name} needs: pip install onward\[compression\]"):
        decode_batch(packed, raw_bytes_max=1000)
