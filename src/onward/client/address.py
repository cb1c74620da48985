"""Where a broker is, as text.

localhost:7700            one broker; the port may be left out; `tcp://` may stand before it
a:7700,b:7700             several nodes of one history; the one that takes writes is used
unix:/run/onward.sock     a Unix socket
file:./folder             a broker inside this process, on that folder
memory:                   a broker inside this process, in memory: for tests
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from onward.errors import InvalidRequest

PORT = 7700

Scheme = Literal["tcp", "unix", "file", "memory"]


class Address(NamedTuple):
    """One place to connect to."""

    scheme: Scheme
    place: str
    """Host, path or name, as the scheme says."""
    port: int = 0

    def __str__(self) -> str:
        return (
            f"{self.place}:{self.port}" if self.scheme == "tcp" else f"{self.scheme}:{self.place}"
        )


def parse_addresses(text: str) -> list[Address]:
    """Return the places that `text` names, in its order.

    >>> [str(address) for address in parse_addresses("a:1, b, [::1]:9")]
    ['a:1', 'b:7700', '::1:9']
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"an address is text, not {type(text).__name__}")
    addresses = [_parse(part.strip()) for part in text.split(",") if part.strip()]
    if not addresses:
        raise InvalidRequest("an address names a host, for example 'localhost:7700'")
    if len(addresses) > 1 and any(address.scheme in ("file", "memory") for address in addresses):
        raise InvalidRequest("a 'file:' or 'memory:' address stands alone")
    return addresses


def _parse(text: str) -> Address:
    for scheme in ("unix", "file", "memory"):
        if text.startswith(f"{scheme}:"):
            place = text.removeprefix(f"{scheme}:")
            if not place and scheme != "memory":
                raise InvalidRequest(f"address {text!r} names no path")
            return Address(scheme, place)
    text = text.removeprefix("tcp://").removeprefix("onward://")
    scheme, found, rest = text.partition("://")
    if found:
        raise InvalidRequest(
            f"address {text!a}: an address has no scheme {scheme!a}; write it as {rest!a}"
        )
    if text == "memory":
        raise InvalidRequest("address 'memory' is a host: did you mean 'memory:'?")
    host, port = _split_port(text)
    try:
        host.encode("idna")
    except UnicodeError:
        raise InvalidRequest(f"address {text!a} names no host that there could be") from None
    return Address("tcp", host or "localhost", port)


def _split_port(text: str) -> tuple[str, int]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:
        return text, PORT
    else:
        host, _, port = text.partition(":")
    if not port:
        return host, PORT
    if not port.isdigit() or not 0 < int(port) < 65_536:
        raise InvalidRequest(f"address {text!r} has no valid port")
    return host, int(port)
