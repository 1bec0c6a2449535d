"""Loaded adapters of a vLLM engine, by name."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_train.errors import UnsupportedByEngine, WeightSyncError
from skyrl_train.inference_engines.vllm.llm import LLMProcesses
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


@dataclass(eq=False)
class LoadedAdapter:
    """Loaded adapter; a replacement has a new number."""

    request: "LoRARequest"
    version: int
    num_running: int = 0
    replaced: bool = False


class LoadedAdapters:
    """Adapters loaded in the engine. Belongs to the engine's event loop.

    Args:
        most: maximum number of loaded adapters, including replaced ones in use; None: vLLM's limit.
    """

    def __init__(self, processes: LLMProcesses, most: int | None):
        self._processes = processes
        self._most = most
        self._by_name: dict[str, LoadedAdapter] = {}
        self._num_loaded = 0

    def get_by_name(self, name: str) -> LoadedAdapter:
        """
        Raises:
            ValueError: no adapter has that name.
        """
        if name not in self._by_name:
            raise ValueError(f"no adapter named {name!r} is loaded")
        return self._by_name[name]

    async def load(self, request: LoraLoadRequest) -> WeightReport:
        """Load an adapter, replacing one with this name, which is removed after its last request."""
        from vllm.lora.request import LoRARequest

        llm = self._processes.llm
        if self._most is not None and len(await llm.list_loras()) >= self._most:
            raise UnsupportedByEngine(
                f"{self._most} adapters are loaded or have running requests, the maximum for vLLM on a CPU; unload "
                "one, or raise generator.engine_init_kwargs.max_loras"
            )
        self._num_loaded += 1
        number = self._num_loaded
        # Also a unique name: vLLM keys cached prefixes by name and path.
        lora = LoRARequest(lora_name=f"{request.name}-{number}", lora_int_id=number, lora_path=request.path)
        try:
            loaded = await llm.add_lora(lora)
        except Exception as error:  # vLLM forwards the text of any worker error
            if llm.errored:
                raise
            raise WeightSyncError(f"vLLM did not load adapter {request.name!r} from {request.path}: {error}") from error
        if not loaded:
            raise WeightSyncError(f"vLLM did not load adapter {request.name!r} from {request.path}")
        reports = await self._processes.call_workers_for_weights("skyrl_lora", number, request.path, request.version)
        before = self._by_name.get(request.name)
        self._by_name[request.name] = LoadedAdapter(lora, request.version)
        if before is not None:
            before.replaced = True
            await self.remove_if_unused(before)
        return WeightReport(version=request.version, fingerprints=merge_reports(reports))

    async def unload(self, name: str) -> None:
        adapter = self.get_by_name(name)
        del self._by_name[name]
        adapter.replaced = True
        await self.remove_if_unused(adapter)

    async def remove_if_unused(self, adapter: LoadedAdapter) -> None:
        if adapter.replaced and not adapter.num_running and not self._processes.llm.errored:
            adapter.replaced = False  # once
            await self._processes.llm.remove_lora(adapter.request.lora_int_id)


def merge_reports(reports: list[dict[str, int]]) -> dict[str, int]:
    """Merge the workers' reports.

    Raises:
        WeightSyncError: two workers received different bytes.
    """
    merged: dict[str, int] = {}
    for report in reports:
        for name, value in report.items():
            if merged.setdefault(name, value) != value:
                raise WeightSyncError(f"vLLM's workers hold different weights of {name}")
    return merged
