"""Time of a training step by its parts, from published speeds of devices or from a run that was measured.

Operations of a token are 2 n in a forward and 4 n in a backward, n parameters that it meets, and 4 L q operations for
each token that it attends to (https://arxiv.org/abs/2001.08361, section 2.1). All answers are taken to be equally
long.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_train.config import SkyRLConfig
from skyrl_train.memory_plan.backends import Role
from skyrl_train.memory_plan.devices import Device
from skyrl_train.memory_plan.memory import BYTES, EnginePlan, list_roles
from skyrl_train.memory_plan.model_shape import ModelShape
from skyrl_train.step_plan import needs_old_log_probs
from skyrl_train.utils.run_folder import RunFolder

TRAINING_SHARE, DECODING_SHARE = 0.4, 0.6
"""Share of a GPU's operations that training reaches (Llama 3: 38 to 43 %, https://arxiv.org/abs/2407.21783, table 4),
and share of its bandwidth that decoding reaches: with it the throughput that TensorRT-LLM 1.0 publishes for Llama 3.1
8B in FP8 on an H100 is 1.1 to 1.4 times the formula's, at ten pairs of lengths (docs/planner.md). Micro-batches of
few tokens reach less."""

PROCESSOR_SHARE = 0.7
"""The same of a CPU, whose speeds in the table are already measured ones."""

TIMINGS = {
    "generate": "timing/generate",
    "log-probs and values": "timing/fwd_logprobs_values_reward",
    "train": "timing/train_critic_and_policy",
    "sync weights": "timing/sync_weights",
}
"""Part of a step -> metric that a run records of it."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part."""

    seconds: Mapping[str, float]
    tokens: tuple[int, int]
    """Of prompt and answer of a sample."""

    source: str
    """Origin of the speeds."""

    concurrent: bool
    """Generation and training take place at the same time (`fully_async`)."""

    generation_rate: float = 0.0
    """Tokens of completions a second of an engine; 0 without engines of the run's own."""

    @property
    def total(self) -> float:
        generate = self.seconds["generate"]
        rest = sum(self.seconds.values()) - generate
        return max(generate, rest) if self.concurrent else generate + rest


def step_time(
    cfg: SkyRLConfig,
    shapes: Mapping[Role, ModelShape],
    device: Device,
    engine: EnginePlan | None,
    *,
    prompt_tokens: int | None = None,
    answer_tokens: int | None = None,
    factors: Mapping[str, float] | None = None,
) -> StepTime:
    """Estimate the time of a training step.

    Args:
        prompt_tokens, answer_tokens: mean lengths of a sample; None: the longest there may be.
        factors: measured over estimated time of each part, from `measure_factors`.
    """
    trainer, generator = cfg.trainer, cfg.generator
    answer = answer_tokens or generator.sampling_params.max_generate_length
    prompt = prompt_tokens or generator.max_input_length
    samples = trainer.train_batch_size * generator.n_samples_per_prompt
    is_gpu = device.kind == "cuda"
    share, bandwidth = (TRAINING_SHARE, DECODING_SHARE) if is_gpu else (PROCESSOR_SHARE, PROCESSOR_SHARE)

    def compute(role: Role, passes: float) -> float:
        """Seconds of `passes` forwards over all samples, on all ranks of a model."""
        shape, tokens = shapes[role], prompt + answer
        operations = 2 * shape.active * tokens + 2 * shape.num_layers * shape.query * tokens**2
        return passes * samples * operations / (share * device.flops * getattr(trainer.placement, f"{role}_world_size"))

    roles = list_roles(cfg)
    forward = sum(compute(role, 1) for role in roles if role != "policy" or needs_old_log_probs(cfg))
    passes = (4 if trainer.gradient_checkpointing else 3) * trainer.update_epochs_per_batch
    train = sum(compute(role, passes) for role in roles if role != "ref")
    shape = shapes["policy"]
    number = BYTES[generator.model_dtype]
    seconds = {
        "generate": 0.0
        if engine is None
        else _estimate_generation(cfg, shape, device, engine, prompt, answer, bandwidth, share),
        "log-probs and values": forward,
        "train": train,
        # Every rank gathers all weights and gives them on.
        "sync weights": 2 * number * shape.parameters / min(device.link, _get_slowest_link(cfg, device)),
    }
    source = "published speeds" if is_gpu else "speeds of one processor core (docs/benchmarks.md)"
    if factors:
        seconds = {part: value * factors.get(part, 1.0) for part, value in seconds.items()}
        source = f"{source}, times what a run measured"
    rate = engine.wanted * answer / seconds["generate"] if engine is not None and seconds["generate"] else 0.0
    return StepTime(seconds, (prompt, answer), source, trainer.fully_async.enabled, rate)


def _get_slowest_link(cfg: SkyRLConfig, device: Device) -> float:
    return device.network if cfg.trainer.placement.policy_num_nodes > 1 else device.link


def _estimate_generation(
    cfg: SkyRLConfig,
    shape: ModelShape,
    device: Device,
    engine: EnginePlan,
    prompt: int,
    answer: int,
    bandwidth: float,
    share: float,
) -> float:
    """Seconds of all answers of a step on one engine: reading the prompts, then decoding as many at a time as fit."""
    generator = cfg.generator
    ranks = generator.inference_engine_tensor_parallel_size * generator.inference_engine_pipeline_parallel_size
    context = prompt + answer / 2
    # As many as the cache holds at their mean length.
    held = engine.cache / (engine.bytes_a_token * (prompt + answer)) if engine.bytes_a_token else engine.wanted
    at_once = max(1.0, min(engine.wanted, generator.max_num_seqs, held))
    # A step of decoding reads all weights (of a mixture with many requests all experts) and all keys and values.
    read = engine.weights + at_once * context * engine.bytes_a_token
    computed = 2 * at_once * shape.active / ranks
    iteration = max(read / (bandwidth * device.bandwidth), computed / (share * device.flops))
    prompts = -(-engine.wanted // generator.n_samples_per_prompt) if generator.enable_prefix_caching else engine.wanted
    prefill = 2 * prompts * prompt * shape.active / ranks / (share * device.flops)
    return prefill + engine.wanted / at_once * answer * iteration


def measure_factors(run: RunFolder, estimate: StepTime) -> dict[str, float]:
    """Return measured over estimated seconds of each part of a step of a run, by the medians of its steps.

    Args:
        estimate: of that run's settings and lengths.
    """
    rows = run.read_metrics()
    factors = {}
    for part, metric in TIMINGS.items():
        values = [float(row[metric]) for row in rows if isinstance(row.get(metric), float | int)]
        if values and estimate.seconds[part] > 0:
            factors[part] = statistics.median(values) / estimate.seconds[part]
    return factors
