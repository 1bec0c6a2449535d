"""vLLM's routes (0.32). A server is started with

    python -m skyrl_train.entrypoints.serve_vllm --model MODEL

which adds the worker extension, the control routes and `--enable-scale-out` to vLLM's server: the route with token ids
in and out, and the weight version of each token. The worker extension receives weights over every transport, reports
its weights, and computes log-probs of logits / temperature; without it weights are loaded from checkpoints only, and
some sampling settings are rejected.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import httpx

from skyrl_train.errors import ConfigError, UnsupportedByEngine, WeightSyncError
from skyrl_train.inference_engines.base import EngineInfo, Feature, PauseMode, StopReason, TopLogProbs
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, SeedPair
from skyrl_train.inference_engines.remote.connection import ServerError, ServerRefused
from skyrl_train.inference_engines.remote.files import CheckpointFiles, compute_adapter_fingerprints
from skyrl_train.inference_engines.remote.key_guard import is_loopback
from skyrl_train.inference_engines.remote.protocol import (
    NO_STREAMS,
    ServerFacts,
    ServerProtocol,
    parse_token_versions,
    parse_version,
    read_vocab_size,
)
from skyrl_train.inference_engines.request import Completion, build_top_log_probs
from skyrl_train.inference_engines.vllm.adapters import check_adapter
from skyrl_train.inference_engines.vllm.arguments import EXTENSION, GRAMMAR_BACKEND
from skyrl_train.inference_engines.vllm.sampling import ANSWER_FROM_START, build_http_sampling, compute_seed
from skyrl_train.types import JsonObject
from skyrl_train.weight_sync.base import ProcessReport, WeightReport, WeightSyncInitInfo, WeightUpdateRequest

_WORKER_ERROR = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)
_STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VLLMProtocol(ServerProtocol):
    _extended = False
    _served_name = ""
    _log_prob_mode = "raw_logprobs"
    _files: CheckpointFiles | None = None

    @staticmethod
    def is_served_by(said: Mapping[str, object]) -> bool:
        return "version" in said and "model_path" not in said

    @staticmethod
    def start_command(model: str, url: str) -> str:
        return start_command(model, url)

    async def get_facts(self) -> ServerFacts:
        url = self.server.url
        try:
            said = await self.server.get("/server_info", config_format="json")
        except ServerRefused:
            raise _build_missing_flag_error(
                url, "VLLM_SERVER_DEV_MODE=1 in its environment", "its control routes"
            ) from None
        except ServerError as error:
            raise ConfigError(
                f"{error}\nvLLM lists the packages of its environment with pip or uv: install one of them for the "
                f"server at {url} (uv pip install pip) and restart it"
            ) from error
        config, variables = said["vllm_config"], said["vllm_env"]
        model, parallel = config["model_config"], config["parallel_config"]
        if config.get("speculative_config"):
            raise ConfigError(
                f"generator.remote_inference_engine_urls: the server at {url} decodes speculatively, and vLLM then "
                "reports log-probs without the temperature, which training would use as the policy's log-probs; "
                f"start it without --speculative-config:\n{start_command(model['model'], url)}"
            )
        models = (await self.server.get("/v1/models"))["data"]
        base = [entry for entry in models if entry.get("parent") is None]
        self._served_name = base[0]["id"]
        self._extended = parallel["worker_extension_cls"] == EXTENSION
        self._log_prob_mode = model["logprobs_mode"]
        if self._extended:
            await self._call_workers("skyrl_prepare")
        info = EngineInfo(
            backend="vllm",
            release=(await self.server.get("/version"))["version"],
            model=model["model"],
            vocab_size=await self._get_vocab_size(model["model"]),
            max_model_len=model["max_model_len"],
            dtype=str(model["dtype"]).removeprefix("torch."),
            num_weight_processes=(await self.server.get("/get_world_size"))["world_size"],
            unsupported=_find_unsupported(url, config, variables, self._extended),
        )
        names = dict.fromkeys(name for entry in base for name in (entry["id"], entry.get("root")) if name)
        return ServerFacts(
            info=info, names=tuple(names), prefix_caching=bool(config["cache_config"]["enable_prefix_caching"])
        )

    async def _get_vocab_size(self, model: str) -> int:
        """Extract the vocabulary size from the error for an impossible stop token: no route reports it, and this
        computes nothing.
        """
        body = {
            "model": self._served_name,
            "token_ids": [0],
            "sampling_params": {"max_tokens": 1, "stop_token_ids": [-1]},
        }
        try:
            await self.server.post("/inference/v1/generate", body)
        except ServerRefused as error:
            if error.status == 403:
                raise _build_missing_flag_error(
                    self.server.url, "--enable-scale-out", "its route for token ids, /inference/v1/generate"
                ) from None
            if found := re.search(r"Vocabulary size: (\d+)", error.said):
                return int(found[1])
        return read_vocab_size(model, self.server.url)

    async def check_health(self) -> None:
        await self.server.get("/health", timeout_seconds=math.inf)

    async def complete(
        self,
        prompt: list[int],
        params: EngineSamplingParams,
        seed: SeedPair | None,
        adapter: str | None,
        cache_key: str,
    ) -> Completion:
        self._check_log_probs(params)
        body = {
            "model": adapter or self._served_name,
            "token_ids": prompt,
            "cache_salt": cache_key,
            "sampling_params": build_http_sampling(params, compute_seed(seed, len(prompt)))
            | {"detokenize": bool(params.stop)},
        }
        if params.logprobs:  # vLLM counts the sampled token among the most likely ones
            body["sampling_params"]["logprobs"] = params.logprobs + 1
        said = await self.server.post(
            "/inference/v1/generate",
            body,
            timeout_seconds=self.request_timeout_seconds,
            timeout_setting="generator.request_timeout_seconds",
        )
        [choice] = said["choices"]
        ids = choice["token_ids"] or []
        log_probs = (choice["logprobs"] or {}).get("content") or []
        return Completion(
            token_ids=ids,
            log_probs=[entry["logprob"] for entry in log_probs],
            top=_parse_top(log_probs, params.logprobs),
            prompt_log_probs=_parse_prompt_log_probs(said.get("prompt_logprobs"), prompt),
            prompt_top=_parse_prompt_top(said.get("prompt_logprobs"), params.prompt_logprobs),
            stop_reason=_STOP_REASONS.get(choice["finish_reason"], "abort"),
            weight_versions=parse_token_versions(choice["weight_versions"], len(ids), self.server.url),
        )

    def _check_log_probs(self, params: EngineSamplingParams) -> None:
        """Reject unsupported log-prob modes: without the worker extension, vLLM reports log-probs of the raw logits, or
        of the logits after penalties and truncation.
        """
        if self._extended:
            return
        plain = params.is_greedy or params.temperature == 1.0
        unmasked = params.constraint is None
        unbiased = not params.logit_bias and not params.has_penalties
        untouched = (
            unmasked
            and unbiased
            and (params.top_p, params.min_p, params.repetition_penalty, params.min_tokens) == (1.0, 0.0, 1.0, 0)
        )
        exact = plain and unmasked if self._log_prob_mode == "raw_logprobs" else untouched and params.top_k <= 0
        if (params.logprobs is not None and not exact) or (params.prompt_logprobs is not None and not plain):
            raise UnsupportedByEngine(
                f"the server at {self.server.url} reports {self._log_prob_mode}, which are not the log-probs of "
                f"logits / temperature for these settings ({params}); start it with --worker-extension-cls {EXTENSION}"
            )

    async def tokenize(self, text: str) -> list[int]:
        body = {"model": self._served_name, "prompt": text, "add_special_tokens": False}
        return (await self.server.post("/tokenize", body))["tokens"]

    async def pause(self, mode: PauseMode) -> None:
        await self.server.post("/pause", params={"mode": mode, "clear_cache": "false"})

    async def resume(self) -> None:
        await self.server.post("/resume")

    async def is_paused(self) -> bool:
        return (await self.server.get("/is_paused"))["is_paused"]

    async def abort(self) -> None:
        await self.server.post("/abort_requests", {})

    async def sleep(self, level: int) -> None:
        await self.server.post("/sleep", params={"level": level, "mode": "keep"})

    async def wake_up(self, tags: list[str]) -> None:
        await self.server.post("/wake_up", params={"tags": tags})

    async def reset_prefix_cache(self) -> None:
        await self.server.post("/reset_prefix_cache")

    async def get_weight_version(self) -> int:
        return parse_version((await self.server.get("/weight_info"))["weight_version"], self.server.url)

    # ---- weights

    async def init_weight_transfer(self, info: WeightSyncInitInfo) -> None:
        if self._extended:
            await self._call_workers("skyrl_connect", asdict(info), timeout_seconds=info.timeout_seconds)
        else:
            self._files = CheckpointFiles(info, self.server.url, f"--worker-extension-cls {EXTENSION}")

    async def update_weights(self, request: WeightUpdateRequest) -> None:
        if self._extended:
            await self._call_workers("skyrl_update", request.to_json_dict())
        elif self._files is None:
            raise WeightSyncError("weights came before init_weight_update_communicator told where from")
        else:
            self._files.add(request)

    async def apply_weights(self, version: int) -> WeightReport:
        if self._extended:
            processes = await self._call_workers("skyrl_finish", version)
            report = WeightReport.of_processes(version, [ProcessReport(**fields) for fields in processes])
        elif self._files is None:
            raise WeightSyncError("no weights have come: init_weight_update_communicator was not called")
        else:
            folder, report = self._files.finish(version)
            await self._call_workers("reload_weights", weights_path=str(folder))
        await self.server.post("/update_weight_version", {"new_version": str(version)})
        return report

    async def _call_workers(
        self, method: str, *args: object, timeout_seconds: float | None = None, **kwargs: object
    ) -> list[Any]:
        """Call a method of every worker process."""
        body = {"method": method, "args": list(args), "kwargs": kwargs}
        try:
            said = await self.server.post("/collective_rpc", body, timeout_seconds=timeout_seconds)
        except ServerError as error:
            said = _WORKER_ERROR.search(error.said)
            words = said[1] if said else error.said
            raise WeightSyncError(f"{method} at the server at {self.server.url}: {words}") from None
        return said["results"] if isinstance(said, dict) else []

    # ---- adapters

    async def load_adapter(self, name: str, path: str, version: int) -> dict[str, int]:
        fingerprints = compute_adapter_fingerprints(path, version)
        if self._extended:
            check_adapter(path)
        before = await self._get_adapter_numbers()
        try:
            await self.server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except ServerError as error:
            raise WeightSyncError(f"{self.server.url} did not load the adapter in {path}: {error.said}") from None
        if not self._extended:
            return fingerprints
        number = max(await self._get_adapter_numbers() - before)
        return _merge_reports(await self._call_workers("skyrl_lora", number, path, version), self.server.url)

    async def _get_adapter_numbers(self) -> set[int]:
        """Return vLLM's numbers of the adapters loaded in its workers."""
        [said, *_] = await self._call_workers("list_loras")
        return {int(number) for number in said}

    async def unload_adapter(self, name: str) -> None:
        await self.server.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def list_adapters(self) -> list[str]:
        return [entry["id"] for entry in (await self.server.get("/v1/models"))["data"] if entry.get("parent")]


