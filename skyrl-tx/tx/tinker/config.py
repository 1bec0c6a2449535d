"""The server's settings: one home of every default; the command line (`command_line.py`) is made from it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """Settings of `python -m tx.tinker.api`, with `_` as `-`. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    base_model: str = Field(min_length=1)
    """Local folder, or name on the Hugging Face hub. Requests name the model by it."""
    served_model_name: list[str] = Field(default_factory=list)
    """Further name of the same weights; repeatable."""
    host: str = "127.0.0.1"
    """Address to listen on. Addresses other than loopback require API keys."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0: any free port."""
    backend: Literal["torch", "skyrl_train"] = "torch"
    """Backend that trains and samples."""
    backend_config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the backend, as JSON."""
    checkpoints_base: str = "/tmp/tx_checkpoints"
    """Location of checkpoints: a folder, or an fsspec URL such as s3://bucket/folder."""
    state_dir: Path | None = None
    """Local folder of the database, payloads and snapshots. Default: `~/.local/state/tx`."""
    database_url: str | None = None
    """Database: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME. Default: sqlite in the state folder."""
    api_keys_file: Path | None = None
    """File of API keys, with lines `NAME KEY`, or `NAME KEY admin` for a key that sees all tenants in `/metrics`;
    requests without one of the keys get status 401. Without a file, TX_API_KEYS (`name=key,…`, `name:admin=key`) is
    read. Without both, no keys are needed, which is allowed on loopback only."""
    session_timeout_sec: int = Field(default=300, ge=-1)
    """Time without a heartbeat after which a session ends and its models are unloaded, in seconds. -1: never."""
    session_cleanup_interval_sec: int = Field(default=60, ge=-1)
    """Interval of the search for such sessions, in seconds. -1: never."""
    result_ttl_sec: int = Field(default=3600, ge=0)
    """Time for which a result can be fetched again after the first time, in seconds."""
    max_body_mb: int = Field(default=64, ge=1)
    """Maximum size of a request's body, in MB; larger requests are refused (413) before they are read."""
    max_bodies_mb: int = Field(default=1024, ge=1)
    """Maximum total size of request bodies being read or parsed, in MB. A tenant may use as much as is still free, so
    one alone at most half of it; beyond that, status 429. Bodies up to 64 KiB are always admitted."""
    max_pending_per_tenant: int = Field(default=4096, ge=1)
    """Maximum number of unfinished requests per tenant; beyond that, status 429."""
    max_sample_tokens_pending: int = Field(default=4_000_000, ge=1)
    """Maximum number of prompt and response tokens of pending sampling requests, of all tenants; beyond that, tenants
    above their share get status 429."""
    max_models_per_tenant: int | None = Field(default=None, ge=1)
    """Maximum number of live models per tenant; beyond that, creating one is refused. Default: no limit."""
    max_checkpoints_gb_per_tenant: float | None = Field(default=None, gt=0)
    """Maximum total size of a tenant's named checkpoints, in GB, pending saves included; beyond it, saves with a name
    are refused. Default: no limit."""
    max_tokens_per_minute_per_tenant: int | None = Field(default=None, ge=1)
    """Maximum number of tokens per minute and tenant: of data that are trained on or scored, of prompts and responses
    (a sample counts with `max_tokens` until it is done). Beyond a minute's tokens at once, status 429 with the time to
    wait; one request with more than four minutes' tokens of data is refused. Default: no limit."""
    keep_samplers: int = Field(default=16, ge=1)
    """Number of the newest unnamed samplers (`save_weights_and_get_sampling_client`) kept per model. Older ones are
    deleted once they are idle; named weights stay."""
    sampler_idle_sec: int = Field(default=600, ge=0)
    """Time without a request after which such an older sampler is deleted, in seconds."""
    stable_reinforce_as: Literal["importance_sampling", "ppo", "cispo", "gspo"] | None = None
    """Loss computed for clients that ask for `stable_reinforce`, which exists at the hosted service only, with other
    results than there; `record_stability_info` is then accepted without effect. Default: both are refused."""
    keep_samples: int = Field(default=0, ge=0)
    """Number of the last samples of each optimizer step kept for `tx console`: prompts and responses of clients, as
    text, in the state folder (up to twice as many until some are dropped)."""
    keep_samples_mb: int = Field(default=16, ge=1)
    """Maximum size of a model's kept samples, in MB; those of the earliest steps are dropped first."""
    max_runs_gb: float = Field(default=10.0, gt=0)
    """Maximum total size of the run folders in the state folder (curves, logs, kept samples), in GB. Beyond it those of
    unloaded models are removed, longest unchanged first."""
    share_expert_matrices: bool = False
    """Experts of a layer share, in adapters of new models, A of `gate_proj`, A of `up_proj` and B of `down_proj`: 3.6
    times fewer numbers for Qwen3-30B-A3B. Files hold a copy for each expert, as peft and engines read them. A model
    that loads a checkpoint takes its layout."""
    seq_gap_timeout_sec: int = Field(default=300, ge=1)
    """Time after which a request fails whose predecessor has not arrived, in seconds."""

    pass_timeout_seconds: int = Field(default=1800, ge=1)
    """Maximum duration of one training pass or sampling step, in seconds. An engine that takes longer is restarted, and
    pending requests are repeated. A request that is present at every such timeout fails."""
    standby_engine: bool = True
    """Keep a second process with the engine's imports, about 0.6 GB: after a crash, the next engine starts seconds
    sooner."""

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
        """Names of the model accepted in requests; the first is its own."""
        return list(dict.fromkeys([self.base_model, *self.served_model_name]))
