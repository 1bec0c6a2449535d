"""Memory of a run: bytes on a device in each phase, by purpose. Pure arithmetic: loads no weights, asks no device.

A phase is estimated at the moment at which it needs most. Shapes: t tokens of a micro-batch on a rank, h hidden size,
q queries and k keys of a token, f width of the feed-forward layer, C tokens of a chunk of logits, V words.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from skyrl_train.config import RefConfig, SkyRLConfig
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.config.training_backends import TrainingBackendRegistry, get_ranks_per_replica
from skyrl_train.memory_plan.backends import BACKENDS, Division, Kind, Role
from skyrl_train.memory_plan.devices import Device
from skyrl_train.memory_plan.model_shape import ModelShape
from skyrl_train.step_plan import needs_old_log_probs, rows_a_micro_batch

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ROLES: tuple[Role, ...] = ("policy", "critic", "ref")
Parts = dict[str, float]

_BYTES_OF_A_GRAPH = 0.4e6
"""Bytes for one batch size and layer: 0.21 GiB for 35 sizes of Llama-3.2-1B's 16 layers (vLLM's pull request 11349)."""


@dataclass(frozen=True)
class Phase:
    """Memory of one process, or of all that share a device, in one phase."""

    name: str
    moment: str
    """When it needs most."""

    parts: Mapping[str, float]
    """Bytes on the device, by purpose."""

    host: float = 0.0
    """Bytes in host memory, of the process's model."""

    tokens: int = 0
    """Tokens of the micro-batch, of a whole replica; 0: none is computed."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def list_roles(cfg: SkyRLConfig) -> list[Role]:
    """Return the models of a run."""
    trainer = cfg.trainer
    used = {
        "policy": True,
        "critic": trainer.critic.model.path is not None,
        "ref": trainer.algorithm.uses_reference_model,
    }
    return [role for role in ROLES if used[role]]


def get_division(cfg: SkyRLConfig, role: Role, shape: ModelShape, kind: Kind) -> Division | None:
    """Return how a model is divided; None if the training backend's memory is not known."""
    like = TrainingBackendRegistry.get_requirements(cfg.trainer.strategy).memory_like
    return None if like is None else BACKENDS[like](cfg, role, shape, kind)


# ---- one rank of a model


@dataclass(frozen=True)
class _Computation:
    """Bytes of activations and logits of one micro-batch on a rank."""

    stored: float
    """From the forward to the backward, before the last layer's backward."""

    head: float
    """States between the last layer and the logits."""

    layer: float
    """While a layer is computed: all that its backward needs, and working memory."""

    logits: float

    tokens: int
    """Of the whole replica's micro-batch."""


def estimate_worker_phases(cfg: SkyRLConfig, role: Role, shape: ModelShape, kind: Kind) -> list[Phase]:
    """Return the phases of one rank of a model; empty if the training backend's memory is not known."""
    division = get_division(cfg, role, shape, kind)
    if division is None:
        return []
    trainer, phases = cfg.trainer, []
    title = {"policy": "policy log-probs", "critic": "critic values", "ref": "reference log-probs"}[role]
    if role != "policy" or needs_old_log_probs(cfg):
        rows = trainer.micro_train_batch_size_per_gpu if role == "policy" else trainer.micro_forward_batch_size_per_gpu
        phases.append(
            _forward(title, division, _estimate_computation(cfg, role, shape, division, rows, kind, trains=False))
        )
    if role != "ref":
        rows = trainer.micro_train_batch_size_per_gpu
        computation = _estimate_computation(cfg, role, shape, division, rows, kind, trains=True)
        phases.append(_estimate_training(f"train {role}", division, computation))
    return phases


