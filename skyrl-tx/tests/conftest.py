"""Tiny real things that many tests use: a base model with a tokenizer, as a folder; a PostgreSQL server."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads of one process fight over two cores

import pytest

from skyrl_train.utils.cpu_numerics import prepare_cpu

prepare_cpu()
sys.path.insert(0, str(Path(__file__).parent))  # for the helpers in this folder; importlib mode does not


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 0.1M random weights (2 layers, context 512, its own output layer) and a tokenizer of one token a
    character (99 tokens: 0 `<pad>`, 1 `<end>` = EOS, 2 `<start>`, newline and printable ASCII), as a folder."""
    from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    tokenizer = build_character_tokenizer()
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 64, "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    build_tiny_qwen3(scale=3.0, tie_word_embeddings=False, **shape).save_pretrained(folder)
    return folder


class PostgresServer:
    """A real server of this test run, on a Unix socket in a folder of its own. It refuses to run as root, so root has
    it run as the user `postgres`, or `nobody`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tx-pg-", dir="/tmp"))
        self._as_user: dict[str, Any] = {"cwd": self._folder}
        if os.geteuid() == 0:
            import pwd

            names = {entry.pw_name: entry for entry in pwd.getpwall()}
            user = names.get("postgres") or names["nobody"]
            os.chown(self._folder, user.pw_uid, user.pw_gid)
            self._as_user |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        command = ["initdb", "--auth=trust", "--username=postgres", "--no-sync", "--encoding=UTF8", "-D", "data"]
        subprocess.run(command, check=True, capture_output=True, timeout=120, **self._as_user)
        self.start()

    def start(self) -> None:
        settings = {"listen_addresses": "", "unix_socket_directories": str(self._folder), "shared_buffers": "16MB"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with open(self._folder / "log", "ab") as log:
            command = ["postgres", "-D", "data", *options]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, **self._as_user)
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < deadline, (self._folder / "log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)  # ends all sessions
        self._process.wait(timeout=60)

    def run(self, sql: str, database: str = "postgres") -> list[Any]:
        """Rows of a statement."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(sql)  # pyright: ignore[reportArgumentType, reportCallIssue]
            return cursor.fetchall() if cursor.description else []

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self._folder}"

    def close(self) -> None:
        if self._process.poll() is None:
            self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        import psycopg

        try:
            self.run("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server; skipped where its programs or its driver are not installed."""
    pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed (skyrl-tx[postgres])")
    if not (shutil.which("initdb") and shutil.which("postgres")):
        pytest.skip("initdb and postgres are not in PATH")
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """A new database of it."""
    name = f"tx_{secrets.token_hex(4)}"
    postgres.run(f"CREATE DATABASE {name}")
    yield postgres.url(name)
    postgres.run(f"DROP DATABASE {name} WITH (FORCE)")
