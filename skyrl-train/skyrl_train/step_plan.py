"""Division of a training step: optimizer steps, mini-batches and micro-batches of each model, and unused prompts.

Pure arithmetic on the settings.
"""

from dataclasses import dataclass

from skyrl_train.algorithms.losses import TokenSelectorRegistry
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.training_backends import get_ranks_per_replica

_TITLES = {"policy": "policy", "critic": "critic", "ref": "reference"}


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
class StepPlan:
    """Counts of a run. `str(plan)` is a readable table."""

    prompts: int
    samples_a_prompt: int
    update_epochs: int
    models: tuple[ModelPlan, ...]
    num_steps: int | None
    """Training steps of the run. None: the size of the dataset is not known."""
    prompts_left_out: int | None
    """Prompts at the end of every epoch that do not fill a batch."""
    notes: tuple[str, ...]

    @property
    def samples(self) -> int:
        return self.prompts * self.samples_a_prompt

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        lines = [f"a step: {self.prompts} prompts x {self.samples_a_prompt} samples = {self.samples} samples"]
        for model in self.models:
            lines += _format_lines(model, self.update_epochs)
        if self.num_steps is not None:
            trained = [model for model in self.models if model.optimizer_steps]
            steps = ", ".join(f"{self.num_steps * model.optimizer_steps} of the {model.name}" for model in trained)
            lines.append(f"the run: {self.num_steps} training steps; optimizer steps: {steps}")
        if self.prompts_left_out:
            lines.append(f"dropped: {self.prompts_left_out} prompts per epoch, which do not fill a batch")
        lines += self.notes
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


def step_plan(cfg: SkyRLConfig, *, num_prompts: int | None = None) -> StepPlan:
    """Compute the division of a step with these (validated) settings.

    Args:
        num_prompts: prompts of the training set.
    """
    trainer, placement = cfg.trainer, cfg.trainer.placement
    mini_batches: dict[str, int | None] = {"policy": trainer.policy_mini_batch_size}
    if trainer.critic.model.path is not None:
        mini_batches["critic"] = trainer.critic_mini_batch_size
    if trainer.algorithm.uses_reference_model:
        mini_batches["ref"] = None
    models = [
        _build_model_plan(
            cfg, name, prompts, getattr(placement, f"{name}_world_size"), get_ranks_per_replica(cfg, name)
        )
        for name, prompts in mini_batches.items()
    ]
    num_steps = prompts_left_out = None
    if num_prompts is not None:
        batches, prompts_left_out = divmod(num_prompts, trainer.train_batch_size)
        num_steps = batches * trainer.epochs
        num_steps = min(num_steps, trainer.max_training_steps or num_steps)
    return StepPlan(
        prompts=trainer.train_batch_size,
        samples_a_prompt=cfg.generator.n_samples_per_prompt,
        update_epochs=trainer.update_epochs_per_batch,
        models=tuple(models),
        num_steps=num_steps,
        prompts_left_out=prompts_left_out,
        notes=_build_notes(cfg),
    )


def _build_model_plan(
    cfg: SkyRLConfig, name: str, mini_batch_prompts: int | None, workers: int, sequence_parallel_size: int
) -> ModelPlan:
    trainer, samples_a_prompt = cfg.trainer, cfg.generator.n_samples_per_prompt
    data_parallel_size = workers // sequence_parallel_size
    is_trained = mini_batch_prompts is not None
    prompts = mini_batch_prompts if mini_batch_prompts is not None else trainer.train_batch_size
    num_mini_batches = trainer.train_batch_size // prompts
    rank_sizes = _split_evenly(prompts * samples_a_prompt, data_parallel_size)
    rows = rows_a_micro_batch(cfg, trainer.micro_train_batch_size_per_gpu, sequence_parallel_size)
    counts = [-(-share // rows) for share in rank_sizes]
    # The policy's old log-probs are computed in its training micro-batches.
    forward_rows = rows
    if name != "policy":
        forward_rows = rows_a_micro_batch(cfg, trainer.micro_forward_batch_size_per_gpu, sequence_parallel_size)
    only_forward = num_mini_batches * -(-rank_sizes[0] // forward_rows)
    return ModelPlan(
        name=_TITLES[name],
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
    """Return True if the policy's log-probs at the start of a step need a separate forward pass: unless a single
    optimizer step uses all rows and nothing else reads them."""
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


def _split_evenly(total: int, parts: int) -> list[int]:
    """Divide `total` into parts that differ by at most one, larger parts first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def rows_a_micro_batch(cfg: SkyRLConfig, rows: int, sequence_parallel_size: int) -> int:
    """Return the number of samples of maximal length in a micro-batch of one replica.

    Args:
        rows: setting of the number of rows, used without a token budget.
        sequence_parallel_size: ranks of a replica, which share its rows.
    """
    budget = cfg.trainer.max_tokens_per_microbatch
    return rows if budget is None else max(1, budget * sequence_parallel_size // cfg.generator.longest_context)


def _format_lines(model: ModelPlan, update_epochs: int) -> list[str]:
    ranks = f"{model.data_parallel_size} data-parallel rank" + ("s" if model.data_parallel_size > 1 else "")
    uneven = model.samples_a_mini_batch % model.data_parallel_size != 0
    lines = []
    if model.num_mini_batches:
        lines = [
            f"{model.name}: {model.num_mini_batches} mini-batches x {update_epochs} update epochs = "
            f"{model.optimizer_steps} optimizer steps per training step",
            f"  a mini-batch: {model.samples_a_mini_batch} samples over {ranks} = {model.samples_a_rank} samples "
            f"{'at most' if uneven else 'each'}, {model.micro_batches} micro-batches each"
            + (f"; {model.dummy_micro_batches} dummy micro-batches" if model.dummy_micro_batches else ""),
        ]
    if model.forward_micro_batches:
        lines.append(f"{model.name}, forward only: {ranks}, {model.forward_micro_batches} micro-batches each per step")
    return lines


def _build_notes(cfg: SkyRLConfig) -> tuple[str, ...]:
    notes = []
    if cfg.trainer.max_tokens_per_microbatch is not None:
        notes.append(
            f"micro-batches hold at most {cfg.trainer.max_tokens_per_microbatch} tokens: the counts assume samples of "
            f"{cfg.generator.longest_context} tokens each; shorter samples need fewer"
        )
    if cfg.generator.step_wise_trajectories:
        notes.append("every turn is a separate sample (step-wise): the counts of samples assume one turn each")
    if not cfg.generator.uses_environments:
        notes.append(
            f"{cfg.generator.task or 'generator.harness'} sets the length of trajectories; a trajectory has a row for "
            "each append-only sequence of turns, usually one: the counts of samples assume one row each"
        )
    notes += _format_overlong_note(cfg)
    sampling = cfg.trainer.algorithm.dynamic_sampling
    if sampling.type == "filter":
        limit = f"up to {sampling.max_sample_batches}" if sampling.max_sample_batches > 0 else "any number of"
        notes.append(
            f"dynamic sampling: {limit} batches of prompts may be needed to fill one, so an epoch may have fewer steps"
        )
    return tuple(notes)


def _format_overlong_note(cfg: SkyRLConfig) -> list[str]:
    """Describe where the overlong penalty starts and ends."""
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
