"""The server's settings: one home of every default; the command line (`command_line.py`) is made from it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """Settings of `python -m tx.tinker.api`, with `_` as `-`. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    base_model: str = Field(min_length=1)
    """A local folder or a hub name. Requests name the model by it."""
    served_model_name: list[str] = Field(default_factory=list)
    """A further name for the same weights; repeatable."""
    host: str = "127.0.0.1"
    """The address to listen on. Others than loopback need API keys."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free one."""
    backend: Literal["torch", "skyrl_train"] = "torch"
    """What computes."""
    backend_config: dict[str, Any] = Field(default_factory=dict)
    """JSON; the backend's own settings."""
    checkpoints_base: str = "/tmp/tx_checkpoints"
    """A folder, or an fsspec URL such as s3://bucket/folder."""
    state_dir: Path | None = None
    """Local folder of database, payloads and snapshots; default `~/.local/state/tx`."""
    database_url: str | None = None
    """sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME; default sqlite in the state folder."""
    api_keys_file: Path | None = None
    """Lines `NAME KEY`, or `NAME KEY admin` for a key that sees all tenants in `/metrics`; requests
    without one of the keys are answered 401. Without a file TX_API_KEYS (`name=key,…`, `name:admin=key`) counts, and
    without both no keys are needed, which is allowed on loopback only."""
    session_timeout_sec: int = Field(default=300, ge=-1)
    """A session without heartbeat for so long ends, and its models are unloaded; -1: never."""
    session_cleanup_interval_sec: int = Field(default=60, ge=-1)
    """How often such sessions are looked for; -1: never."""
    result_ttl_sec: int = Field(default=3600, ge=0)
    """A result may be fetched again for so long after it was first."""
    max_body_mb: int = Field(default=64, ge=1)
    """Larger requests are refused (413) before they are read."""
    max_bodies_mb: int = Field(default=1024, ge=1)
    """Most bytes of request bodies being read or parsed, of all clients, counted as they arrive. A tenant may have as
    many as are still free, so one alone half of it; above, 429. Bodies up to 64 KiB are always let in."""
    max_pending_per_tenant: int = Field(default=4096, ge=1)
    """Requests accepted and not done; above, 429."""
    max_sample_tokens_pending: int = Field(default=4_000_000, ge=1)
    """Prompt and answer tokens of samples under way, of all tenants; above, 429 for those above their share."""
    seq_gap_timeout_sec: int = Field(default=300, ge=1)
    """A request whose predecessor never arrives fails after this."""

    pass_timeout_seconds: int = Field(default=1800, ge=1)
    """An engine that is at one training pass, or one step of sampling, for longer hangs: it is ended, and the next one
    does again what was under way. A request that is there whenever this happens fails."""
    standby_engine: bool = True
    """Keep a second process that has done the engine's imports, but holds no model: when the engine dies, the next one
    starts seconds sooner. It costs the memory of the imports, about 0.6 GB."""

    @property
    def state_folder(self) -> Path:
        """Folder of the server's own files."""
        return self.state_dir or Path.home() / ".local" / "state" / "tx"

    @property
    def store_url(self) -> str:
        """URL of the database."""
        return self.database_url or f"sqlite:///{self.state_folder.absolute() / 'tx.db'}"

    @property
    def served_names(self) -> list[str]:
        """Every name under which requests may ask for the model, the first is its own."""
        return list(dict.fromkeys([self.base_model, *self.served_model_name]))
