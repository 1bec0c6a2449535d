"""SGLang as a rollout engine: its server as a child of this process, spoken to like a server started elsewhere."""

import contextlib
import platform
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine
from skyrl_train.inference_engines.sglang.arguments import command_line, server_arguments
from skyrl_train.inference_engines.sglang.child import ServerChild
from skyrl_train.inference_engines.sglang.orders import LocalSGLangProtocol


class SGLangInferenceEngine(RemoteInferenceEngine):
    """Starts `sglang.launch_server` on loopback and drives it; the server and all that it starts end with the engine,
    and with this process.

    Args:
        model_path: a local folder or a hub name, with a tokenizer
        device: `cpu` or `cuda:N` (which GPUs are seen decides CUDA_VISIBLE_DEVICES)
        max_lora_rank: 0: no adapters
        sleep_mode: be able to give memory back
        dummy_weights: start with random weights; an update follows
        start_timeout_seconds: the longest that the start may take
        control_timeout_seconds: the deadline of everything but requests
        engine_init_kwargs: fields of SGLang's `ServerArgs`; they win over ours

    Raises:
        ConfigError: SGLang is not installed, or does not have a setting.
        WorkerError: the server did not start; with the end of its log.
    """

    def __init__(
        self,
        model_path: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.8,
        enforce_eager: bool = True,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        fully_sharded_loras: bool = False,
        max_lora_rank: int = 0,
        sleep_mode: bool = False,
        seed: int = 0,
        model_config_kwargs: dict[str, Any] | None = None,
        dummy_weights: bool = False,
        start_timeout_seconds: float = 600.0,
        control_timeout_seconds: float = 600.0,
        request_timeout_seconds: float = 3600.0,
        **engine_init_kwargs: Any,
    ):
        from importlib.util import find_spec

        if find_spec("sglang") is None:
            raise ConfigError("generator.backend=sglang needs the package sglang, which is not installed (INSTALL.md)")
        arguments = server_arguments(
            model_path=model_path,
            device=device,
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            data_parallel_size=data_parallel_size,
            expert_parallel_size=expert_parallel_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            fully_sharded_loras=fully_sharded_loras,
            max_lora_rank=max_lora_rank,
            sleep_mode=sleep_mode,
            seed=seed,
            model_config_kwargs=model_config_kwargs,
            dummy_weights=dummy_weights,
            engine_init_kwargs=engine_init_kwargs,
        )
        self._folder = tempfile.TemporaryDirectory(prefix="skyrl_sglang_")
        folder = Path(self._folder.name)
        with contextlib.ExitStack() as undo:  # of what was begun, if something fails
            undo.callback(self._folder.cleanup)
            self._child = ServerChild(
                command_line(arguments),
                folder / "server.log",
                environment={"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {},
                ready_path="/ready",
                timeout_seconds=start_timeout_seconds,
                timeout_setting="generator.engine_start_timeout_seconds",
            )
            undo.callback(self._child.end)
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
        """Ends the server."""
        await super().teardown()
        self._child.end()
        self._folder.cleanup()

    def pid(self) -> int:
        """Of the process group that the server is in."""
        return self._child.pid
