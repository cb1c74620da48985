"""What a connection costs in its process: all of one thread receive into one buffer."""

import gc
import tracemalloc

from onward.client.link import Link

LINKS = 50
BYTES_MAX = 32 << 10


async def test_a_connection_costs_little_memory() -> None:
    links = [Link(name="first", token=None)]
    links[0].get_buffer(-1)  # the buffer that is shared
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        links += [Link(name="test", token=None) for _ in range(LINKS)]
        for link in links:
            link.get_buffer(-1)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / LINKS < BYTES_MAX
