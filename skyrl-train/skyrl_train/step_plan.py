"""Plan of a run before it starts: optimizer steps and micro-batches of a step, prompts left out, memory of each phase.

Pure arithmetic on the settings: loads no weights, asks no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.algorithms.losses import TokenSelectorRegistry
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.models import FSDPConfig, LoRAConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry, ranks_per_replica

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model for the estimates. None: unknown, and parts that depend on it are left out."""

    num_parameters: int
    num_trainable: int | None = None
    """Parameters that have a gradient: the adapters' alone with LoRA. None: all."""
    hidden_size: int | None = None
    num_layers: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class ModelPlan:
    """Division of a step's samples for one model."""

    name: str
    data_parallel_size: int
    """Data-parallel ranks: workers / those that share rows."""
    num_mini_batches: int
    """Mini-batches of a step: optimizer steps of one pass over it. 0: the model is not trained."""
    optimizer_steps: int
    """Optimizer steps of a training step, all passes together."""
    samples_a_mini_batch: int
    samples_a_rank: int
    """Samples of a mini-batch on the data-parallel rank that has most."""
    micro_batches: int
    """Forward and backward passes of a worker for a mini-batch; with a token budget, if every sample had the maximal
    length."""
    dummy_micro_batches: int
    """Micro-batches of a mini-batch, over all ranks, that count nothing, so that all ranks compute as many."""
    forward_micro_batches: int
    """Forward passes of a worker for the log-probs or values of a whole step. 0: none are needed."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one worker (or engine) needs in a phase, by purpose. Memory of libraries, fragmentation and
    communication buffers come on top."""

    phase: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class StepPlan:
    """Numbers of a run. `str(plan)` is a table to read."""

    prompts: int
    samples_a_prompt: int
    update_epochs: int
    models: tuple[ModelPlan, ...]
    num_steps: int | None
    """Training steps of the run. None: the size of the dataset is not known."""
    prompts_left_out: int | None
    """Prompts at the end of every epoch that do not fill a batch."""
    memory: tuple[MemoryEstimate, ...]
    notes: tuple[str, ...]

    @property
    def samples(self) -> int:
        return self.prompts * self.samples_a_prompt

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        lines = [f"a step: {self.prompts} prompts x {self.samples_a_prompt} samples = {self.samples} samples"]
        for model in self.models:
            lines += _lines_of(model, self.update_epochs)
        if self.num_steps is not None:
            trained = [model for model in self.models if model.optimizer_steps]
            steps = ", ".join(f"{self.num_steps * model.optimizer_steps} of the {model.name}" for model in trained)
            lines.append(f"the run: {self.num_steps} training steps; optimizer steps: {steps}")
        if self.prompts_left_out:
            lines.append(f"left out: {self.prompts_left_out} prompts an epoch, which do not fill a batch")
        lines += self.notes
        if self.memory:
            lines.append("memory of one worker or engine, ESTIMATES in GB (1e9 bytes):")
        for estimate in self.memory:
            parts = " + ".join(f"{name} {size / 1e9:.2f}" for name, size in estimate.parts.items())
            lines.append(f"  {estimate.phase:<20} {estimate.total / 1e9:8.2f} = {parts}")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


