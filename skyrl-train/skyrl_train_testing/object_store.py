"""Local object store with the S3 protocol: moto's server in a separate process."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from skyrl_train.inference_engines.server_child import ServerChild

BUCKET = "s3://bucket"
_START_SECONDS = 60.0


@dataclass(frozen=True)
class ObjectStore:
    """A server and what processes that use it need in their environment."""

    pid: int
    environment: dict[str, str]


@contextmanager
def object_store(log: Path) -> Iterator[ObjectStore]:
    """Start a server with the bucket `BUCKET`. This process and its children use it for `s3://` until the end."""
    server = ServerChild("moto's server", [sys.executable, "-m", "moto.server"], log, {})
    environment = {
        "AWS_ENDPOINT_URL_S3": server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        server.wait_until_ready("/moto-api/", _START_SECONDS)
        httpx.put(f"{server.url}/{BUCKET.removeprefix('s3://')}", timeout=10).raise_for_status()
        yield ObjectStore(server.pid, environment)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
        server.end()
