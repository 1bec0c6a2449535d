"""Teachers of on-policy distillation: models that score the student's tokens, in training workers or in engines.

A teacher returns its log-probs of the response tokens of training rows, or its most likely tokens at their positions.
All teachers score at the sampling temperature, like the student.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from skyrl_gym.concurrency import gather_or_cancel
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.base import Feature, GenerationRequest, InferenceEngineInterface
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.batch_calls import forward, forward_top
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train.training_batch import TrainingInputBatch


class TeacherScores(NamedTuple):
    """Scores of n rows with R response columns; 0 at padding."""

    log_probs: torch.Tensor
    """[n, R] of the sampled tokens, or [n, R, K] of `ids`."""

    ids: torch.Tensor | None = None
    """[n, R, K] int32: the teacher's most likely tokens; None where sampled tokens were asked for."""


class Teacher(Protocol):
    """Interface of a scorer of rows."""

    async def score(self, batch: TrainingInputBatch, num_top: int) -> TeacherScores:
        """Score rows.

        Args:
            batch: `sequences`, `attention_mask` [n, T]; metadata `uids`, `response_length`.
            num_top: K; 0: the sampled tokens.
        """
        ...


@dataclass(frozen=True)
class WorkerTeacher:
    """Teacher in training workers, like the reference model."""

    group: ActorGroup
    schedule: Callable[[ActorGroup, TrainingInputBatch], Schedule]
    """Divides a forward-only pass over the group's ranks."""

    async def score(self, batch: TrainingInputBatch, num_top: int) -> TeacherScores:
        schedule = self.schedule(self.group, batch)
        if not num_top:
            return TeacherScores(await forward(self.group, schedule, batch))
        ids, log_probs = await forward_top(self.group, schedule, batch, num_top)
        return TeacherScores(log_probs, ids)


@dataclass(frozen=True)
class EngineTeacher:
    """Teacher in rollout engines or servers, which score a sequence as a prompt.

    Args:
        temperature: sampling temperature.
    """

    client: InferenceEngineInterface
    temperature: float

    async def check(self, setting: str, num_top: int, longest: int) -> None:
        """Check that the engines can score the run's sequences.

        Args:
            setting: full name of the teacher's section.
            longest: maximum tokens of prompt and response.

        Raises:
            ConfigError: they cannot.
        """
        info = await self.client.describe()
        needed: Feature = "prompt_top_log_probs" if num_top else "prompt_log_probs"
        if needed in info.unsupported:
            raise ConfigError(
                f"{setting}: its engines ({info.backend} {info.release}) do not return {needed.replace('_', ' ')}: "
                f"{info.unsupported[needed]}; run it in training workers (engines=0, no urls)"
            )
        if longest >= info.max_model_len:
            raise ConfigError(
                f"{setting}: its engines accept {info.max_model_len} tokens, but prompts and responses of this run "
                f"have up to {longest} (generator.max_input_length + generator.sampling_params.max_generate_length), "
                "and one more token is generated; lower them, or use a teacher with a longer context"
            )

    async def score(self, batch: TrainingInputBatch, num_top: int) -> TeacherScores:
        mask, width = batch.tensor("attention_mask") != 0, batch.metadata["response_length"]
        prompts = [row[real].tolist() for row, real in zip(batch.tensor("sequences"), mask, strict=True)]
        # An engine generates at least one token; its log-prob is ignored.
        sampling = {"max_tokens": 1, "temperature": self.temperature, "logprobs": None, "prompt_logprobs": num_top}
        completions = await gather_or_cancel(
            [
                self.client.generate(GenerationRequest(prompt_token_ids=prompt, sampling_params=sampling))
                for prompt in prompts
            ]
        )
        counts = mask[:, -width:].sum(dim=-1).tolist()
        log_probs = torch.zeros(len(prompts), width, *([num_top] if num_top else []))
        if not num_top:
            for row, (count, completion) in enumerate(zip(counts, completions, strict=True)):
                # The response ends a sequence: its tokens are the last ones.
                values = completion.prompt_log_probs or []
                log_probs[row, :count] = torch.tensor(values[len(values) - count :])
            return TeacherScores(log_probs)
        ids = torch.zeros(log_probs.shape, dtype=torch.int32)
        for row, (count, completion) in enumerate(zip(counts, completions, strict=True)):
            top = completion.prompt_top
            assert top is not None
            ids[row, :count] = torch.from_numpy(top.ids[len(top.ids) - count :])
            log_probs[row, :count] = torch.from_numpy(top.log_probs[len(top.ids) - count :])
        return TeacherScores(log_probs, ids)


async def score_rows(
    teachers: Mapping[str, Teacher], batch: TrainingInputBatch, names: Sequence[str], num_top: int, vocab_size: int
) -> TeacherScores:
    """Score every row with its assigned teacher.

    Args:
        names: teacher of each row.
        num_top: K; 0: the sampled tokens.
        vocab_size: vocabulary of the student. Further tokens of a teacher, which pad its output layer, get log-prob
            -inf.
    """
    shape = (len(batch), batch.metadata["response_length"], *([num_top] if num_top else []))
    log_probs, ids = torch.zeros(shape), torch.zeros(shape, dtype=torch.int32) if num_top else None
    for name, teacher in teachers.items():
        rows = [row for row, own in enumerate(names) if own == name]
        if not rows:
            continue
        at = torch.tensor(rows)
        part = TrainingInputBatch(
            {key: batch.tensor(key)[at] for key in ("sequences", "attention_mask")},
            metadata={
                "uids": [batch.metadata["uids"][row] for row in rows],
                "response_length": batch.metadata["response_length"],
            },
        )
        scores = await teacher.score(part, num_top)
        log_probs[at] = scores.log_probs
        if ids is not None and scores.ids is not None:
            ids[at] = scores.ids
    if ids is not None:
        foreign = ids >= vocab_size
        ids, log_probs = ids.masked_fill(foreign, 0), log_probs.masked_fill(foreign, -torch.inf)
    return TeacherScores(log_probs, ids)
