"""A real service over a real sqlite file, and clients of the application made of it."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from stores import service_of

from tx.tinker.base_model import read_base_model
from tx.tinker.config import EngineConfig
from tx.tinker.http.api_keys import ApiKeys
from tx.tinker.http.app import create_app
from tx.tinker.service.engine_link import EngineTimeouts
from tx.tinker.service.service import TinkerService
from tx.tinker.storage.folders import Folders

KEYS = {
    "anna": "tml-anna-key",
    "bela": "tml-bela-key",
    "admin": "tml-admin-key",
    "stranger": "tml-strange-key",
    "nobody": "",
}
Served = Callable[..., Awaitable[httpx.AsyncClient]]


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> EngineConfig:
    return EngineConfig(
        base_model=str(tiny_model),
        served_model_name=["tiny"],
        state_dir=tmp_path / "state",
        checkpoints_base=str(tmp_path / "checkpoints"),
        max_body_mb=1,
    )


def an_engine_that_is_still_starting(address: str) -> list[str]:
    return [sys.executable, "-c", "import time; time.sleep(120)"]


@pytest.fixture
async def service(config: EngineConfig) -> AsyncIterator[TinkerService]:
    starting = {"command": an_engine_that_is_still_starting, "timeouts": EngineTimeouts(stop=0.01)}
    service = service_of(config, read_base_model(config.base_model), **starting)
    await service.start()
    yield service
    await service.close()


@pytest.fixture
async def served(config: EngineConfig, service: TinkerService) -> AsyncIterator[Served]:
    """Create a client of the application, with API keys (of anna, bela, an admin) if a tenant is given."""
    async with AsyncExitStack() as stack:
        apps: dict[bool, Any] = {}

        async def client(whose: str | None = None, **settings: Any) -> httpx.AsyncClient:
            folders = Folders(config.checkpoints_base, config.state_folder / "cache")
            facts = read_base_model(config.base_model)
            with_keys = whose is not None
            if with_keys not in apps or settings:
                of_tenants = [(name, KEYS[name]) for name in ("anna", "bela")]
                keys = ApiKeys([*of_tenants, ("operator", KEYS["admin"], "admin")] if with_keys else [])
                apps[with_keys] = create_app(service, config.model_copy(update=settings), facts, folders, keys)
            headers = {"X-API-Key": KEYS[whose]} if whose not in (None, "nobody") else {}
            transport = httpx.ASGITransport(apps[with_keys])
            made = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=headers)
            return await stack.enter_async_context(made)

        yield client


@pytest.fixture
async def client(served: Served) -> httpx.AsyncClient:
    return await served()
