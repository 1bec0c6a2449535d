"""Checkpoints and their training runs: access, description, deletion.

A checkpoint's folder is named after the checkpoint and the request that created it, and is never rewritten. So
replacing or deleting a checkpoint does not affect samplers of its weights: the folder is deleted once unused.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from sqlalchemy import func, select
from sqlmodel import Session as Database
from sqlmodel import col

from tx.errors import Busy, RequestError
from tx.tinker.commands import CheckpointSource
from tx.tinker.service.state import ServerState
from tx.tinker.storage.db_models import CheckpointRow, ModelRow, SamplerRow
from tx.tinker.storage.garbage import schedule_deletion
from tx.tinker.storage.store import Store
from tx.tinker.types import CheckpointKind, TinkerPath, format_sampler_id, validate_checkpoint_name

T = TypeVar("T")
TTL_SECONDS = (3600, 10 * 365 * 86400)
PAGE = 1000
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Kind of a checkpoint -> its name in listings."""


class Checkpoints:
    """Checkpoints and training runs in the database.

    Args:
        max_gb: largest total size of a tenant's checkpoints; None: no limit
    """

    def __init__(self, store: Store, state: ServerState, max_gb: float | None = None):
        self._store, self._state, self._max_gb = store, state, max_gb

    # ---- as a place to begin from

    async def source(
        self,
        tenant: str,
        path: str,
        *,
        optimizer: bool = False,
        setting: str = "path",
        pending_model_id: str | None = None,
        to_load: bool = True,
    ) -> CheckpointSource:
        """Find a checkpoint of the tenant, or a published one.

        Args:
            optimizer: require one
            pending_model_id: count saves in flight of this model: they finish before its next request
            to_load: False: only describe or download it, so it may be external

        Raises:
            RequestError: unknown checkpoint (404), external weights to load, or one without an optimizer.
        """
        place = TinkerPath.parse(path, setting)
        if to_load and place.kind == "external_weights":
            raise RequestError(
                f"{setting}: external weights can only be downloaded, not loaded; use tinker://RUN/weights/NAME "
                f"(save_weights) or tinker://RUN/sampler_weights/NAME; got {path!r}"
            )
        if optimizer and place.kind != "weights":
            raise RequestError(f"{setting} must be tinker://RUN/weights/NAME to load an optimizer; got {path!r}")
        row, model = await self._store.read(lambda database: _find(database, place))
        folder = row.folder if row is not None and (row.public or row.tenant == tenant) else None
        if place.run_id == pending_model_id and (run := self._state.runs.get(place.run_id)) is not None:
            folder = run.saving.get((place.kind, place.name), folder)
        if folder is None or model is None:
            raise RequestError(f"{setting}: no checkpoint {path!r}", 404)
        return CheckpointSource(str(place), model.model_id, model.base_model, model.lora, folder)

    async def weights_info(self, tenant: str, path: str) -> dict[str, object]:
        """Describe the adapter of a checkpoint."""
        source = await self.source(tenant, path, setting="tinker_path", to_load=False)
        return {
            "base_model": source.base_model,
            "is_lora": True,
            "lora_rank": source.lora.rank,
            "train_attn": source.lora.train_attn,
            "train_mlp": source.lora.train_mlp,
            "train_unembed": source.lora.train_unembed,
        }

    async def archive(self, tenant: str, run_id: str, kind: CheckpointKind, name: str) -> str:
        """Return the folder (path or URL) of a checkpoint."""
        path = f"tinker://{run_id}/{kind}/{name}"
        return (await self.source(tenant, path, setting="checkpoint", to_load=False)).folder

    async def check_name_is_free(self, path: TinkerPath) -> None:
        """Raises RequestError if the checkpoint exists or is being saved."""
        row = await self._store.read(lambda database: database.get(CheckpointRow, tuple(path)))
        run = self._state.runs.get(path.run_id)
        if row is not None or (run is not None and (path.kind, path.name) in run.saving):
            fix = "use another path, or overwrite=true" if path.kind == "weights" else "use another path"
            raise RequestError(f"path: the checkpoint {path!s} already exists; {fix}")

    async def reserve_space(self, tenant: str, request_id: str, kind: CheckpointKind, rank: int) -> None:
        """Count a save from now on; a save in flight counts as the tenant's largest checkpoint of its kind and rank.

        Raises:
            RequestError: the tenant's checkpoint quota is used up.
            Busy: a save of a kind and rank never saved before is in flight, so its size is unknown.
        """
        if self._max_gb is None:
            return
        saved, largest = await self._store.read(partial(_sum_sizes, tenant=tenant))
        # No await from here on: concurrent saves must count earlier ones.
        under_way = [(kind, rank) for of, kind, rank in self._state.saves.values() if of == tenant]
        num_bytes = saved + sum(largest.get(each, 0) for each in under_way)
        if num_bytes >= self._max_gb * 1e9:
            raise RequestError(
                f"path: the checkpoints of this key take {num_bytes / 1e9:.3g} GB, including {len(under_way)} saves "
                f"in progress, of at most {self._max_gb:g} GB (max_checkpoints_gb_per_tenant of the server): delete "
                "some, or save with ttl_seconds"
            )
        if not all(each in largest for each in under_way):
            raise Busy("the first save of this kind is in progress; whether this one fits depends on its size", 1.0)
        self._state.saves[request_id] = (tenant, kind, rank)

    async def free_sampler_id(self, session_id: str, number: int) -> str:
        """Raises RequestError if the sampler exists or is being saved."""
        sampler_id = format_sampler_id(session_id, number)
        row = await self._store.read(lambda database: database.get(SamplerRow, sampler_id))
        if row is not None or sampler_id in self._state.promised_samplers:
            raise RequestError(f"sampling_session_seq_id {number} of this session is in use: use the next number")
        return sampler_id

    # ---- as things to look at

    async def training_runs(self, tenant: str, limit: int = 20, offset: int = 0) -> dict[str, object]:
        """List a page of the tenant's runs, most recently used first."""
        limit = _validate_limit(limit, offset)

        def unit(database: Database) -> tuple[list[dict[str, object]], int]:
            mine = col(ModelRow.tenant) == tenant
            rows = database.scalars(
                select(ModelRow)
                .where(mine)
                .order_by(col(ModelRow.last_request_at).desc(), col(ModelRow.model_id))
                .limit(limit)
                .offset(offset)
            ).all()
            total = database.scalar(select(func.count()).select_from(ModelRow).where(mine)) or 0
            return _describe_runs(database, list(rows)), total

        runs, total = await self._store.read(unit)
        return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": total}}

    async def training_run(self, tenant: str, run_id: str) -> dict[str, object]:
        """Describe a run. Raises: RequestError 404."""
        return await self._store.read(lambda database: _describe_runs(database, [_run(database, tenant, run_id)])[0])

    async def of_run(self, tenant: str, run_id: str) -> dict[str, object]:
        """List the checkpoints of a run, newest first."""

        def unit(database: Database) -> list[CheckpointRow]:
            _run(database, tenant, run_id)
            return list(database.scalars(_build_newest_first_query().where(col(CheckpointRow.model_id) == run_id)))

        return {"checkpoints": [describe(row) for row in await self._store.read(unit)]}

    async def of_tenant(self, tenant: str, limit: int = 100, offset: int = 0) -> dict[str, object]:
        """List a page of the tenant's checkpoints, newest first."""
        limit = _validate_limit(limit, offset)

        def unit(database: Database) -> tuple[list[CheckpointRow], int]:
            mine = col(CheckpointRow.tenant) == tenant
            total = database.scalar(select(func.count()).select_from(CheckpointRow).where(mine)) or 0
            return list(database.scalars(_build_newest_first_query().where(mine).limit(limit).offset(offset))), total

        rows, total = await self._store.read(unit)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return {"checkpoints": [describe(row) for row in rows], "cursor": cursor}

    # ---- as things to change

    async def delete(self, tenant: str, run_id: str, kind: CheckpointKind, name: str) -> None:
        """Delete a checkpoint, and its folder once unused."""

        def unit(database: Database, row: CheckpointRow) -> None:
            database.delete(row)
            database.flush()
            schedule_deletion(database, [row.folder], time.time())

        await self._update_checkpoint(tenant, run_id, kind, name, unit)

    async def set_ttl(self, tenant: str, run_id: str, kind: CheckpointKind, name: str, ttl_seconds: int | None) -> None:
        """Set the seconds until a checkpoint expires; None: never."""
        shortest, longest = TTL_SECONDS
        if ttl_seconds is not None and not shortest <= ttl_seconds <= longest:
            raise RequestError(
                f"ttl_seconds must be {shortest} to {longest}, or null to never expire; got {ttl_seconds}"
            )

        def unit(database: Database, row: CheckpointRow) -> None:
            row.expires_at = None if ttl_seconds is None else time.time() + ttl_seconds

        await self._update_checkpoint(tenant, run_id, kind, name, unit)

    async def publish(self, tenant: str, run_id: str, kind: CheckpointKind, name: str, public: bool) -> None:
        """Allow or forbid other tenants to read a checkpoint."""

        def unit(database: Database, row: CheckpointRow) -> None:
            row.public = public

        await self._update_checkpoint(tenant, run_id, kind, name, unit)

    async def _update_checkpoint(
        self, tenant: str, run_id: str, kind: str, name: str, change: Callable[[Database, CheckpointRow], None]
    ) -> None:
        place = TinkerPath.parse(
            f"tinker://{run_id}/{kind}/{validate_checkpoint_name(name, 'checkpoint')}", "checkpoint"
        )

        def unit(database: Database) -> None:
            row, _ = _find(database, place)
            if row is None or row.tenant != tenant:
                raise RequestError(f"no checkpoint {str(place)!r}", 404)
            change(database, row)

        await self._store.write(unit)


