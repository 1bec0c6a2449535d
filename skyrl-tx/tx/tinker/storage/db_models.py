"""Database tables: the authoritative state, of which both processes hold copies.

Large bytes (training batches, results) are stored in files (`blobs.py`), small ones in the row.
Times are seconds since the epoch (float, UTC). Integers from users are 64 bits wide: PostgreSQL's default is 32.
"""

from sqlalchemy import JSON, BigInteger, Column, Index, LargeBinary, MetaData, UniqueConstraint, false, text
from sqlmodel import Field, SQLModel

from tx.tinker.types import LoraSpec

SCHEMA_VERSION = 3
"""Version of the tables below. A database of another version is refused at the start; a test detects a change of the
tables without a new version."""


MIGRATIONS = {
    1: {
        "sqlite": "ALTER TABLE requests ADD COLUMN content BLOB",
        "postgresql": "ALTER TABLE requests ADD COLUMN content BYTEA",
    },
    2: dict.fromkeys(
        ("sqlite", "postgresql"), "ALTER TABLE models ADD COLUMN share_experts BOOLEAN DEFAULT false NOT NULL"
    ),
}
"""Statement that makes the next version's tables of a version's, by database."""


class Row(SQLModel):
    """Base of our tables, with separate metadata, so that only these tables are created."""

    metadata = MetaData()


class SchemaRow(Row, table=True):
    """One row: what this database is."""

    __tablename__ = "schema"  # pyright: ignore[reportAssignmentType]
    version: int = Field(primary_key=True)
    database_id: str
    """Drawn when the database was made; files beside it say whose they are by it (`Blobs.claim`)."""
    created_at: float
    engine_at_work: bool = False
    """An engine may have been told of work, and has neither been seen to die nor been stopped since: true at the start
    of a server if the one before died together with its engine."""


class SessionRow(Row, table=True):
    """One `ServiceClient` of a user."""

    __tablename__ = "sessions"  # pyright: ignore[reportAssignmentType]
    session_id: str = Field(primary_key=True)
    tenant: str = Field(index=True)
    tags: list[str] = Field(default_factory=list, sa_column=Column(JSON, default=list))
    user_metadata: dict[str, object] | None = Field(default=None, sa_column=Column(JSON))
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    created_at: float
    last_heartbeat_at: float
    ended_at: float | None = Field(default=None, index=True)
    end_reason: str | None = None
    """`finished`, `expired`"""


class ModelRow(Row, table=True):
    """A training run: one adapter and its optimizer. It outlives its session as a run that has checkpoints."""

    __tablename__ = "models"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("session_id", "model_seq_id"),)
    model_id: str = Field(primary_key=True)
    """`{session_id}:train:{model_seq_id}`"""
    tenant: str = Field(index=True)
    session_id: str = Field(foreign_key="sessions.session_id", index=True)
    model_seq_id: int = Field(sa_type=BigInteger)
    base_model: str
    """Name of the base model as the user gave it."""
    lora_rank: int
    lora_seed: int = Field(sa_type=BigInteger)
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    share_experts: bool = Field(default=False, sa_column_kwargs={"server_default": false()})
    user_metadata: dict[str, object] | None = Field(default=None, sa_column=Column(JSON))
    status: str = Field(index=True)
    """`live`, `unloaded`, `failed` (its creation was)"""
    created_at: float
    last_request_at: float
    next_seq: int = Field(default=0, sa_type=BigInteger)
    """Every seq below is decided: executed, or refused."""
    snapshot: str | None = None
    """Folder of its last durable state."""
    snapshot_seq: int = Field(default=-1, sa_type=BigInteger)
    origin: str | None = None
    """The tinker path it was created from."""

    @property
    def lora(self) -> LoraSpec:
        return LoraSpec(
            rank=self.lora_rank,
            seed=self.lora_seed,
            train_attn=self.train_attn,
            train_mlp=self.train_mlp,
            train_unembed=self.train_unembed,
            share_experts=self.share_experts,
        )


class RequestRow(Row, table=True):
    """Request that is executed once, with a result to be fetched."""

    __tablename__ = "requests"  # pyright: ignore[reportAssignmentType]
    # Few indexes: each costs at every request. Those of the constraints find a model's or a sampler's requests too.
    __table_args__ = (
        UniqueConstraint("model_id", "seq"),
        UniqueConstraint("sampler_id", "sampler_seq"),
        Index(
            "ix_requests_with_order",
            "status",
            sqlite_where=text('"order" IS NOT NULL'),
            postgresql_where=text('"order" IS NOT NULL'),
        ),
    )
    request_id: str = Field(primary_key=True)
    tenant: str
    kind: str
    """`create`, `train`, `optimize`, `save`, `load`, `unload`, `sample`"""
    model_id: str | None = None
    seq: int | None = Field(default=None, sa_type=BigInteger)
    sampler_id: str | None = None
    sampler_seq: int | None = Field(default=None, sa_type=BigInteger)
    order: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    """Command for the engine (msgpack of `engine.messages`), without the payload; None once it is no longer needed."""
    payload: str | None = None
    """Blob of the payload; deleted with the order."""
    content: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    """Hash of what was asked (`service.repetitions`)."""
    status: str = Field(index=True)
    """`pending`, `done`, `failed`, `refused` (a 4xx that used up its seq)"""
    result: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    result_blob: str | None = None
    error: str | None = None
    category: str | None = None
    http_status: int | None = None
    """HTTP status of a refusal."""
    num_deaths: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    """Engine crashes while this was running (`service.crash_bisector`)."""
    created_at: float
    completed_at: float | None = Field(default=None, index=True)
    delivered_at: float | None = Field(default=None, index=True)
    """First time."""


class CheckpointRow(Row, table=True):
    """A named checkpoint."""

    __tablename__ = "checkpoints"  # pyright: ignore[reportAssignmentType]
    model_id: str = Field(primary_key=True)
    kind: str = Field(primary_key=True)
    """`weights`, `sampler_weights`, `external_weights`"""
    name: str = Field(primary_key=True)
    tenant: str = Field(index=True)
    folder: str
    created_at: float
    expires_at: float | None = Field(default=None, index=True)
    size_bytes: int = Field(default=0, sa_type=BigInteger)
    public: bool = False
    user_metadata: dict[str, object] | None = Field(default=None, sa_column=Column(JSON))


class SamplerRow(Row, table=True):
    """A sampling session: weights that never change, and a counter of requests."""

    __tablename__ = "samplers"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("session_id", "sampling_session_seq_id"),)
    sampler_id: str = Field(primary_key=True)
    tenant: str = Field(index=True)
    session_id: str = Field(index=True)
    sampling_session_seq_id: int = Field(sa_type=BigInteger)
    base_model: str
    model_path: str | None = None
    """The tinker path it was made from, if it has a name."""
    model_id: str | None = None
    """The run whose weights it has."""
    folder: str | None = None
    """The adapter's; None: the base model."""
    ephemeral: bool = False
    """The folder belongs only to this sampler and is deleted with it."""
    created_at: float


class ScheduledDeletionRow(Row, table=True):
    """Folder scheduled for deletion, recorded in the transaction that removed its last row, so that a crash before the
    deletion leaves no orphan. Never write to such a folder again.
    """

    __tablename__ = "doomed_folders"  # pyright: ignore[reportAssignmentType]
    folder: str = Field(primary_key=True)
    doomed_at: float
