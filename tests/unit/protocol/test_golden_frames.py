"""Frames that were written once must be written and read the same for ever."""

import runpy
from pathlib import Path

import pytest

from onward.protocol.connection import ClientConnection, ServerConnection
from onward.protocol.frames import PREFACE, Kind, frame
from onward.protocol.payloads import Hello
from onward.protocol.receiver import Frame, Receiver

GOLDEN = Path(__file__).parents[2] / "golden"
MAKE = runpy.run_path(str(GOLDEN / "make.py"))


def frames_in(name: str) -> list[Frame]:
    stream = (GOLDEN / name).read_bytes()
    receiver = Receiver(frame_bytes_max=65_536, preface=PREFACE if "client" in name else b"")
    shared = bytearray(65_536)
    receiver.buffer(shared)[: len(stream)] = stream
    return receiver.received(len(stream))


@pytest.mark.parametrize("name", ["frames_client.bin", "frames_broker.bin"])
def test_frames_are_written_with_the_same_bytes_as_ever(name: str) -> None:
    today = MAKE[name.removeprefix("frames_").removesuffix(".bin") + "_frames"]()
    assert today.hex(" ", 4) == (GOLDEN / name).read_bytes().hex(" ", 4)


def test_the_golden_files_hold_a_frame_of_every_kind() -> None:
    kinds = {kind for name in ("client", "broker") for kind, *_ in frames_in(f"frames_{name}.bin")}
    assert kinds == set(Kind)


def test_the_golden_frames_of_the_broker_are_a_whole_conversation_for_a_client() -> None:
    client, shared = ClientConnection(), bytearray(65_536)
    client.hello(Hello(version=1))
    stream = b"".join(frame(*one) for one in frames_in("frames_broker.bin"))
    client.buffer(shared)[: len(stream)] = stream
    assert len(client.received(len(stream))) == 8
    assert client.goodbye is not None
    assert client.goodbye.code == "stopping"


def test_the_golden_hello_is_taken_by_a_broker() -> None:
    hello, *_ = frames_in("frames_client.bin")
    server, shared = ServerConnection(), bytearray(1024)
    stream = PREFACE + frame(*hello)
    server.buffer(shared)[: len(stream)] = stream
    server.received(len(stream))
    assert server.hello == Hello(version=1, client="golden", host="example", pid=77, token="secret")
