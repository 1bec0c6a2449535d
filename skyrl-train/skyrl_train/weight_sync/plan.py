"""Choice of the transport to each engine, and of the policy ranks that send to it. Depends on settings' names, not on
engines."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from skyrl_train.errors import ConfigError
from skyrl_train.weight_sync.base import Encoding, Transport, WeightSyncInitInfo
from skyrl_train.weight_sync.fingerprint import Verification

Strategy = Literal["auto", "shared_memory", "cuda_ipc", "broadcast", "checkpoint", "adapter", "delta"]
"""The values of generator.weight_sync_strategy."""


class ReceivingEngine(Protocol):
    """Properties of an engine that the plan uses (provided by `skyrl_train.inference_engines.base.EngineInfo`)."""

    @property
    def backend(self) -> str: ...

    @property
    def num_weight_processes(self) -> int: ...

    @property
    def node(self) -> str | None: ...

    @property
    def gpus(self) -> Sequence[str]: ...

    @property
    def unsupported(self) -> Mapping[Any, str]: ...


@dataclass(frozen=True, kw_only=True)
class RankLocation:
    """Node and device of a policy rank."""

    node: str
    """The machine whose shared memory it sees (`EngineInfo.node`)."""
    gpu: str | None = None
    """UUID of its GPU; None on a CPU."""


@dataclass(frozen=True)
class Route:
    """Transport of weights to one engine."""

    transport: Transport
    encoding: Encoding = "full"
    sources: tuple[int, ...] = (0,)
    """Policy ranks whose bytes the engine takes, as in `WeightSyncInitInfo`."""


def plan_routes(
    strategy: Strategy,
    engines: Sequence[ReceivingEngine],
    ranks: Sequence[RankLocation],
    *,
    colocated: bool,
    device: Literal["cpu", "cuda"],
    remote: bool,
    one_process: bool = False,
) -> list[Route]:
    """Plan the route to each engine for `generator.weight_sync_strategy`.

    Args:
        ranks: ranks of the policy, in order.
        colocated: workers and engines share devices.
        device: device type of both.
        remote: the engines are external (generator.run_engines_locally=false).
        one_process: workers and engines are objects of one process (trainer.placement.launcher=inline), which cannot
            open its own GPU memory by a handle, nor form two NCCL ranks on one GPU.

    Raises:
        ConfigError: the strategy is impossible with these devices or engines.
    """
    near = _find_ranks_on_nodes(engines, ranks)
    on_gpus = [_find_ranks_on_gpus(engine, ranks) for engine in engines]
    shares_memory = (colocated or one_process) and not remote
    match strategy:
        case "adapter":
            raise ValueError("adapters are files that engines load; they take no transport")
        case "auto" if remote:
            return [Route("checkpoint") for _ in engines]
        case "auto" if shares_memory:
            by_handle = device == "cuda" and not one_process
            return [
                Route("cuda_ipc", sources=gpus)
                if by_handle and gpus
                else Route("broadcast")
                if source is None
                else Route("shared_memory", sources=(source,))
                for source, gpus in zip(near, on_gpus, strict=True)
            ]
        case "auto":
            return [Route("broadcast") for _ in engines]
        case "delta":
            # Only rank 0 encodes, since it stores the last weights.
            is_near = all(engine.node == ranks[0].node for engine in engines)
            transport = "checkpoint" if remote else "shared_memory" if shares_memory and is_near else "broadcast"
            return [Route(transport, "delta") for _ in engines]
        case "shared_memory":
            if None in near:
                raise _make_impossible_error(
                    strategy, "needs a worker of the policy on the machine of each engine", remote
                )
            return [Route(strategy, sources=(source,)) for source in near if source is not None]
        case "cuda_ipc":
            if device != "cuda":
                raise _make_impossible_error(strategy, f"needs models on cuda; they are on {device}", remote)
            # A handle opens memory of the same GPU only, and a server elsewhere may not even be on this machine.
            if remote or not colocated or not all(on_gpus):
                raise _make_impossible_error(
                    strategy, "needs engines on the workers' GPUs (trainer.placement.colocate_all)", remote
                )
            return [Route(strategy, sources=gpus) for gpus in on_gpus]
        case _:
            return [Route(strategy) for _ in engines]


def init_infos_for(
    routes: Sequence[Route],
    engines: Sequence[ReceivingEngine],
    *,
    backend: str = "gloo",
    master_address: str = "",
    master_port: int = 0,
    directory: str = "",
    verification: Verification = "sampled",
    timeout_seconds: float = 600.0,
) -> list[WeightSyncInitInfo]:
    """Return the connection of each engine. In the process group of the engines that receive broadcasts, the trainer is
    rank 0, and the engines' processes are numbered from 1.

    Raises:
        ConfigError: an engine does not support its route.
    """
    for index, (route, engine) in enumerate(zip(routes, engines, strict=True)):
        why = engine.unsupported.get("weight_update")
        if why is None and route.transport == "broadcast":
            why = engine.unsupported.get("broadcast")
        if why is not None:
            raise ConfigError(
                f"generator.weight_sync_strategy: engine {index} ({engine.backend}) cannot get its weights by "
                f"{route.transport}: {why}. Use generator.weight_sync_strategy=checkpoint"
            )
    counts = [
        engine.num_weight_processes if route.transport == "broadcast" else 0
        for route, engine in zip(routes, engines, strict=True)
    ]
    return [
        WeightSyncInitInfo(
            transport=route.transport,
            encoding=route.encoding,
            sources=route.sources,
            backend=backend,
            master_address=master_address,
            master_port=master_port,
            rank=1 + sum(counts[:index]),
            world_size=1 + sum(counts),
            directory=directory,
            verification=verification,
            timeout_seconds=timeout_seconds,
        )
        for index, route in enumerate(routes)
    ]


def _find_ranks_on_nodes(engines: Sequence[ReceivingEngine], ranks: Sequence[RankLocation]) -> list[int | None]:
    """Return for each engine a rank on the same machine, assigned round-robin; None if the machine has no rank."""
    num_engines = Counter[str | None]()
    sources: list[int | None] = []
    for engine in engines:
        there = [rank for rank, place in enumerate(ranks) if place.node == engine.node]
        sources.append(there[num_engines[engine.node] % len(there)] if there else None)
        num_engines[engine.node] += 1
    return sources


def _find_ranks_on_gpus(engine: ReceivingEngine, ranks: Sequence[RankLocation]) -> tuple[int, ...]:
    """Return the ranks on an engine's GPUs; empty if one of its GPUs has no rank."""
    if (
        not engine.gpus
    ):  # unknown: all ranks on its machine offer a handle, and each process selects the handle of its GPU
        return tuple(rank for rank, place in enumerate(ranks) if place.gpu and place.node == engine.node)
    rank_of = {place.gpu: rank for rank, place in enumerate(ranks)}
    if not set(engine.gpus) <= set(rank_of):
        return ()
    return tuple(sorted({rank_of[gpu] for gpu in engine.gpus}))


def _make_impossible_error(strategy: str, rule: str, remote: bool) -> ConfigError:
    other = "checkpoint" if remote else "broadcast"
    return ConfigError(
        f"generator.weight_sync_strategy={strategy} {rule}. Use generator.weight_sync_strategy={other}, or auto"
    )