def _find_unsupported(url: str, config: Any, variables: JsonObject, is_extended: bool) -> dict[Feature, str]:
    """Return the features that a server lacks, and the missing start setting.

    Args:
        config, variables: vLLM's own configuration and its environment, as it reports them.
        is_extended: whether it has our worker extension.
    """
    lora = config["lora_config"]
    unsupported: dict[Feature, str] = {"answer_tokens": ANSWER_FROM_START, "streaming": NO_STREAMS}
    if config.get("structured_outputs_config", {}).get("backend") != GRAMMAR_BACKEND:
        unsupported["grammar"] = (
            f"the server at {url} was started without --structured-outputs-config.backend {GRAMMAR_BACKEND}, which "
            "tool_choice and reasoning before JSON need"
        )
    if not is_extended:
        reason = f"the server at {url} was started without --worker-extension-cls {EXTENSION}"
        unsupported["broadcast"] = reason
        if config["device_config"]["device_type"] == "cpu":
            unsupported["weight_update"] = (
                f"{reason}, and vLLM's own reload_weights keeps the old LM head of tied models on a "
                "CPU (vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm)"
            )
    if lora is None or not variables.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        unsupported["lora"] = (
            f"the server at {url} was started without --enable-lora or VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    elif not is_extended and (not lora["target_modules"] or "lm_head" in lora["target_modules"]):
        reason = (
            f"the server at {url} also has adapters of the LM head, which make vLLM crash when it computes prompt "
            "log-probs (vllm/lora/layers/logits_processor.py); start it with --lora-target-modules q_proj k_proj "
            "v_proj o_proj gate_proj up_proj down_proj"
        )
        unsupported["prompt_log_probs"] = unsupported["prompt_top_log_probs"] = reason
    if not config["model_config"]["enable_sleep_mode"]:
        unsupported["sleep"] = f"the server at {url} was started without --enable-sleep-mode"
    return unsupported


def _parse_prompt_log_probs(given: list[JsonObject | None] | None, prompt: list[int]) -> list[float]:
    return (
        []
        if given is None
        else [entry[str(token)]["logprob"] for entry, token in zip(given, prompt, strict=True) if entry]
    )


def _parse_prompt_top(given: list[JsonObject | None] | None, num_top: int | None) -> TopLogProbs | None:
    if given is None or not num_top:
        return None
    places = [[(int(token), said["logprob"]) for token, said in entry.items()] for entry in given if entry]
    return build_top_log_probs(places, num_top)


def _parse_top(log_probs: list[JsonObject], num_top: int | None) -> TopLogProbs | None:
    if not num_top:
        return None
    places = [
        [(entry["token_id"], entry["logprob"]) for entry in [*place["top_logprobs"], place]] for place in log_probs
    ]
    return build_top_log_probs([list(dict(place).items()) for place in places], num_top)


def _merge_reports(reports: list[dict[str, int]], url: str) -> dict[str, int]:
    """Merge the reports of all worker processes, which all received every full tensor."""
    together: dict[str, int] = {}
    for report in reports:
        for name, value in report.items():
            if together.setdefault(name, value) != value:
                raise WeightSyncError(f"the worker processes of the server at {url} have different values of {name}")
    return together


def _build_missing_flag_error(url: str, what: str, closed: str) -> ConfigError:
    return ConfigError(
        f"generator.remote_inference_engine_urls: the vLLM server at {url} does not offer {closed}; start it with "
        f"{what}:\n{start_command('MODEL', url)}"
    )


def start_command(model: str, url: str) -> str:
    address = httpx.URL(url)
    listening = "" if is_loopback(address.host) else " --host 0.0.0.0 --api-key-file FILE"
    return f"python -m skyrl_train.entrypoints.serve_vllm --model {model} --port {address.port or 8001}{listening}"
