"""One receiver for a test, and nothing of it left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.stand import Stand, staging_files, stands


@pytest.fixture
def stand() -> Iterator[Stand]:
    with stands() as (made,):
        yield made
    assert not staging_files(made.process.pid), "shared memory was left behind"
