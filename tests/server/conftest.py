from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.servers import Server


@pytest.fixture(scope="session")
def shared() -> Iterator[Server]:
    """A healthy server that tests use together; it must be idle and quiet at the end."""
    server = Server("--enable-ui", "--max-num-seqs", "64", delay=0.001)
    yield server
    server.stop()
