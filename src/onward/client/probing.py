"""Finding out what listens at an address that closed the connection without a word.

A server that expects TLS often closes when it gets something else, and sends nothing: only trying
tells. It is tried once, and only by a client that was never connected.
"""

from __future__ import annotations

import asyncio
import ssl

from onward.client.address import Address

PROBE_S = 2.0


async def speaks_tls(address: Address) -> bool:
    """Return True if a TLS server answers at the address, whatever certificate it has."""
    if address.scheme != "tcp":
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: only the handshake is of interest
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(address.place, address.port, ssl=context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True