def _estimate_computation(
    cfg: SkyRLConfig, role: Role, shape: ModelShape, division: Division, rows: int, kind: Kind, *, trains: bool
) -> _Computation:
    trainer, number, stream, h = cfg.trainer, division.number, division.stream, shape.hidden
    replica = get_ranks_per_replica(cfg, role)
    longest = cfg.generator.longest_context
    tokens = max(rows_a_micro_batch(cfg, rows, replica) * longest, longest)
    if trainer.max_tokens_per_microbatch is not None:
        tokens = max(trainer.max_tokens_per_microbatch * replica, longest)
    t = -(-tokens // division.tokens_by)
    width = shape.feed_forward
    routed = number * shape.experts_a_token * 3 * h  # tokens as they go to experts and come back
    # Queries, attention's answer and its copy; keys, values. Gate, up, their activation and product.
    attention = number * (3 * shape.query + 2 * shape.key) + 8 * (shape.query + shape.key) * shape.has_query_norms
    # Norms compute in float32: what they normalized and gave (8 bytes a number in either precision), twice.
    whole = stream * h + 16 * h + attention + 4 * number * width + routed
    entropy = trainer.algorithm.use_entropy_loss and role == "policy"
    chunk = min(trainer.logprobs_chunk_size, t * (division.words_by if division.words_by > 1 else 1))
    chunk *= shape.words / division.words_by
    if not trains:
        working = number * max(3 * width, 4 * shape.query + 2 * shape.key) + 12 * h + 2 * stream * h + routed
        logits = chunk * (4 if number == 4 else 6)
        return _Computation(0.0, (stream + 8 + number) * h * t, working * t, logits, tokens)
    working = number * max(2 * width + h, 4 * shape.query) + 4 * h
    stored_by_layer = stream * h if trainer.gradient_checkpointing else stream * h + whole
    stored = division.in_flight * division.layers * stored_by_layer * t
    layer = (whole if trainer.gradient_checkpointing else 0) + working
    # The product, in float32, its gradient, which is cast; oneDNN on a CPU takes a transposed copy of it.
    logits = chunk * ((8 if kind == "cpu" else 4) if number == 4 else 8) + chunk * (4 if entropy else 0)
    return _Computation(stored, (stream + 8 + 3 * number) * h * t, layer * t, logits, tokens)


def _forward(name: str, division: Division, computation: _Computation) -> Phase:
    at_rest = _on_device({"weights": division.weights}, division)
    if division.gradients:  # a model that is trained
        at_rest = _on_device({"weights": division.weights, "optimizer": division.optimizer}, division)
    moments: dict[str, Parts] = {
        "start": {"gathered weights": division.gathered_first},
        "a layer": {"gathered weights": division.gathered, "activations": computation.layer},
        "log-probs": {
            "gathered weights": division.gathered_head,
            "activations": computation.head,
            "logits": computation.logits,
        },
    }
    return _get_largest(name, at_rest, moments, division, computation.tokens)


def _estimate_training(name: str, division: Division, computation: _Computation) -> Phase:
    at_rest = _on_device(
        {"weights": division.weights, "gradients": division.gradients, "optimizer": division.optimizer}, division
    )
    stored, head = computation.stored, division.head_gradient
    moments: dict[str, Parts] = {
        "start": {"gathered weights": division.gathered_first},
        "backward of log-probs": {
            "gathered weights": division.gathered_head,
            "activations": stored + computation.head,
            "logits": computation.logits,
            "gradients in communication": 2 * head,
        },
        "backward of a layer": {
            "gathered weights": division.gathered,
            "activations": stored + computation.layer,
            "gradients in communication": head
            + division.layer_gradients
            + division.layer_buffer
            + division.copies_reduced,
        },
        "reduction of a layer": {
            "gathered weights": division.gathered_head,
            "activations": stored,
            "gradients in communication": head
            + division.layer_gradients
            + division.layer_reduction
            + division.copies_reduced,
        },
        "end of backward": {"gradients in communication": division.final_reduction + division.copies_reduced},
        "optimizer step": {"working memory": division.step},
    }
    return _get_largest(name, at_rest, moments, division, computation.tokens)


def _on_device(at_rest: Parts, division: Division) -> Parts:
    return {name: size for name, size in at_rest.items() if name not in division.host}


def _get_largest(name: str, at_rest: Parts, moments: Mapping[str, Parts], division: Division, tokens: int) -> Phase:
    moment = max(moments, key=lambda each: sum(moments[each].values()))
    host = sum(getattr(division, each) for each in division.host)
    parts = {part: size for part, size in (at_rest | moments[moment]).items() if size}
    return Phase(name, moment, parts, host, tokens)


# ---- engines


@dataclass(frozen=True)
class EnginePlan:
    """Memory of the engines' part of a device, and what fits into their cache."""

    weights: float
    working: float
    """Activations and logits of the largest step."""

    cache: float
    """Keys and values, and states of linear attention."""

    graphs: float
    """CUDA graphs of decoding steps."""

    bytes_a_token: float
    """Keys and values of a token, on each device of an engine."""

    answers: int
    """Answers of full length, each with a prompt of full length, that an engine holds at once."""

    wanted: int
    """Answers of a step for each engine."""

    shortage: str = ""
    """Reason why no answer fits."""

    lack: float = 0.0
    """Bytes missing for one answer."""

    @property
    def total(self) -> float:
        return self.weights + self.working + self.cache + self.graphs

    @property
    def parts(self) -> Parts:
        """Bytes by purpose."""
        parts = {"weights": self.weights, "working memory": self.working, "keys and values": self.cache}
        return parts | ({"CUDA graphs": self.graphs} if self.graphs else {})


def estimate_engine(cfg: SkyRLConfig, shape: ModelShape, device: Device) -> EnginePlan:
    """Return the memory of one device of an engine.

    vLLM and SGLang take `gpu_memory_utilization` of the device for weights, working memory, CUDA graphs and, with all
    that is left, the cache. The native engine allocates the cache per request, up to `max_num_seqs`, in addition to
    cached prefixes.
    """
    generator = cfg.generator
    number = BYTES[generator.model_dtype]
    tensor, stages = generator.inference_engine_tensor_parallel_size, generator.inference_engine_pipeline_parallel_size
    replicas = generator.inference_engine_data_parallel_size
    experts_by = max(generator.inference_engine_expert_parallel_size, tensor) * stages
    weights = number * ((shape.parameters - shape.experts) / (tensor * stages) + shape.experts / experts_by)
    bytes_a_token, bytes_beside = compute_cache_bytes(shape, number, tensor=tensor, stages=stages)
    length = generator.longest_context
    samples = cfg.trainer.train_batch_size * generator.n_samples_per_prompt
    wanted = -(-samples // (generator.num_inference_engines * replicas))
    full = min(wanted, generator.max_num_seqs)
    if device.kind == "cpu" or not EngineRegistry.get_requirements(generator.backend).reserves_memory:
        # One layer's states of a prompt that is read, and the logits of all running requests.
        working = number * length * (4 * shape.hidden + 4 * shape.feed_forward) + 8 * full * shape.words
        traits = EngineRegistry.get_requirements(generator.backend)
        if (
            traits.packs_weights and device.kind == "cpu"
        ):  # all but experts, and a table that is no output layer as well
            table = 0 if shape.is_tied else shape.words * shape.hidden
            weights += number * (shape.parameters - shape.experts - table)
        gib = generator.engine_init_kwargs.get("prefix_cache_gib", traits.prefix_cache_gib)
        keeps_prefixes = generator.enable_prefix_caching and not shape.num_linear_layers
        prefixes = min(gib * 2**30, wanted * length * bytes_a_token) if keeps_prefixes else 0.0
        cache = full * (length * bytes_a_token + bytes_beside) + prefixes
        graphs = 0.0
        if device.kind == "cuda" and not generator.resolve_enforce_eager(device.kind) and not shape.experts:
            graphs = _estimate_replay_bytes(full, length, shape)
        return EnginePlan(weights, working, cache, graphs, bytes_a_token, full, wanted)
    tokens = max(generator.max_num_batched_tokens, generator.max_num_seqs)
    states = 2 * number * shape.hidden + 3 * number * shape.feed_forward / tensor
    # Sampling has the logits of every request in float32, and a copy.
    working = tokens * states + 8 * generator.max_num_seqs * shape.words
    budget = generator.gpu_memory_utilization * device.memory - device.libraries
    graphs = 0.0
    if not generator.resolve_enforce_eager(device.kind):
        graphs = _estimate_graph_bytes(generator.max_num_seqs, shape.num_layers / stages)
    cache = budget - weights - working - graphs
    answer = length * bytes_a_token + bytes_beside
    answers = max(0, min(int(cache // answer), generator.max_num_seqs))
    shortage = ""
    if answers == 0:
        shortage = (
            f"generator.gpu_memory_utilization={generator.gpu_memory_utilization} gives the engine {budget / 1e9:.1f} "
            f"GB, of which weights take {weights / 1e9:.1f}, working memory {working / 1e9:.1f} and CUDA graphs "
            f"{graphs / 1e9:.1f}: a completion of {length} tokens with its prompt ({answer / 1e9:.2f} GB of keys and "
            "values) does not fit into the rest"
        )
    lack = max(0.0, answer - cache)
    return EnginePlan(weights, working, max(0.0, cache), graphs, bytes_a_token, answers, wanted, shortage, lack)


def compute_cache_bytes(shape: ModelShape, number: int, *, tensor: int = 1, stages: int = 1) -> tuple[float, float]:
    """Return the cached bytes per token and device, and per response in addition to its tokens (states of linear
    attention).

    Args:
        number: bytes of a number.
        tensor, stages: devices that divide heads and layers.
    """
    # A rank holds at least one head of keys.
    keys = shape.key / shape.num_key_value_heads * max(1.0, shape.num_key_value_heads / tensor)
    token = number * (shape.latent or 2 * keys) * (shape.num_layers - shape.num_linear_layers) / stages
    return token, (number * shape.state_inputs + 4 * shape.state) * shape.num_linear_layers / (tensor * stages)


def _estimate_graph_bytes(max_num_seqs: int, num_layers: float) -> float:
    """Return the memory of an engine's CUDA graphs, as vLLM captures them: one for each of some batch sizes up to
    2 `max_num_seqs` and 512, in parts between layers, and one more for each up to `max_num_seqs`, as a whole.

    `_BYTES_OF_A_GRAPH` is read from logs that others published, not measured here.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    num_graphs = sum(size <= 2 * max_num_seqs for size in sizes) + sum(size <= max_num_seqs for size in sizes)
    return num_graphs * num_layers * _BYTES_OF_A_GRAPH


def _estimate_replay_bytes(num_rows: int, length: int, shape: ModelShape) -> float:
    """Return the memory of the native engine's CUDA graphs, if it captures one for each padded number of rows and of
    keys (`native/decode_graphs.py`: two sizes from each power of two to the next, from 4 rows and 256 keys on), and of
    the logits that they share."""
    sizes = [1 + math.ceil(2 * math.log2(max(1.0, most / least))) for most, least in ((num_rows, 4), (length, 256))]
    return sizes[0] * sizes[1] * shape.num_layers * _BYTES_OF_A_GRAPH + 4 * num_rows * shape.words


# ---- devices


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run on its devices."""

    device: Device
    phases: tuple[Phase, ...]
    """Of one device (on a CPU: of one process), with what sleeps there meanwhile."""

    engine: EnginePlan | None
    """None: engines are started elsewhere."""

    workers: dict[Role, tuple[Phase, ...]] = field(default_factory=dict)
    """Phases of one rank of each model, alone."""

    machine: float = 0.0
    """On a CPU: bytes of all processes of the machine at the worst time."""

    host: float = 0.0
    """Bytes of a machine's host memory that models on GPUs take while they are offloaded or asleep."""

    notes: tuple[str, ...] = ()

    @property
    def excess(self) -> float:
        """Bytes that are missing, over all phases."""
        late = sum(max(0.0, phase.total - self.device.usable) for phase in self.phases if self.device.kind == "cuda")
        return late + max(0.0, self.machine - self.device.usable) + (self.engine.lack if self.engine else 0.0)

    @property
    def shortages(self) -> list[str]:
        """Reasons why the run does not fit; empty if it does."""
        found = [
            f"{phase.name} needs {phase.total / 1e9:.1f} GB of {self.device.usable / 1e9:.1f}"
            for phase in self.phases
            if phase.total > self.device.usable and self.device.kind == "cuda"
        ]
        if self.machine > self.device.usable:
            found.append(f"all processes need {self.machine / 1e9:.1f} GB of {self.device.usable / 1e9:.1f}")
        if self.engine is not None and self.engine.shortage:
            found.append(self.engine.shortage)
        return found


def estimate_memory(cfg: SkyRLConfig, shapes: Mapping[Role, ModelShape], device: Device) -> MemoryPlan:
    """Return the memory of a run.

    Args:
        cfg: validated settings.
        shapes: of each of `roles_of(cfg)`.
    """
    workers: dict[Role, tuple[Phase, ...]] = {
        role: tuple(estimate_worker_phases(cfg, role, shapes[role], device.kind)) for role in list_roles(cfg)
    }
    engine = estimate_engine(cfg, shapes["policy"], device) if cfg.generator.run_engines_locally else None
    notes = ()
    if not all(workers.values()):
        notes = (f"memory of training is not estimated for trainer.strategy={cfg.trainer.strategy}",)
    if device.kind == "cpu":
        return _on_processor(MemoryPlan(device, (), engine, workers, notes=notes), cfg, shapes)
    return _on_gpus(MemoryPlan(device, (), engine, workers, notes=notes), cfg, shapes)


def _on_gpus(plan: MemoryPlan, cfg: SkyRLConfig, shapes: Mapping[Role, ModelShape]) -> MemoryPlan:
    """Add phases and host memory to the plan of a run on GPUs."""
    device, workers, engine = plan.device, plan.workers, plan.engine
    placement, phases, host = cfg.trainer.placement, [], 0.0
    divisions = {role: get_division(cfg, role, shapes[role], "cuda") for role in workers}
    together = placement.colocate_all
    for role, own in workers.items():
        shares = _list_sharers(cfg, role, workers)
        asleep = sum(_estimate_asleep(cfg, other, divisions[other]) for other in shares)
        processes = 1 + len(shares) + (engine is not None and together)
        for phase in own:
            parts = dict(phase.parts) | {"libraries": processes * device.libraries}
            if asleep:
                parts["asleep"] = asleep
            phases.append(replace(phase, parts=parts))
        division = divisions[role]
        if division is not None:
            ranks = getattr(placement, f"{role}_num_gpus_per_node")
            offloaded = sum(getattr(division, each) for each in division.host)
            freed = 0 if division.keeps_gradients else division.gradients
            moved = division.resting - freed - _estimate_asleep(cfg, role, division)
            host += ranks * (moved if together or shares else offloaded)
    if engine is not None:
        parts = engine.parts
        shares = list(workers) if together else []
        parts["libraries"] = (1 + len(shares)) * device.libraries
        if asleep := sum(_estimate_asleep(cfg, role, divisions[role]) for role in shares):
            parts["asleep"] = asleep
        phases.insert(0, Phase("generate", "full cache", parts))
        if together and divisions["policy"] is not None:
            sync = _sync(cfg, shapes["policy"], divisions["policy"], engine, device, len(shares))
            if others := sum(_estimate_asleep(cfg, role, divisions[role]) for role in shares if role != "policy"):
                sync = replace(sync, parts=dict(sync.parts) | {"asleep": others})
            phases.append(sync)
            copies_weights = EngineRegistry.get_requirements(cfg.generator.backend).copies_weights_asleep
            if copies_weights or not cfg.generator.syncs_all_weights:  # else engines drop theirs
                host += placement.policy_num_gpus_per_node * engine.weights
    return replace(plan, phases=tuple(phases), host=host)


def _list_sharers(cfg: SkyRLConfig, role: Role, roles: Iterable[Role]) -> list[Role]:
    """Return the other models on a model's device: all, policy and reference, or none."""
    placement = cfg.trainer.placement
    others: list[Role] = [other for other in roles if other != role]
    if placement.colocate_all:
        return others
    return [other for other in others if placement.colocate_policy_ref and "critic" not in (role, other)]


def _sync(
    cfg: SkyRLConfig, shape: ModelShape, division: Division, engine: EnginePlan, device: Device, num_workers: int
) -> Phase:
    """Weights of policy and engine together on the device, and a bucket of gathered ones with its copy."""
    number = BYTES[cfg.generator.model_dtype]
    bucket = max(cfg.generator.weight_transfer_threshold_cuda_ipc_GB * 1e9, number * shape.words * shape.hidden)
    at_rest = _on_device({"weights": division.weights, "optimizer": division.optimizer}, division)
    parts = at_rest | {
        "engine's weights": engine.weights,
        "buckets": 2 * min(bucket, number * shape.parameters),
        "libraries": (1 + num_workers) * device.libraries,
    }
    return Phase("sync weights", "a bucket", parts)


def _estimate_asleep(cfg: SkyRLConfig, role: Role, division: Division | None) -> float:
    """Return the bytes that a model leaves on a device that others use. (`offload=auto` counts as `all`:
    `decisions.decide_memory` replaces it.)"""
    settings = getattr(cfg.trainer, role)
    if division is None:
        return 0.0
    moves = {"all": {"weights", "gradients", "optimizer"}, "optimizer": {"optimizer"}, "keep": set[str]()}
    left = {"weights", "gradients", "optimizer"} - moves.get(cfg.trainer.placement.offload, moves["all"])
    if not isinstance(settings, RefConfig) and not settings.optimizer_config.offload_after_step:
        left |= {"optimizer"}
    if not division.keeps_gradients:
        left -= {"gradients"}
    return float(sum(getattr(division, each) for each in left - division.host))


def _on_processor(plan: MemoryPlan, cfg: SkyRLConfig, shapes: Mapping[Role, ModelShape]) -> MemoryPlan:
    """Add phases and the machine's memory to the plan of a run on a CPU, where nothing is offloaded: all models rest in
    the machine's memory while one computes."""
    device, workers, engine = plan.device, plan.workers, plan.engine
    placement, phases = cfg.trainer.placement, []
    resting, peaks = 2 * device.libraries, [0.0]  # the driver, and Ray or a second engine
    for role, own in workers.items():
        ranks = getattr(placement, f"{role}_num_gpus_per_node")
        division = get_division(cfg, role, shapes[role], "cpu")
        at_rest = 0.0 if division is None else division.resting
        resting += ranks * (at_rest + device.libraries)
        for phase in own:
            parts = dict(phase.parts) | {"libraries": device.libraries}
            phases.append(replace(phase, parts=parts))
            peaks.append(ranks * max(0.0, phase.total - at_rest))
    if engine is not None:
        count = cfg.generator.num_inference_engines * cfg.generator.engine_world_size
        phases.insert(0, Phase("generate", "full cache", engine.parts | {"libraries": device.libraries}))
        resting += count * (engine.weights + device.libraries)
        peaks.append(count * (engine.working + engine.cache))
    return replace(plan, phases=tuple(phases), machine=resting + max(peaks))
