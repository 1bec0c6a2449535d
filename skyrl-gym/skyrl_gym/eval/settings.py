"""Settings of an evaluation. Knows neither endpoints nor environments."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from skyrl_gym.error import Error


class SettingsError(Error):
    """A setting that makes no sense; the text names its flag."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Settings of one evaluation."""

    env: str
    """Registered id, or package.module:Class."""
    base_url: str
    """Base URL of an OpenAI-compatible server, including `/v1`."""
    model: str
    data: Path | None = None
    """File of rows with a column `prompt`: .parquet, .jsonl or .json. None: the environment's own examples."""
    output: Path = Path("eval")
    """Folder of episodes.jsonl, settings.json and summary.json. Episodes that are already recorded there are not
    repeated."""
    num_samples: int = 1
    """Episodes per task."""
    pass_k: tuple[int, ...] = (1,)
    limit: int | None = None
    """Number of tasks to evaluate, from the first; None: all."""
    max_turns: int | None = None
    """Maximum number of turns passed to the environment, in place of the row's."""
    env_config: Mapping[str, object] = field(default_factory=dict)
    success_at: float = 1.0
    """Outcome reward from which an episode counts as a success in pass@k."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """Maximum number of tokens per turn."""
    stop: tuple[str, ...] = ()
    """Stop strings, which end a turn. They remain in the text that the environment sees."""
    seed: int | None = None
    """Random seed of environments, and of requests to servers that accept `seed`."""
    extra_body: Mapping[str, object] = field(default_factory=dict)
    """Further fields of each request."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; no key is sent if it is not set."""
    concurrency: int = 16
    """Number of concurrent episodes."""
    max_retries: int = 5
    """Maximum number of retries of a request that failed because of the server or the network."""
    retry_seconds: float = 1.0
    """Wait before the first retry; it doubles each time, up to a minute."""
    request_seconds: float = 600.0
    episode_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for flag, value, lowest in (
            ("--num-samples", self.num_samples, 1),
            ("--concurrency", self.concurrency, 1),
            ("--max-retries", self.max_retries, 0),
            ("--limit", self.limit, 1),
            ("--max-turns", self.max_turns, 1),
            ("--max-tokens", self.max_tokens, 1),
        ):
            if value is not None and value < lowest:
                raise SettingsError(f"{flag} must be at least {lowest}; got {value}")
        for flag, value in (
            ("--request-timeout", self.request_seconds),
            ("--episode-timeout", self.episode_seconds),
        ):
            if value <= 0:
                raise SettingsError(f"{flag} must be positive; got {value:g}")
        if not self.base_url.startswith(("http://", "https://")):
            raise SettingsError(f"--base-url must begin with http:// or https://; got {self.base_url!r}")
        for k in self.pass_k:
            if not 1 <= k <= self.num_samples:
                raise SettingsError(
                    f"--pass-k {k} needs at least {max(k, 1)} samples of each task; --num-samples is {self.num_samples}"
                )

    def identity(self, data_digest: str) -> dict[str, object]:
        """Return the settings that episodes depend on, by flag. Equal in one folder; samples and tasks may grow."""
        named = {
            "--env": self.env,
            "--model": self.model,
            "--data": data_digest,
            "--max-turns": self.max_turns,
            "--env-config": dict(self.env_config),
            "--success-at": self.success_at,
            "--temperature": self.temperature,
            "--top-p": self.top_p,
            "--max-tokens": self.max_tokens,
            "--stop": list(self.stop),
            "--seed": self.seed,
            "--extra-body": dict(self.extra_body),
        }
        return json.loads(json.dumps(named))

    def as_json(self) -> dict[str, object]:
        """Return all of them, with paths as text."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
