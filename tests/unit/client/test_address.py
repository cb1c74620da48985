"""Addresses: all the ways to name a broker."""

from typing import Any

import pytest

from onward.client.address import Address, parse_addresses
from onward.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("localhost", [Address("tcp", "localhost", 7700)]),
        ("localhost:1", [Address("tcp", "localhost", 1)]),
        (":9000", [Address("tcp", "localhost", 9000)]),
        ("10.0.0.1:7700, b", [Address("tcp", "10.0.0.1", 7700), Address("tcp", "b", 7700)]),
        ("[::1]:7701", [Address("tcp", "::1", 7701)]),
        ("[::1]", [Address("tcp", "::1", 7700)]),
        ("fe80::1", [Address("tcp", "fe80::1", 7700)]),
        ("tcp://a:1", [Address("tcp", "a", 1)]),
        ("onward://a", [Address("tcp", "a", 7700)]),
        ("unix:/run/onward.sock", [Address("unix", "/run/onward.sock")]),
        ("file:./folder", [Address("file", "./folder")]),
        ("memory:", [Address("memory", "")]),
        ("memory:shared", [Address("memory", "shared")]),
    ],
)
def test_an_address_names_places(text: str, addresses: list[Address]) -> None:
    assert parse_addresses(text) == addresses


@pytest.mark.parametrize(
    "text", ["", " , ", "a:0", "a:65536", "a:port", "unix:", "file:", "memory:,a", "file:x,file:y"]
)
def test_what_names_no_place_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_addresses(text)


@pytest.mark.parametrize("text", [7, None, "\udcff:7700", "a" * 70 + ".example"])
def test_what_cannot_be_an_address_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_addresses(text)
