"""SGLang as a rollout engine: a server as a child process, controlled like an external server."""

import contextlib
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.engine_settings import EngineSettings
from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine
from skyrl_train.inference_engines.server_child import ServerChild
from skyrl_train.inference_engines.sglang.arguments import build_command_line, build_server_arguments
from skyrl_train.inference_engines.sglang.orders import LocalSGLangProtocol


class SGLangInferenceEngine(RemoteInferenceEngine):
    """Rollout engine that starts and controls `sglang.launch_server` on loopback; the server and its children exit with
    the engine or with this process.

    Args:
        start_timeout_seconds: deadline of the start
        control_timeout_seconds: deadline of control calls
        settings: `EngineSettings` by name, and fields of SGLang's `ServerArgs`, which override them

    Raises:
        ConfigError: SGLang is not installed, or does not support a setting.
        WorkerError: the server did not start; with the end of its log.
    """

    def __init__(
        self,
        model_path: str,
        *,
        start_timeout_seconds: float = 600.0,
        control_timeout_seconds: float = 600.0,
        request_timeout_seconds: float = 3600.0,
        **settings: Any,
    ):
        from importlib.util import find_spec

        if find_spec("sglang") is None:
            raise ConfigError("generator.backend=sglang needs the package sglang, which is not installed (INSTALL.md)")
        start = EngineSettings.from_keywords(model_path, settings)
        arguments = build_server_arguments(start)
        self._folder = tempfile.TemporaryDirectory(prefix="skyrl_sglang_")
        folder = Path(self._folder.name)
        with contextlib.ExitStack() as undo:  # cleanup if the start fails
            undo.callback(self._folder.cleanup)
            self._child = ServerChild(
                "the SGLang server",
                [sys.executable, "-m", "sglang.launch_server", *build_command_line(arguments), "--host", "127.0.0.1"],
                folder / "server.log",
                {"SGLANG_USE_CPU_ENGINE": "1"} if start.device == "cpu" else {},
            )
            undo.callback(self._child.end)
            self._child.wait_until_ready("/ready", start_timeout_seconds, "generator.engine_start_timeout_seconds")
            super().__init__(
                self._child.url,
                model_path,
                tokenizer=AutoTokenizer.from_pretrained(model_path, trust_remote_code=True),
                request_timeout_seconds=request_timeout_seconds,
                control_timeout_seconds=control_timeout_seconds,
                protocol=partial(LocalSGLangProtocol, folder=folder, node=platform.node()),
            )
            undo.pop_all()

    async def check_health(self) -> None:
        self._child.check()
        await super().check_health()

    async def teardown(self) -> None:
        """Stop the server."""
        await super().teardown()
        self._child.end()
        self._folder.cleanup()

    def pid(self) -> int:
        """Return the id of the server's process group."""
        return self._child.pid
