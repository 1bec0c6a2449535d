"""A database of each kind, and a store in it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from stores import opened

from tx.tinker.storage.store import Store


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.process)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path / 'tx.db'}"


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    async with opened(url, group_seconds=10.0) as store:
        yield store
