"""Choice of the transport of weights to the engines, and of each side's connection. Knows settings' names, not
engines."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from skyrl_train.errors import ConfigError
from skyrl_train.weight_sync.base import Encoding, Transport, WeightSyncInitInfo
from skyrl_train.weight_sync.fingerprint import Verification

Strategy = Literal["auto", "shared_memory", "cuda_ipc", "broadcast", "checkpoint", "adapter", "delta"]
"""The values of generator.weight_sync_strategy."""


class ReceivingEngine(Protocol):
    """Properties of an engine that the plan reads (`skyrl_train.inference_engines.base.EngineInfo` has them)."""

    @property
    def backend(self) -> str: ...

    @property
    def num_weight_processes(self) -> int: ...

    @property
    def unsupported(self) -> Mapping[Any, str]: ...


def choose_transport(
    strategy: Strategy,
    *,
    colocated: bool,
    device: Literal["cpu", "cuda"],
    remote: bool,
    same_node: bool,
    one_device: bool = True,
    one_process: bool = False,
) -> tuple[Transport, Encoding]:
    """The way that `generator.weight_sync_strategy` means here.

    Args:
        colocated: workers and engines share devices.
        device: of both.
        remote: the engines were started elsewhere (generator.run_engines_locally=false).
        same_node: workers and engines are known to be on one machine.
        one_device: what they share is one GPU; memory of one cannot be opened from another.
        one_process: workers and engines are objects of one process (trainer.placement.launcher=inline), which cannot
            open its own GPU memory by a handle, nor be two ranks of NCCL on one GPU.

    Raises:
        ConfigError: it cannot work here.
    """
    match strategy:
        case "adapter":
            raise ValueError("adapters are files that engines load; they take no transport")
        case "auto":
            return _best(colocated, device, remote, same_node, one_device, one_process), "full"
        case "delta":
            transport = _best(colocated, device, remote, same_node, one_device, one_process)
            # The encoding is made from host memory, where the last weights are kept.
            return ("shared_memory" if transport == "cuda_ipc" else transport), "delta"
        case "shared_memory" if not same_node:
            raise _impossible(strategy, "needs workers and engines on one machine", remote)
        case "cuda_ipc" if device != "cuda":
            raise _impossible(strategy, f"needs models on cuda; they are on {device}", remote)
        # A handle opens memory of the same GPU only, and a server elsewhere may not even be on this machine.
        case "cuda_ipc" if remote or not (colocated and same_node):
            raise _impossible(strategy, "needs engines on the workers' GPUs (trainer.placement.colocate_all)", remote)
        case "cuda_ipc" if not one_device:
            raise ConfigError(
                "generator.weight_sync_strategy=cuda_ipc serves one GPU, that of the policy's first worker; with "
                "several use shared_memory, or auto"
            )
        case _:
            return strategy, "full"


def init_infos_for(
    transport: Transport,
    encoding: Encoding,
    engines: Sequence[ReceivingEngine],
    *,
    backend: str = "gloo",
    master_address: str = "",
    master_port: int = 0,
    directory: str = "",
    verification: Verification = "sampled",
    timeout_seconds: float = 600.0,
) -> list[WeightSyncInitInfo]:
    """The trainer's info and each engine's, in order. Ranks count the processes of all engines, from 1.

    Raises:
        ConfigError: an engine cannot take part.
    """
    for index, engine in enumerate(engines):
        why = engine.unsupported.get("weight_update")
        if why is None and transport == "broadcast":
            why = engine.unsupported.get("broadcast")
        if why is not None:
            raise ConfigError(
                f"generator.weight_sync_strategy: engine {index} ({engine.backend}) cannot get its weights by "
                f"{transport}: {why}. Use generator.weight_sync_strategy=checkpoint"
            )
    counts = [1, *(engine.num_weight_processes for engine in engines)]
    return [
        WeightSyncInitInfo(
            transport=transport,
            encoding=encoding,
            backend=backend,
            master_address=master_address,
            master_port=master_port,
            rank=sum(counts[:position]),
            world_size=sum(counts),
            directory=directory,
            verification=verification,
            timeout_seconds=timeout_seconds,
        )
        for position in range(len(counts))
    ]


def _best(
    colocated: bool, device: Literal["cpu", "cuda"], remote: bool, same_node: bool, one_device: bool, one_process: bool
) -> Transport:
    if remote:
        return "checkpoint"
    if one_process:
        return "shared_memory"
    if colocated and same_node:
        return "cuda_ipc" if device == "cuda" and one_device else "shared_memory"
    return "broadcast"


def _impossible(strategy: str, rule: str, remote: bool) -> ConfigError:
    other = "checkpoint" if remote else "broadcast"
    return ConfigError(
        f"generator.weight_sync_strategy={strategy} {rule}. Use generator.weight_sync_strategy={other}, or auto"
    )
