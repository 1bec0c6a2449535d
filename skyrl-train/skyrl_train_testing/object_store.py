"""An object store with Amazon's protocol on this machine: moto's server in a process of its own."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.distributed.process_group import free_port

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
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with open(log, "wb") as output:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        _make_bucket(f"{url}/{BUCKET.removeprefix('s3://')}", process, log)
        yield ObjectStore(process.pid, environment)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
        process.kill()
        process.wait()


def _make_bucket(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"moto's server does not answer: {log.read_text()[-2000:]}") from error
            time.sleep(0.1)
