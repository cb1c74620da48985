"""What the tests of pipe and network share: the two kinds of protocol."""

import pytest

from .recording import Buffered, Plain


@pytest.fixture(params=[Plain, Buffered])
def kind(request: pytest.FixtureRequest) -> type[Plain] | type[Buffered]:
    found: type[Plain] | type[Buffered] = request.param
    return found