def step_plan(
    cfg: SkyRLConfig,
    num_parameters: int | None = None,
    *,
    policy: ModelShape | None = None,
    critic: ModelShape | None = None,
    num_prompts: int | None = None,
) -> StepPlan:
    """Compute the plan of a run with these (validated) settings.

    Args:
        num_parameters: size of the policy, if nothing else of its shape is known.
        policy, critic: their shapes, from `model_shape`. Without any of the three, no memory is estimated.
        num_prompts: prompts of the training set.

    Memory of a worker, with N parameters of which M train, S ranks that divide them (`fsdp_size`), e bytes a number of
    the computation (2 with bf16, else 4), L layers of width H, V words, n tokens of a micro-batch of the longest
    samples divided by `sequence_parallel_size`, c `logprobs_chunk_size`:

        weights      4 N / S                            float32 masters
        gradients    4 M / S
        Adam         8 M / S                            running mean and variance
        gathered     2 e N / L                          two layers at a time; e N without `reshard_after_forward`
        logits       8 c V (4 c V forward only)         a chunk of logits and its gradient, float32
        activations  e n H (L + 17) with gradient checkpointing: every layer's input, and one layer in full;
                     e n H 17 L without                 17: https://arxiv.org/abs/2205.05198, section 4.1, without the
                                                        attention matrix, dropout masks counted as numbers
                     e n H 17 forward only

    and of an engine N numbers of `generator.model_dtype`; its cache comes on top.
    """
    trainer, generator, placement = cfg.trainer, cfg.generator, cfg.trainer.placement
    if policy is None and num_parameters is not None:
        policy = ModelShape(num_parameters)
    updates = trainer.update_epochs_per_batch
    has_critic = trainer.critic.model.path is not None
    sp = ranks_per_replica(cfg, "policy")
    learner = _model_plan(cfg, "policy", trainer.policy_mini_batch_size, placement.policy_world_size, sp)
    models = [learner]
    memory = [] if policy is None else _policy_memory(cfg, policy)
    if has_critic:
        sp = ranks_per_replica(cfg, "critic")
        models.append(_model_plan(cfg, "critic", trainer.critic_mini_batch_size, placement.critic_world_size, sp))
        if critic is not None:
            memory += _critic_memory(cfg, critic)
    if trainer.algorithm.uses_reference_model:
        sp = ranks_per_replica(cfg, "ref")
        models.append(_model_plan(cfg, "reference", None, placement.ref_world_size, sp))
        if policy is not None:
            rows = trainer.micro_forward_batch_size_per_gpu
            parts = _forward_memory(cfg, policy, trainer.ref.fsdp_config, placement.ref_world_size, sp, rows)
            memory.append(MemoryEstimate("reference log-probs", parts))
    num_steps = prompts_left_out = None
    if num_prompts is not None:
        batches, prompts_left_out = divmod(num_prompts, trainer.train_batch_size)
        num_steps = batches * trainer.epochs
        num_steps = min(num_steps, trainer.max_training_steps or num_steps)
    return StepPlan(
        prompts=trainer.train_batch_size,
        samples_a_prompt=generator.n_samples_per_prompt,
        update_epochs=updates,
        models=tuple(models),
        num_steps=num_steps,
        prompts_left_out=prompts_left_out,
        memory=tuple(memory) if _memory_is_known(cfg) else (),
        notes=_notes(cfg),
    )


def model_shape(
    path: str, *, lora: LoRAConfig | None = None, overrides: dict[str, object] | None = None, is_critic: bool = False
) -> ModelShape:
    """The shape of the model at `path`, a folder or a hub name, from its config alone: the model is made on the meta
    device, where tensors have no content.

    Args:
        lora: with a rank above 0, the trainable parameters are those of the adapters: rank * (inputs + outputs) of each
            linear layer that gets one.
        overrides: fields of the model's config to replace.
        is_critic: without an output layer over the vocabulary.
    """
    import torch  # optional and heavy, as transformers: whoever plans from numbers needs neither
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    for name, value in (overrides or {}).items():
        setattr(config, name, value)
    with torch.device("meta"):
        model = (AutoModel if is_critic else AutoModelForCausalLM).from_config(config, trust_remote_code=True)
    text = config.get_text_config()
    return ModelShape(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_trainable=_adapter_parameters(model, lora) if lora is not None and lora.rank else None,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        vocab_size=None if is_critic else text.vocab_size,
    )


def _adapter_parameters(model: Any, lora: LoRAConfig) -> int:
    from torch import nn

    def named(name: str, names: str | list[str] | None) -> bool:
        candidates = [names] if isinstance(names, str) else names or []
        return any(name == candidate or name.endswith(f".{candidate}") for candidate in candidates)

    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    total = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or named(name, lora.exclude_modules):
            continue
        if module is not output if lora.target_modules == "all-linear" else named(name, lora.target_modules):
            total += lora.rank * (module.in_features + module.out_features)
    return total


# ---- samples


