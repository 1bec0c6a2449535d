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

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers beside this file; importlib mode does not

CHAT_TEMPLATE = (
    "{% for m in messages %}<start>{{ m['role'] }}:{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 0.1M random weights (2 layers, context 512, its own output layer) and a tokenizer of one token a
    character (99 tokens: 0 `<pad>`, 1 `<end>` = EOS, 2 `<start>`, newline and printable ASCII), as a folder."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    symbols = ["<pad>", "<end>", "<start>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<start>"],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(symbols),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():  # far from uniform, so that log-probs differ enough to be worth comparing
        parameter.data.mul_(3.0)
    model.save_pretrained(folder)
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
