"""`python -m skyrl_agent.integrations.tinker.tinker_train key=value …`: GRPO of an agent with the `tinker` SDK, against
the hosted service or our own server. Settings are in `settings.py`."""

import asyncio
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tinker  # pyright: ignore[reportMissingImports]
from tinker import types  # pyright: ignore[reportMissingImports]

from skyrl_agent.auto import AutoAgentRunner
from skyrl_agent.datasets import read_rows
from skyrl_agent.errors import AgentError, BackendError, ConfigError
from skyrl_agent.integrations.base import TrainingRows
from skyrl_agent.integrations.tinker.settings import Config, read_config
from skyrl_agent.integrations.tinker.tinker_backend import TinkerBackend, settled
from skyrl_agent.runner import AgentRunner
from skyrl_agent.training_rows import check_batch, compute_trajectory_advantages, repeat_for_rows
from skyrl_agent.types import JsonObject, Row


async def train(config: Config) -> None:
    """Train: sample, grade, update; repeat.

    Raises:
        ConfigError, TaskRowError: settings or rows; nothing was started.
        UnavailableError: a required service does not respond; nothing was started.
        BatchFailedError: every trajectory of a step failed.
        BackendError: the server reports no log-probs.
    """
    rows = read_rows(config.dataset_file)
    eval_rows = read_rows(config.eval_dataset_file) if config.eval_dataset_file else []
    folder = Path(config.log_dir) / config.wandb_name
    folder.mkdir(parents=True, exist_ok=True)
    service = tinker.ServiceClient(**({"base_url": config.base_url} if config.base_url else {}))
    client, first_step = await create_training_client(service, config)
    runner = AutoAgentRunner.from_task(
        config.skyrl_agent_task_yaml, None, client.get_tokenizer(), infer_backend="tinker"
    )
    assert isinstance(runner.infer_engine, TinkerBackend)
    await runner.probe(runner.instances([*rows, *eval_rows]))
    log = Log(folder, config)
    adam = types.AdamParams(learning_rate=config.learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
    for step in range(first_step, config.max_steps):
        started = time.monotonic()
        runner.infer_engine.client = await settled(client.save_weights_and_get_sampling_client())
        metrics = {}
        if eval_rows and config.eval_every and step % config.eval_every == 0:
            metrics |= await evaluate(runner, eval_rows, config.eval_batch_size)
        batch = get_batch(rows, config.batch_size, step, config.seed)
        sampled = await runner.rows(
            batch, num_trajectories=config.group_size, sampling_params={"seed": config.seed + step}
        )
        check_batch(sampled.failures, sampled.in_baseline)
        data = build_training_data(sampled, config.normalize_advantages)
        if data:
            learnt = client.forward_backward(data, config.loss_fn, config.loss_fn_config or None)
            stepped = client.optim_step(adam)
            metrics |= {f"train/{name}": value for name, value in (await settled(learnt)).metrics.items()}
            await settled(stepped)
        metrics |= sampled.rollout_metrics | {"train/rows": len(data), "time/step": time.monotonic() - started}
        log.add(step, metrics)
        if config.save_every and (step + 1) % config.save_every == 0:
            saved = await settled(client.save_state(f"{config.wandb_name}-{step + 1:06d}"))
            log.add_checkpoint(step + 1, saved.path)


async def create_training_client(service: Any, config: Config) -> tuple[Any, int]:
    """Return the training client and the next step number."""
    if config.resume_exp_name is None:
        made = service.create_lora_training_client(config.model_name, rank=config.lora_rank, seed=config.seed)
        return await settled(made), 0
    newest = find_newest_checkpoint(Path(config.log_dir) / config.resume_exp_name)
    made = service.create_training_client_from_state_with_optimizer(newest["path"])
    return await settled(made), newest["policy_iteration_step"]


def build_training_data(rows: TrainingRows, normalize: bool) -> list[Any]:
    """Build a datum per trainable row: the whole sequence, with each token the target of the previous one.

    Each generated token of a trajectory's rows gets its advantage (reward - mean of its group). A loss summed over
    tokens is therefore the same for several rows as for one long row.

    Raises:
        BackendError: log-probs are missing.
    """
    advantages = compute_trajectory_advantages(rows, "group_mean")
    if normalize:
        advantages = normalize_advantages(advantages, rows.in_baseline)
    if rows.rollout_logprobs is None:
        raise BackendError("the server returned no log-probs of sampled tokens; training requires them")
    data = []
    for prompt, response, mask, logprobs, advantage in zip(
        rows.prompt_token_ids,
        rows.response_ids,
        rows.loss_masks,
        rows.rollout_logprobs,
        repeat_for_rows(rows, advantages),
        strict=True,
    ):
        if advantage == 0 or not any(mask):
            continue
        tokens, given = prompt + response, [0.0] * (len(prompt) - 1)
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "logprobs": given + logprobs,
                    "advantages": given + [advantage * written for written in mask],
                },
            )
        )
    return data


