"""SGLang's routes (0.5.23). A server is started with

    python -m sglang.launch_server --model-path MODEL [--enable-lora --max-lora-rank 32 --lora-target-modules all]

It counts weight versions itself. External servers load weights from checkpoints; engines started by the run have our
weight loader and support every transport (`skyrl_train.inference_engines.sglang`).
"""

import asyncio
import math
from collections.abc import Mapping

import torch
from loguru import logger

from skyrl_train.errors import UnsupportedByEngine, WeightSyncError
from skyrl_train.inference_engines.base import EngineInfo, Feature, PauseMode, StopReason, TopLogProbs
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, SeedPair
from skyrl_train.inference_engines.native.sampling import compute_random_key
from skyrl_train.inference_engines.remote.connection import ServerError, ServerRefused
from skyrl_train.inference_engines.remote.files import CheckpointFiles, compute_adapter_fingerprints
from skyrl_train.inference_engines.remote.protocol import (
    NO_STREAMS,
    ServerFacts,
    ServerProtocol,
    parse_token_versions,
    parse_version,
    read_vocab_size,
)
from skyrl_train.inference_engines.request import Completion, build_top_log_probs
from skyrl_train.inference_engines.vllm.sampling import ANSWER_FROM_START
from skyrl_train.types import JsonObject
from skyrl_train.weight_sync.base import WeightReport, WeightSyncInitInfo, WeightUpdateRequest

_STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangProtocol(ServerProtocol):
    _max_model_len = 0
    _vocab_size = 0
    _seeds_work = False
    _warned = False
    tokenizer_option = "--tokenizer-path"
    aborts_while_paused = False
    _files: CheckpointFiles | None = None

    @staticmethod
    def is_served_by(said: Mapping[str, object]) -> bool:
        return "model_path" in said

    @staticmethod
    def start_command(model: str, url: str) -> str:
        port = url.rsplit(":", 1)[-1]
        return f"python -m sglang.launch_server --model-path {model} --port {port if port.isdigit() else 8001}"

    async def get_facts(self) -> ServerFacts:
        said = await self.server.get("/server_info")
        model = await self.server.get("/model_info")
        self._max_model_len = said["max_req_input_len"] + 1  # SGLang reserves the rest of the context
        self._seeds_work = bool(said.get("enable_deterministic_inference"))
        unsupported: dict[Feature, str] = {}
        if not self._seeds_work:
            unsupported["seed"] = (
                f"the server at {self.server.url} was started without --enable-deterministic-inference, which SGLang "
                "supports only on GPUs (sglang/srt/arg_groups/overrides.py, _deterministic_attention_backend)"
            )
        if not said.get("enable_lora"):
            unsupported["lora"] = f"the server at {self.server.url} was started without --enable-lora"
        if not said.get("enable_memory_saver"):
            unsupported["sleep"] = f"the server at {self.server.url} was started without --enable-memory-saver"
        unsupported["answer_tokens"] = ANSWER_FROM_START
        unsupported["streaming"] = NO_STREAMS
        unsupported["grammar"] = (
            "SGLang accepts JSON schemas; tool_choice and reasoning before JSON need grammars in another format"
        )
        if said.get("grammar_backend") == "none":
            unsupported["json_schema"] = f"the server at {self.server.url} was started with --grammar-backend none"
        unsupported["prompt_top_log_probs"] = (
            "this client requests from SGLang only the log-probs of the prompt's own tokens"
        )
        unsupported["broadcast"] = f"the server at {self.server.url} has no weight loader of ours; it takes checkpoints"
        self._vocab_size = read_vocab_size(model["model_path"], self.server.url)
        info = EngineInfo(
            backend="sglang",
            release=said["version"],
            model=model["model_path"],
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            dtype=None if said["dtype"] == "auto" else said["dtype"],
            num_weight_processes=said["tp_size"] * said.get("pp_size", 1) * said.get("dp_size", 1),
            unsupported=unsupported,
        )
        names = dict.fromkeys((model["served_model_name"], model["model_path"]))
        return ServerFacts(info=info, names=tuple(names), prefix_caching=not said["disable_radix_cache"])

    async def check_health(self) -> None:
        """Query the scheduler. `/health` would generate a token, which fails while generation is paused."""
        await self.server.get("/server_info", timeout_seconds=math.inf)

    async def complete(
        self,
        prompt: list[int],
        params: EngineSamplingParams,
        seed: SeedPair | None,
        adapter: str | None,
        cache_key: str,
    ) -> Completion:
        self._check(params, seed)
        body: JsonObject = {
            "input_ids": prompt,
            "sampling_params": self._build_sampling(params, seed, len(prompt)),
            "return_logprob": params.logprobs is not None or params.prompt_logprobs is not None,
            "extra_key": cache_key,
        }
        if params.prompt_logprobs is not None:
            body["logprob_start_len"] = 0
        if params.logprobs:
            body["top_logprobs_num"] = params.logprobs
        if adapter is not None:
            body["lora_path"] = adapter
        said = await self.server.post(
            "/generate",
            body,
            timeout_seconds=self.request_timeout_seconds,
            timeout_setting="generator.request_timeout_seconds",
        )
        about, ids = said["meta_info"], said["output_ids"]
        reason = about["finish_reason"] or {"type": "abort"}
        log_probs = [entry[0] for entry in about.get("output_token_logprobs") or []][: len(ids)]
        versions = parse_token_versions(about.get("weight_versions"), len(ids), self.server.url) if ids else []
        if params.logprobs is not None and _is_penalized(params) and ids:  # SGLang's values are after penalties
            log_probs = await self._compute_scores(prompt + ids, len(prompt), params, adapter, cache_key)
            if {*versions} != {await self.get_weight_version()}:
                raise UnsupportedByEngine(
                    f"the weights of the SGLang server at {self.server.url} changed during a completion with "
                    "penalties, logit_bias, a constraint or min_tokens, whose log-probs can only be computed "
                    "afterwards; set logprobs=None"
                )
        prompt_log_probs: list[float] = []
        if params.prompt_logprobs is not None:
            prompt_log_probs = [entry[0] for entry in about["input_token_logprobs"] if entry[0] is not None]
            if not _is_plain(params):
                prompt_log_probs = await self._compute_scores(prompt, 1, params, adapter, cache_key)
        if reason["type"] != "abort" and params.ignore_eos:  # with it, SGLang ignores all stop tokens
            num = _find_stop_length(ids, params)
            if num < len(ids):
                ids, log_probs, reason = ids[:num], log_probs[:num], {"type": "stop"}
        return Completion(
            token_ids=ids,
            log_probs=log_probs,
            top=_parse_top(about.get("output_top_logprobs"), len(ids), params.logprobs),
            prompt_log_probs=prompt_log_probs,
            stop_reason=_STOP_REASONS.get(reason["type"], "abort"),
            weight_versions=versions[: len(ids)],
        )

    async def _compute_scores(
        self, ids: list[int], first: int, params: EngineSamplingParams, adapter: str | None, cache_key: str
    ) -> list[float]:
        """Compute log softmax(logits / temperature) of the tokens from index `first` (at least 1) on.

        SGLang scores tokens at temperature 1. At another temperature the full distribution is requested at each token.
        """
        body: JsonObject = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": first - 1,
            "extra_key": cache_key,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        plain = _is_plain(params)
        if not plain:
            body["top_logprobs_num"] = self._vocab_size
        about = (await self.server.post("/generate", body, timeout_seconds=self.request_timeout_seconds))["meta_info"]
        wanted = ids[first:]
        chosen = [entry[0] for entry in about["input_token_logprobs"][-len(wanted) :]] if wanted else []
        if plain or not wanted:
            return chosen
        whole = torch.tensor([[entry[0] for entry in row] for row in about["input_top_logprobs"][-len(wanted) :]])
        normalizers = (whole / params.temperature).logsumexp(-1)
        return (torch.tensor(chosen) / params.temperature - normalizers).tolist()

    def _build_sampling(
        self, params: EngineSamplingParams, seed: SeedPair | None, num_prompt_tokens: int
    ) -> dict[str, object]:
        room = self._max_model_len - num_prompt_tokens
        given: JsonObject = {
            "max_new_tokens": room if params.max_tokens is None else min(params.max_tokens, room),
            "min_new_tokens": params.min_tokens,
            "temperature": 0.0 if params.is_greedy else params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "skip_special_tokens": params.skip_special_tokens,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        }
        if params.logit_bias:
            given["logit_bias"] = {str(token): value for token, value in params.logit_bias}
        if params.constraint is not None:
            given["json_schema"] = params.constraint.text
        if seed is not None:  # includes the token's position, which a continued request does not repeat
            given["sampling_seed"] = int(compute_random_key(*seed)) >> 33
        return given

    def _check(self, params: EngineSamplingParams, seed: SeedPair | None) -> None:
        """Reject settings that SGLang would accept but handle differently."""
        if seed is not None and not self._seeds_work and not params.is_greedy:
            raise UnsupportedByEngine(
                f"the SGLang server at {self.server.url} ignores seeds: it was started without "
                "--enable-deterministic-inference"
            )
        if params.constraint is not None and params.constraint.kind != "json_schema":
            raise UnsupportedByEngine(
                f"the SGLang server at {self.server.url} accepts constraints only as JSON schemas"
            )
        if params.logprobs and _is_penalized(params):
            raise UnsupportedByEngine(
                f"the SGLang server at {self.server.url} reports the most likely tokens after penalties, biases and "
                "constraints; set logprobs=0 with them"
            )
        if params.repetition_penalty != 1.0 and not self._warned:
            self._warned = True
            logger.warning(
                f"the SGLang server at {self.server.url} counts repetitions only in completions, not in prompts "
                "(sglang/srt/sampling/penaltylib/repetition_penalty.py): completions differ from other engines"
            )

    async def tokenize(self, text: str) -> list[int]:
        return (await self.server.post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]

    async def pause(self, mode: PauseMode) -> None:
        """`wait`: the engine drains its requests before this call."""
        await self.server.post("/pause_generation", {"mode": "abort" if mode == "abort" else "in_place"})

    async def resume(self) -> None:
        await self.server.post("/continue_generation", {})

    async def is_paused(self) -> bool:
        try:
            await self.server.get("/ready")
        except ServerError as error:
            if error.status != 503:
                raise
            return True
        return False

    async def abort(self) -> None:
        await self.server.post("/abort_request", {"abort_all": True})

    async def sleep(self, level: int) -> None:
        await self.server.post("/release_memory_occupation", {"tags": ["weights", "kv_cache"]})

    async def wake_up(self, tags: list[str]) -> None:
        await self.server.post("/resume_memory_occupation", {"tags": tags})

    async def reset_prefix_cache(self) -> None:
        try:
            await self.server.post("/flush_cache")
        except ServerRefused as error:  # requests are running; the engine's cache keys separate prefixes
            if error.status != 400:
                raise

    async def get_weight_version(self) -> int:
        return parse_version((await self.server.get("/model_info"))["weight_version"], self.server.url)

    # ---- weights

    async def init_weight_transfer(self, info: WeightSyncInitInfo) -> None:
        self._files = CheckpointFiles(info, self.server.url, "generator.backend=sglang (an engine of this run)")

    async def update_weights(self, request: WeightUpdateRequest) -> None:
        if self._files is None:
            raise WeightSyncError("weights came before init_weight_update_communicator told where from")
        await asyncio.to_thread(self._files.add, request)

    async def apply_weights(self, version: int) -> WeightReport:
        if self._files is None:
            raise WeightSyncError("no weights have come: init_weight_update_communicator was not called")
        folder, report = self._files.finish(version)
        body = {"model_path": str(folder), "flush_cache": False, "weight_version": str(version)}
        try:
            await self.server.post("/update_weights_from_disk", body)
        except ServerRefused as error:
            raise WeightSyncError(
                f"the server at {self.server.url} did not take the checkpoint: {error.said}"
            ) from None
        return report

    # ---- adapters

    async def load_adapter(self, name: str, path: str, version: int) -> dict[str, int]:
        fingerprints = compute_adapter_fingerprints(path, version)
        try:
            await self.server.post("/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except ServerRefused as error:
            raise WeightSyncError(f"{self.server.url} did not load the adapter in {path}: {error.said}") from None
        return fingerprints

    async def unload_adapter(self, name: str) -> None:
        await self.server.post("/unload_lora_adapter", {"lora_name": name})

    async def list_adapters(self) -> list[str]:
        return [entry["id"] for entry in (await self.server.get("/v1/models"))["data"] if entry.get("parent")]


def _is_plain(params: EngineSamplingParams) -> bool:
    return params.is_greedy or params.temperature == 1.0


def _find_stop_length(ids: list[int], params: EngineSamplingParams) -> int:
    """Return the number of tokens up to the first stop token, if one may end the completion."""
    stops = (num for num, token in enumerate(ids, 1) if token in params.stop_token_ids and num > params.min_tokens)
    return next(stops, len(ids))


def _is_penalized(params: EngineSamplingParams) -> bool:
    """Return whether SGLang changes the logits before computing the reported log-probs."""
    changed = params.repetition_penalty != 1.0 or params.min_tokens > 0 or params.has_penalties
    return changed or bool(params.logit_bias) or params.constraint is not None


def _parse_top(
    given: list[list[tuple[float, int, str | None]]] | None, num_tokens: int, num_top: int | None
) -> TopLogProbs | None:
    """Parse the most likely tokens, given as [log-prob, id, text] per position."""
    if not num_top:
        return None
    return build_top_log_probs(
        [[(entry[1], entry[0]) for entry in place] for place in (given or [])[:num_tokens]], num_top
    )
