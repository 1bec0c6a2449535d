"""Stores that are open for a block, what they hold, and services over them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlmodel import Session, select

from tx.tinker.base_model import BaseModelFacts
from tx.tinker.config import EngineConfig
from tx.tinker.service.service import TinkerService
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.db_models import SessionRow
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.store import Store


@asynccontextmanager
async def opened(url: str, **settings: Any) -> AsyncIterator[Store]:
    store = Store(url, **settings)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


def names(session: Session) -> list[str]:
    return sorted(session.exec(select(SessionRow.session_id)))


def service_of(config: EngineConfig, facts: BaseModelFacts, **more: Any) -> TinkerService:
    """Make a service over the folders of its settings."""
    state = config.state_folder
    state.mkdir(parents=True, exist_ok=True)
    folders = Folders(config.checkpoints_base, state / "cache")
    return TinkerService(config, facts, Store(config.store_url), Blobs(state / "blobs"), folders, **more)
