import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.utils.process_log import log_level, read_log_tail

TALKATIVE = """
import ctypes, os, subprocess, sys
from skyrl_train.utils.process_log import capture_output
capture_output(sys.argv[1])
print("from Python")
print("an error", file=sys.stderr)
os.write(1, b"from below Python\\n")
subprocess.run(["echo", "from a child"], check=True)
libc = ctypes.CDLL(None)
libc.puts(b"from C")
libc.fflush(None)
raise ValueError("the end")
"""


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


def test_process_log_captures_all_output(tmp_path: Path):
    path = tmp_path / "logs of {step} {time}" / "policy_rank_0.log"  # loguru takes names for format strings
    process = run_python(TALKATIVE, path)
    assert process.returncode == 1
    assert process.stdout == process.stderr == ""
    header, *lines = path.read_text().splitlines()
    assert header.startswith("=== process ")
    assert lines[:5] == ["from Python", "an error", "from below Python", "from a child", "from C"]
    assert read_log_tail(path, num_lines=1) == "ValueError: the end"


def test_restarted_process_appends_with_new_header(tmp_path: Path):
    path = tmp_path / "engine_0.log"
    for _ in range(2):
        run_python("import sys; from skyrl_train.utils.process_log import capture_output as c; c(sys.argv[1])", path)
    assert [line[:11] for line in path.read_text().splitlines()] == ["=== process"] * 2


def test_tail_returns_last_lines_of_arbitrary_bytes(tmp_path: Path):
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 10**6 + b"\n" + b"\n".join(b"line %d \xff" % i for i in range(100)))
    assert read_log_tail(path, 2) == "line 98 �\nline 99 �"
    assert len(read_log_tail(path).splitlines()) == 30


def test_missing_or_empty_log_is_reported(tmp_path: Path):
    assert read_log_tail(tmp_path / "a.log") == f"(no log at {tmp_path / 'a.log'})"
    (tmp_path / "b.log").touch()
    assert "is empty" in read_log_tail(tmp_path / "b.log")


@pytest.mark.parametrize("value, expected", [("", "INFO"), ("debug", "DEBUG"), ("WARNING", "WARNING")])
def test_log_level_is_read_from_environment(monkeypatch, value: str, expected: str):
    monkeypatch.setenv("LOG_LEVEL", value)
    assert log_level() == expected


def test_unknown_level_error_lists_levels(monkeypatch):
    monkeypatch.setenv("LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="LOG_LEVEL"):
        log_level()


LIBRARY = """
import logging, sys
from loguru import logger
from skyrl_train.utils.process_log import configure_logging
configure_logging(sys.argv[1] or None)
logging.getLogger("library").info("told with logging: %d {braces}", 3)
logging.getLogger("library").debug("not heard at INFO")
logging.getLogger("httpx").info("one of a thousand requests")
logger.info("told with loguru")
"""


def test_library_logs_are_forwarded(tmp_path: Path):
    path = tmp_path / "main.log"
    process = run_python(LIBRARY, path, LOG_LEVEL="INFO")
    for lines in (process.stderr.splitlines(), path.read_text().splitlines()):
        assert [line.split("INFO")[1].strip() for line in lines] == [
            "told with logging: 3 {braces}",
            "told with loguru",
        ]


def test_debug_level_logs_everything(tmp_path: Path):
    process = run_python(LIBRARY, "", LOG_LEVEL="DEBUG")
    assert "not heard at INFO" in process.stderr
    assert "one of a thousand requests" in process.stderr


IN_A_RAY_ACTOR = """
import os, sys
import ray
from skyrl_train.utils.process_log import capture_output

class Worker:
    def start(self, path):
        capture_output(path)
        print("from the actor")
        os.write(2, b"from below the actor\\n")

ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=True)
worker = ray.remote(num_cpus=1)(Worker).remote()
ray.get(worker.start.remote(sys.argv[1]), timeout=60)
ray.shutdown()
"""


@pytest.mark.slow
def test_ray_actor_output_is_captured(tmp_path: Path):
    path = tmp_path / "worker.log"
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "OMP_NUM_THREADS": "1"}
    process = run_python(IN_A_RAY_ACTOR, path, **environment)
    assert process.returncode == 0, process.stderr
    assert path.read_text().splitlines()[1:3] == ["from the actor", "from below the actor"]