def _model_plan(
    cfg: SkyRLConfig, name: str, mini_batch_prompts: int | None, workers: int, sequence_parallel_size: int
) -> ModelPlan:
    trainer, samples_a_prompt = cfg.trainer, cfg.generator.n_samples_per_prompt
    data_parallel_size = workers // sequence_parallel_size
    is_trained = mini_batch_prompts is not None
    prompts = mini_batch_prompts if mini_batch_prompts is not None else trainer.train_batch_size
    num_mini_batches = trainer.train_batch_size // prompts
    rank_sizes = _divide_evenly(prompts * samples_a_prompt, data_parallel_size)
    rows = _rows_a_micro_batch(cfg, trainer.micro_train_batch_size_per_gpu, sequence_parallel_size)
    counts = [-(-share // rows) for share in rank_sizes]
    # The policy's old log-probs are computed in its training micro-batches.
    forward_rows = rows
    if name != "policy":
        forward_rows = _rows_a_micro_batch(cfg, trainer.micro_forward_batch_size_per_gpu, sequence_parallel_size)
    only_forward = num_mini_batches * -(-rank_sizes[0] // forward_rows)
    return ModelPlan(
        name=name,
        data_parallel_size=data_parallel_size,
        num_mini_batches=num_mini_batches if is_trained else 0,
        optimizer_steps=num_mini_batches * trainer.update_epochs_per_batch if is_trained else 0,
        samples_a_mini_batch=sum(rank_sizes),
        samples_a_rank=rank_sizes[0],
        micro_batches=counts[0] if is_trained else 0,
        dummy_micro_batches=sum(counts[0] - count for count in counts) if is_trained else 0,
        forward_micro_batches=0 if name == "policy" and not needs_old_log_probs(cfg) else only_forward,
    )


def needs_old_log_probs(cfg: SkyRLConfig) -> bool:
    """Return True if the policy's log-probs at the start of a step need a forward pass of their own: not where one
    optimizer step takes all rows, and nothing else reads them."""
    trainer = cfg.trainer
    updates = trainer.train_batch_size // trainer.policy_mini_batch_size * trainer.update_epochs_per_batch
    algorithm = trainer.algorithm
    are_read = (
        algorithm.use_kl_in_reward
        or trainer.distillation.rewards_tokens
        or algorithm.off_policy_correction.is_on
        or algorithm.use_tis
        or algorithm.policy_loss_type in TokenSelectorRegistry
    )
    return are_read or updates > 1


def _divide_evenly(total: int, parts: int) -> list[int]:
    """Divide `total` into parts that differ by at most one, the larger first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _rows_a_micro_batch(cfg: SkyRLConfig, rows: int, sequence_parallel_size: int) -> int:
    budget = cfg.trainer.max_tokens_per_microbatch
    return rows if budget is None else max(1, budget * sequence_parallel_size // cfg.generator.longest_context)


def _lines_of(model: ModelPlan, update_epochs: int) -> list[str]:
    ranks = f"{model.data_parallel_size} data-parallel rank" + ("s" if model.data_parallel_size > 1 else "")
    uneven = model.samples_a_mini_batch % model.data_parallel_size != 0
    lines = []
    if model.num_mini_batches:
        lines = [
            f"{model.name}: {model.num_mini_batches} mini-batches x {update_epochs} update epochs = "
            f"{model.optimizer_steps} optimizer steps a training step",
            f"  a mini-batch: {model.samples_a_mini_batch} samples over {ranks} = {model.samples_a_rank} samples "
            f"{'at most' if uneven else 'each'}, {model.micro_batches} micro-batches each"
            + (f"; {model.dummy_micro_batches} dummy micro-batches" if model.dummy_micro_batches else ""),
        ]
    if model.forward_micro_batches:
        lines.append(f"{model.name}, forward only: {ranks}, {model.forward_micro_batches} micro-batches each a step")
    return lines


def _memory_is_known(cfg: SkyRLConfig) -> bool:
    return TrainingBackendRegistry.requirements(cfg.trainer.strategy).memory_estimates


def _notes(cfg: SkyRLConfig) -> tuple[str, ...]:
    notes = []
    if not _memory_is_known(cfg):
        notes.append(f"memory is not estimated for trainer.strategy={cfg.trainer.strategy}")
    if cfg.trainer.max_tokens_per_microbatch is not None:
        notes.append(
            f"micro-batches hold at most {cfg.trainer.max_tokens_per_microbatch} tokens: their numbers are those of "
            f"samples of {cfg.generator.longest_context} tokens each, and fewer with shorter ones"
        )
    if cfg.generator.step_wise_trajectories:
        notes.append("every turn is a sample of its own (step-wise): the numbers of samples are for one turn each")
    if cfg.generator.task is not None:
        notes.append(
            f"{cfg.generator.task} sets the length of trajectories; one has a row for each sequence of turns that only "
            "append, usually one: the numbers of samples are for one row each"
        )
    notes += _overlong_note(cfg)
    sampling = cfg.trainer.algorithm.dynamic_sampling
    if sampling.type == "filter":
        limit = f"up to {sampling.max_sample_batches}" if sampling.max_sample_batches > 0 else "any number of"
        notes.append(f"dynamic sampling: {limit} batches of prompts fill one, so an epoch may have fewer steps")
    return tuple(notes)


def _overlong_note(cfg: SkyRLConfig) -> list[str]:
    """Say where the overlong penalty begins and ends."""
    buffer, limit = cfg.trainer.algorithm.overlong_buffer, cfg.generator.sampling_params.max_generate_length
    if buffer.len is None:
        return []
    rises = f"rises from 0 to {buffer.penalty_factor:g} between"
    if buffer.counts == "response":
        begins = limit - buffer.len
        return [f"overlong penalty (overlong_buffer.counts=response): {rises} response tokens {begins} and {limit}"]
    context, longest_prompt = cfg.generator.longest_context, cfg.generator.max_input_length
    begins = context - buffer.len
    return [
        f"overlong penalty (overlong_buffer.counts=context): {rises} tokens {begins} and {context} of prompt and "
        f"response; after a prompt of {longest_prompt} tokens it begins at response token "
        f"{max(0, begins - longest_prompt)}, after one of 100 at response token {max(0, begins - 100)}"
    ]


# ---- memory


def _policy_memory(cfg: SkyRLConfig, shape: ModelShape) -> list[MemoryEstimate]:
    trainer, workers = cfg.trainer, cfg.trainer.placement.policy_world_size
    fsdp, sp = trainer.policy.fsdp_config, ranks_per_replica(cfg, "policy")
    weights = shape.num_parameters * _BYTES[cfg.generator.model_dtype]
    estimates = [MemoryEstimate("generate (an engine)", {"weights": weights})]
    if needs_old_log_probs(cfg):
        rows = trainer.micro_train_batch_size_per_gpu
        estimates.append(MemoryEstimate("policy log-probs", _forward_memory(cfg, shape, fsdp, workers, sp, rows)))
    return [*estimates, MemoryEstimate("train policy", _training_memory(cfg, shape, fsdp, workers, sp))]


def _critic_memory(cfg: SkyRLConfig, shape: ModelShape) -> Sequence[MemoryEstimate]:
    critic, workers = cfg.trainer.critic, cfg.trainer.placement.critic_world_size
    arguments = cfg, shape, critic.fsdp_config, workers, ranks_per_replica(cfg, "critic")
    return [
        MemoryEstimate("critic values", _forward_memory(*arguments, cfg.trainer.micro_forward_batch_size_per_gpu)),
        MemoryEstimate("train critic", _training_memory(*arguments)),
    ]


def _training_memory(cfg: SkyRLConfig, shape: ModelShape, fsdp: FSDPConfig, workers: int, sp: int) -> dict[str, int]:
    trainable = shape.num_parameters if shape.num_trainable is None else shape.num_trainable
    ranks = _num_sharding_ranks(fsdp, workers)
    # Adapters come on top of the frozen model.
    resting = shape.num_parameters if shape.num_trainable is None else shape.num_parameters + shape.num_trainable
    parts = {"weights": 4 * resting // ranks, "gradients": 4 * trainable // ranks, "Adam": 8 * trainable // ranks}
    rows = cfg.trainer.micro_train_batch_size_per_gpu
    return parts | _compute_memory(cfg, shape, fsdp, sp, rows, with_gradient=True)


def _forward_memory(
    cfg: SkyRLConfig, shape: ModelShape, fsdp: FSDPConfig, workers: int, sp: int, rows: int
) -> dict[str, int]:
    parts = {"weights": 4 * shape.num_parameters // _num_sharding_ranks(fsdp, workers)}
    return parts | _compute_memory(cfg, shape, fsdp, sp, rows, with_gradient=False)


def _compute_memory(
    cfg: SkyRLConfig, shape: ModelShape, fsdp: FSDPConfig, sp: int, rows: int, *, with_gradient: bool
) -> dict[str, int]:
    trainer, number = cfg.trainer, 2 if cfg.trainer.bf16 else 4
    gathered = number * shape.num_parameters
    if shape.num_layers and fsdp.reshard_after_forward:
        gathered = min(gathered, 2 * gathered // shape.num_layers)
    parts = {"gathered": gathered}
    if shape.vocab_size:
        parts["logits"] = (8 if with_gradient else 4) * trainer.logprobs_chunk_size * shape.vocab_size
    if shape.hidden_size and shape.num_layers:
        # A sample that is longer than the budget has a micro-batch of its own.
        longest, budget = cfg.generator.longest_context, trainer.max_tokens_per_microbatch
        tokens = -(-(rows * longest if budget is None else max(budget * sp, longest)) // sp)
        layers = 17
        if with_gradient:
            layers = shape.num_layers + 17 if trainer.gradient_checkpointing else 17 * shape.num_layers
        parts["activations"] = number * tokens * shape.hidden_size * layers
    return parts


def _num_sharding_ranks(fsdp: FSDPConfig, workers: int) -> int:
    return workers if fsdp.fsdp_size == -1 else fsdp.fsdp_size
