"""A server with the scripted engine and its users. Makes this folder's modules importable: importlib mode does not, and
spawned processes take the path along."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from service_users import Client, running

from tx.tinker.service.service import TinkerService


@pytest.fixture
async def service(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[TinkerService]:
    """Start a service, with the settings of an indirect parameter, if there is one."""
    async with running(tmp_path, **getattr(request, "param", {})) as service:
        yield service


@pytest.fixture
async def alice(service: TinkerService) -> Client:
    return await Client(service).begin()


@pytest.fixture
async def bob(service: TinkerService) -> Client:
    return await Client(service, "bob").begin()


@pytest.fixture
async def model(alice: Client) -> str:
    """Create a model of alice."""
    return await alice.model()