def sum_bytes_by_tenant(database: Database) -> dict[str, int]:
    """Return the total size of each tenant's checkpoints."""
    size = func.sum(col(CheckpointRow.size_bytes))
    rows = database.execute(select(col(CheckpointRow.tenant), size).group_by(col(CheckpointRow.tenant)))
    return {tenant: int(num_bytes) for tenant, num_bytes in rows}


def _sum_sizes(database: Database, tenant: str) -> tuple[int, dict[tuple[str, int], int]]:
    """Return the total size of a tenant's checkpoints, and the largest by kind and rank."""
    rows = database.execute(
        select(
            col(CheckpointRow.kind),
            col(ModelRow.lora_rank),
            func.sum(col(CheckpointRow.size_bytes)),
            func.max(col(CheckpointRow.size_bytes)),
        )
        .join(ModelRow, col(ModelRow.model_id) == col(CheckpointRow.model_id))
        .where(col(CheckpointRow.tenant) == tenant)
        .group_by(col(CheckpointRow.kind), col(ModelRow.lora_rank))
    ).all()
    return sum(int(total) for *_, total, _ in rows), {(kind, rank): int(most) for kind, rank, _, most in rows}


def describe(row: CheckpointRow) -> dict[str, object]:
    """Describe a checkpoint in the protocol's format."""
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": _TYPES[row.kind],
        "time": _format_time(row.created_at),
        "tinker_path": f"tinker://{row.model_id}/{row.kind}/{row.name}",
        "size_bytes": row.size_bytes,
        "public": row.public,
        "user_metadata": row.user_metadata,
        "expires_at": None if row.expires_at is None else _format_time(row.expires_at),
    }