def normalize_advantages(advantages: Sequence[float], counts: Sequence[bool]) -> list[float]:
    """Standardize the selected values; zeros if all are equal."""
    kept = [value for value, is_in in zip(advantages, counts, strict=True) if is_in]
    deviation = statistics.pstdev(kept) if kept else 0.0
    if deviation < 1e-8:
        return [0.0] * len(advantages)
    mean = statistics.fmean(kept)
    return [(value - mean) / deviation if is_in else 0.0 for value, is_in in zip(advantages, counts, strict=True)]


async def evaluate(runner: AgentRunner, rows: Sequence[Row], batch_size: int) -> dict[str, float]:
    """Return `eval/reward/mean/<data source>` over trajectories with a reward."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for start in range(0, len(rows), batch_size):
        async for group in runner.groups(rows[start : start + batch_size], val_mode=True):
            for result in group.results:
                if result.reward is not None:
                    rewards[result.data_source].append(result.reward)
    return {f"eval/reward/mean/{source}": statistics.fmean(values) for source, values in rewards.items()}


def get_batch(rows: Sequence[Row], size: int, step: int, seed: int) -> list[Row]:
    """Return the instances of a step. Each epoch is shuffled separately and visits every instance once."""
    places = [divmod(number, len(rows)) for number in range(step * size, (step + 1) * size)]
    return [rows[_sample_order(len(rows), seed, epoch)[place]] for epoch, place in places]


@lru_cache(maxsize=2)
def _sample_order(length: int, seed: int, epoch: int) -> list[int]:
    order = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def find_newest_checkpoint(folder: Path) -> JsonObject:
    """
    Raises:
        ConfigError: no checkpoint exists.
    """
    file = folder / "checkpoints.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    checkpoints = [json.loads(line) for line in lines if line.strip()]
    if not checkpoints:
        raise ConfigError(f"resume_exp_name: no checkpoint in {file}")
    return dict(max(checkpoints, key=lambda checkpoint: checkpoint["policy_iteration_step"]))


class Log:
    """`metrics.jsonl` and `checkpoints.jsonl` of a run, a console line, and wandb if configured."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self._wandb = folder, None
        if config.wandb_project is not None:
            import wandb

            self._wandb = wandb.init(project=config.wandb_project, name=config.wandb_name, config=config.model_dump())

    def add(self, step: int, metrics: dict[str, float]) -> None:
        self._write_row("metrics.jsonl", {"step": step} | metrics)
        reward, seconds = metrics.get("rollout_metrics/raw_reward", float("nan")), metrics["time/step"]
        print(f"step {step:4d}  reward {reward:.4f}  rows {metrics['train/rows']}  {seconds:.1f} s", flush=True)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def add_checkpoint(self, step: int, path: str) -> None:
        self._write_row("checkpoints.jsonl", {"policy_iteration_step": step, "path": path})

    def _write_row(self, name: str, row: JsonObject) -> None:
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Run the command line."""
    try:
        asyncio.run(train(read_config(sys.argv[1:])))
    except AgentError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
