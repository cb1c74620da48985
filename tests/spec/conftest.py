"""What all promises share: the engine they are kept on."""

from pathlib import Path

import pytest

from .engines import Engine, file_engine, memory_engine


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    return memory_engine() if request.param == "memory" else file_engine(tmp_path)