def _describe_runs(database: Database, rows: list[ModelRow]) -> list[dict[str, object]]:
    ids = [row.model_id for row in rows]
    last: dict[tuple[str, str], CheckpointRow] = {}
    for checkpoint in database.scalars(_build_newest_first_query().where(col(CheckpointRow.model_id).in_(ids))):
        last.setdefault((checkpoint.model_id, checkpoint.kind), checkpoint)
    return [_describe_run(row, last) for row in rows]


def _describe_run(row: ModelRow, last: dict[tuple[str, str], CheckpointRow]) -> dict[str, object]:
    weights, sampler = last.get((row.model_id, "weights")), last.get((row.model_id, "sampler_weights"))
    return {
        "training_run_id": row.model_id,
        "base_model": row.base_model,
        "model_owner": row.tenant,
        "is_lora": True,
        "lora_rank": row.lora_rank,
        "corrupted": row.status == "failed",
        "last_request_time": _format_time(row.last_request_at),
        "last_checkpoint": describe(weights) if weights else None,
        "last_sampler_checkpoint": describe(sampler) if sampler else None,
        "user_metadata": row.user_metadata,
    }


def _build_newest_first_query():  # the type of a select is long and says nothing
    return select(CheckpointRow).order_by(
        col(CheckpointRow.created_at).desc(), col(CheckpointRow.model_id), col(CheckpointRow.name)
    )


def _find(database: Database, place: TinkerPath) -> tuple[CheckpointRow | None, ModelRow | None]:
    row = database.get(CheckpointRow, (place.run_id, place.kind, place.name))
    if row is not None and row.expires_at is not None and row.expires_at < time.time():
        row = None
    return row, database.get(ModelRow, place.run_id)


def _run(database: Database, tenant: str, run_id: str) -> ModelRow:
    row = database.get(ModelRow, run_id)
    if row is None or row.tenant != tenant:
        raise RequestError(f"no training run {run_id[:200]!r}", 404)
    return row


def _validate_limit(limit: int, offset: int) -> int:
    if limit < 0 or offset < 0:
        raise RequestError(f"limit and offset must be 0 or more; got {limit} and {offset}")
    return min(limit, PAGE)


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
