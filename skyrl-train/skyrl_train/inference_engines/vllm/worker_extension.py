"""Receiver of weight syncs inside vLLM's worker processes.

vLLM mixes this class into its worker (`--worker-extension-cls`); its methods are called by `collective_rpc`, or over
HTTP by `/collective_rpc` (`VLLM_SERVER_DEV_MODE=1`) with JSON-serializable arguments.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.inference_engines.vllm.orphan_watch import start_owner_watch
from skyrl_train.types import JsonObject
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.cuda_ipc import gpu_uuid
from skyrl_train.weight_sync.fingerprint import Verification

if TYPE_CHECKING:
    from skyrl_train.inference_engines.vllm.loading import ModelUpdate
    from skyrl_train.weight_sync.receiver import WeightReceiver

start_owner_watch()  # the first import by vLLM: a later call would not cover a slow start


class WeightExtension:
    """Methods added to vLLM's workers. Call `skyrl_prepare` first, then for each update `skyrl_update` per bucket and
    `skyrl_finish`.
    """

    if TYPE_CHECKING:  # attributes of the worker class it is mixed into
        vllm_config: Any
        model_runner: Any
        device: torch.device
        rank: int

    _skyrl_receiver: "WeightReceiver | None" = None
    _skyrl_update: "ModelUpdate | None" = None
    _skyrl_verification: Verification = "sampled"
    _skyrl_weights_valid: bool = True
    _skyrl_prepared: bool = False

    def skyrl_prepare(self, weights_valid: bool = True) -> str | None:
        """Enable log-probs of logits / temperature. Idempotent. Returns the UUID of this worker's GPU.

        Args:
            weights_valid: False if the current weights are random, so that the first update must be full.
        """
        from skyrl_train.inference_engines.vllm.adapters import remove_head_adapter
        from skyrl_train.inference_engines.vllm.cpu_generators import save_generators_of_partial_prompts
        from skyrl_train.inference_engines.vllm.tempered_sampler import apply_temperature_to_log_probs

        self._skyrl_weights_valid = self._skyrl_weights_valid and weights_valid
        gpu = gpu_uuid(self.device)
        if self._skyrl_prepared:
            return gpu
        if self.device.type == "cpu":
            save_generators_of_partial_prompts(self.model_runner)
        apply_temperature_to_log_probs(self.model_runner)
        if self.vllm_config.lora_config is not None:
            remove_head_adapter(self.model_runner.get_model())
        self._skyrl_prepared = True
        return gpu

    def skyrl_connect(self, info: JsonObject) -> None:
        """Connect to the trainer. `info`: fields of `WeightSyncInitInfo`."""
        from skyrl_train.weight_sync.receiver import WeightReceiver

        if self._skyrl_receiver is not None:
            self._skyrl_receiver.close()
            self._skyrl_receiver = None
        parsed = WeightSyncInitInfo(**info)
        parallel = self.vllm_config.parallel_config
        process_index = parallel.data_parallel_index * parallel.world_size + self.rank
        self._skyrl_verification = parsed.verification
        self._skyrl_receiver = WeightReceiver(parsed, self.device, process_index)

    def skyrl_update(self, request: JsonObject) -> None:
        """Load one bucket. `request`: fields of `WeightUpdateRequest`."""
        from skyrl_train.inference_engines.vllm.loading import ModelUpdate

        if self._skyrl_receiver is None:
            raise WeightSyncError("weights came before skyrl_connect told where from")
        parsed = WeightUpdateRequest.from_json_dict(request)
        if parsed.index == 0 and self._skyrl_update is not None:
            self._skyrl_update.discard()  # a failed update is sent again as a whole
            self._skyrl_update, self._skyrl_weights_valid = None, False
        tensors = self._skyrl_receiver.receive(parsed)
        if self._skyrl_update is None:
            model = self.model_runner.get_model()
            self._skyrl_update = ModelUpdate(
                model, self.vllm_config, parsed.version, self._skyrl_verification, self._process_name()
            )
        self._skyrl_update.load(tensors)

    def skyrl_finish(self, version: int) -> JsonObject:
        """Apply the new weights. Returns the fields of a `ProcessReport`."""
        if self._skyrl_receiver is None:
            raise WeightSyncError("no weights have come: skyrl_connect was not called")
        self._skyrl_receiver.finish(version)
        if self._skyrl_update is None:
            return {"process": self._process_name(), "fingerprints": {}}
        report = self._skyrl_update.finish(must_be_full=not self._skyrl_weights_valid)
        self._skyrl_update, self._skyrl_weights_valid = None, True
        return asdict(report)

    def skyrl_drop_weights(self) -> None:
        """Mark the current weights as invalid: the next update must be full."""
        self._skyrl_weights_valid = False

    def skyrl_lora(self, lora_id: int, path: str, version: int) -> dict[str, int]:
        """Compute fingerprints of an adapter's tensors that equal the file in vLLM."""
        from skyrl_train.inference_engines.vllm.adapters import compute_loaded_fingerprints

        return compute_loaded_fingerprints(self.model_runner, lora_id, path, version, self._skyrl_verification)

    def _process_name(self) -> str:
        return f"process {self.rank} of replica {self.vllm_config.parallel_config.data_parallel_index}"

    def skyrl_release_cache(self) -> int:
        """Free the memory of the key-value cache; it is allocated again, zeroed, when written to. CPU only. Returns the
        number of freed bytes.
        """
        from skyrl_train.inference_engines.vllm.cpu_memory import release

        return sum(release(cache) for cache in self.model_runner.kv_caches)
