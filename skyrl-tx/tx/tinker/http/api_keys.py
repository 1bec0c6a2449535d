"""API keys and the tenants they belong to.

A key arrives as `X-API-Key` (the SDK) or as `Authorization: Bearer` (other clients).
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.datastructures import Headers

from tx.errors import ConfigError
from tx.tinker.config import EngineConfig

logger = logging.getLogger(__name__)

ENV_VARIABLE = "TX_API_KEYS"
LOCAL_TENANT = "local"
LOOPBACK_HOSTS = ("localhost", "::1")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MIN_KEY_LENGTH = 8


ADMIN = "admin"
"""The role of a key that sees what concerns all tenants."""


class Holder(NamedTuple):
    """Owner of a key."""

    tenant: str
    is_admin: bool


LOCAL = Holder(LOCAL_TENANT, True)
"""Everybody, when no keys are set."""


class ApiKeys:
    """
    Args:
        keys: a tenant's name, a key, and maybe its role, `admin`; a name may have several keys.

    Raises:
        ConfigError: a name or key that cannot be.
    """

    def __init__(self, keys: Iterable[tuple[str, ...]] = ()):
        self._salt = secrets.token_bytes(32)
        self._holders: dict[bytes, Holder] = {}
        for name, key, *roles in keys:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"name of an API key must be 1 to 64 letters, digits, '_', '.', '-'; got {name!r}")
            if len(key) < _MIN_KEY_LENGTH or not key.isascii() or any(c.isspace() for c in key):
                raise ConfigError(f"API key of {name} must be {_MIN_KEY_LENGTH} or more ASCII characters, no spaces")
            if roles not in ([], [ADMIN]):
                raise ConfigError(
                    f"role of an API key of {name} must be {ADMIN!r} or left out; got {' '.join(roles)!r}"
                )
            holder = Holder(name, bool(roles))
            other = self._holders.setdefault(self._compute_digest(key), holder)
            if other.tenant != name:
                raise ConfigError(f"{name} and {other.tenant} have the same API key; keys must be unique")
            if other != holder:
                raise ConfigError(
                    f"an API key of {name} is listed both with and without the role {ADMIN!r}; remove one of them"
                )
            if not key.startswith("tml-"):
                logger.warning("the API key of %s does not begin with 'tml-', which the tinker SDK requires", name)

    def __bool__(self) -> bool:
        return bool(self._holders)

    def find_holder(self, key: str) -> Holder | None:
        """Return the holder of a key, or None. Constant-time in the keys: compares digests with a secret salt."""
        return self._holders.get(self._compute_digest(key))

    def _compute_digest(self, key: str) -> bytes:
        return hmac.digest(self._salt, key.encode(), hashlib.sha256)


def read_api_keys(config: EngineConfig, env: Mapping[str, str] | None = None) -> ApiKeys:
    """Read the API keys from `api_keys_file`, else from TX_API_KEYS, else none.

    Raises:
        ConfigError: the keys cannot be read, or are missing and the server would listen beyond loopback.
    """
    if config.api_keys_file is not None:
        keys = ApiKeys(_read_file(config.api_keys_file))
        if not keys:
            raise ConfigError(f"--api-keys-file: {config.api_keys_file} has no keys; add one per line, as `NAME KEY`")
    else:
        keys = ApiKeys(_parse_keys((os.environ if env is None else env).get(ENV_VARIABLE, "")))
    if not keys and not is_loopback(config.host):
        raise ConfigError(
            f"--host {config.host} would accept requests from anyone in the network: set --api-keys-file FILE (lines "
            f"`NAME KEY`, keys beginning with tml-) or {ENV_VARIABLE}=name=key,…, or use --host 127.0.0.1"
        )
    return keys


def is_loopback(host: str) -> bool:
    return host in LOOPBACK_HOSTS or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))


def extract_key(headers: Headers) -> str:
    """Return the key of a request; empty if none."""
    if key := headers.get("x-api-key"):
        return key.strip()
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    return ""


def _read_file(path: Path) -> list[tuple[str, ...]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys-file: cannot read {path}: {error}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 and words[2:] != [ADMIN]:
            raise ConfigError(
                f"--api-keys-file: line {number} of {path} must be `NAME KEY` or `NAME KEY {ADMIN}`; "
                f"it has {len(words)} words"
            )
        keys.append(tuple(words))
    return keys


def _parse_keys(text: str) -> list[tuple[str, ...]]:
    keys = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, key = part.partition("=")
        if not equals:
            raise ConfigError(f"{ENV_VARIABLE} must be name=key pairs separated by commas; one of them has no '='")
        name, *role = name.split(":")
        keys.append((name, key, *role))
    return keys
