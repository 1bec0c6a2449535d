"""Evaluation of a generator on a set of prompts, by data source and overall. Independent of the trainer."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING

from loguru import logger

from skyrl_train.generators.base import GeneratorInput, GeneratorInterface, request_rollouts
from skyrl_train.generators.inputs import prepare_generator_input
from skyrl_train.generators.sampling import get_sampling_params
from skyrl_train.rollouts.faults import LengthLimits, record_faults
from skyrl_train.rollouts.joining import merge_all_turns
from skyrl_train.rollouts.metrics import check_not_all_failed, compute_scores, concatenate
from skyrl_train.rollouts.trajectory_rows import build_trajectory_rows, sample_table
from skyrl_train.rollouts.types import Trajectory, TrajectoryGroup, group_trajectories
from skyrl_train.types import JsonObject, PromptRow
from skyrl_train.utils.progress import ANSWERS, progress
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.utils.storage import Place, location, replace_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.config import SkyRLConfig
    from skyrl_train.utils.tracking import Tracking


AGGREGATED = "aggregated_results"
"""Name of the file of metrics, next to the files of the data sources."""
MAX_NAME_CHARACTERS = 100
"""File systems allow 255 bytes."""


async def evaluate(
    eval_dataloader: Iterable[list[PromptRow]],
    generator: GeneratorInterface,
    cfg: "SkyRLConfig",
    global_step: int | None,
    tokenizer: "PreTrainedTokenizerBase",
    tracker: "Tracking | None" = None,
) -> dict[str, float | None]:
    """Evaluate one pass over the evaluation set with `generator.eval_sampling_params`.

    With n = `generator.eval_n_samples_per_prompt`, for each data source (the rows' `data_source`) and for `all`:
    `eval/<source>/avg_score`, `eval/<source>/pass_at_<n>`, `eval/<source>/mean_positive_reward`; and the rollout
    metrics as `eval/all/<name>`. With `trainer.dump_eval_results` every trajectory is written to a folder under
    `trainer.export_path`/dumped_evals; with `trainer.dump_trajectories`, token by token, to the run folder. Scores are
    of whole trajectories, also with step-wise trajectories.

    The scores of a data source whose trajectories all failed are None.

    Raises:
        AllRolloutsFailedError: every trajectory of the set failed (their files are written nevertheless).

    Args:
        eval_dataloader: batches of dataset rows.
        global_step: the trainer's step, part of the sampling seed and of the folder's name; None without a trainer.
        tracker: receives the first `trainer.num_logger_eval_samples` samples.
    """
    limits = LengthLimits.of(cfg.generator, cfg.generator.eval_sampling_params)
    requests: list[GeneratorInput] = []
    batches = []
    for rows in eval_dataloader:
        requests.append(evaluation_input(rows, cfg, global_step))
    with progress.phase("evaluate", sum(len(request["prompts"]) for request in requests), ANSWERS):
        for request in requests:
            batches.append(record_faults(await request_rollouts(generator, request), limits))
    rollouts = concatenate(batches)
    sources = [sanitize_data_source(extras.get("data_source")) for extras in _get_extras(requests)]
    metrics = calculate_per_dataset_metrics(rollouts.groups, sources, cfg.generator.eval_n_samples_per_prompt)
    metrics |= {f"eval/all/{name}": value for name, value in rollouts.metrics.items()}
    if cfg.trainer.dump_eval_results:
        name = "eval_only" if global_step is None else f"global_step_{global_step}_evals"
        folder = location(cfg.trainer.export_path) / "dumped_evals" / name
        _write_results(folder, tokenizer, requests, rollouts.trajectories, sources, metrics)
    if cfg.trainer.dump_trajectories:
        run_folder = RunFolder(cfg.trainer.run_dir, compress=cfg.trainer.compress_trajectories)
        _write_trajectories(run_folder, global_step, build_trajectory_rows(rollouts.groups, tokenizer))
    if tracker is not None and (num := cfg.trainer.num_logger_eval_samples) > 0:
        samples = sample_table(rollouts.trajectories[:num], tokenizer)
        tracker.log_samples("trajectories/eval", samples, global_step or 0)
    check_not_all_failed(rollouts.trajectories, "the evaluation failed, no score is available")
    return metrics


def _write_trajectories(run_folder: RunFolder, global_step: int | None, rows: Iterable[JsonObject]) -> None:
    """Write the trajectories of a step. A standalone evaluation writes step 0, unless the folder belongs to a training
    run, whose files it would replace."""
    if global_step is None and any(file.phase == "train" for file in run_folder.list_trajectory_files()):
        logger.warning(
            f"{run_folder.path} has trajectories of a training run, so trajectories of this evaluation are not "
            "written: set another trainer.run_dir"
        )
        return
    run_folder.write_trajectories(global_step or 0, "eval", rows)


def evaluation_input(rows: list[PromptRow], cfg: "SkyRLConfig", global_step: int | None) -> GeneratorInput:
    """Build the generator input for prompts of the evaluation set (see `evaluate`)."""
    request, _ = prepare_generator_input(
        rows,
        cfg.generator.eval_n_samples_per_prompt,
        get_sampling_params(cfg.generator.eval_sampling_params),
        cfg.environment.env_class,
        "eval",
        global_step,
        sampling_seed=global_step,
    )
    return request


def calculate_per_dataset_metrics(
    groups: Sequence[TrajectoryGroup], data_sources: Sequence[str], n_samples_per_prompt: int
) -> dict[str, float | None]:
    """Compute `eval/<source>/…` for each data source, and `eval/all/…`.

    Args:
        data_sources: data source of each trajectory.
    """
    owners = [(group.uid, trajectory) for group in groups for trajectory in group.trajectories]
    members: defaultdict[str, list[tuple[str, Trajectory]]] = defaultdict(list)
    for owner, source in zip(owners, data_sources, strict=True):
        members[source].append(owner)
    metrics: dict[str, float | None] = {}
    for source, own in {**members, "all": owners}.items():
        scores = compute_scores(group_trajectories([trajectory for _, trajectory in own], [uid for uid, _ in own]))
        metrics[f"eval/{source}/avg_score"] = scores["avg_score"]
        metrics[f"eval/{source}/pass_at_{n_samples_per_prompt}"] = scores["pass_at_n"]
        metrics[f"eval/{source}/mean_positive_reward"] = scores["mean_positive_reward"]
    return metrics


def sanitize_data_source(data_source: str | None) -> str:
    """Convert a data source to a component of metric or file names: None to `unknown`, `a/b` to `a_b`.

    Names are unique in this process: `a_b` becomes `a_b_2` if `a/b` was first, and `all` becomes `all_2`, since
    `eval/all/` covers all sources. Evaluation sets are read in the same order in every run, so names are stable.
    """
    source = None if data_source is None else str(data_source)
    if source not in _source_names:
        wanted = "unknown" if source is None else source.replace("/", "_")[:MAX_NAME_CHARACTERS]
        taken = {"all", AGGREGATED, *_source_names.values()}
        candidates = chain([wanted], (f"{wanted}_{number}" for number in count(2)))
        _source_names[source] = next(name for name in candidates if name not in taken)
    return _source_names[source]


_source_names: dict[str | None, str] = {}


def _get_extras(requests: list[GeneratorInput]) -> list[JsonObject]:
    return [extras for request in requests for extras in request.get("env_extras") or []]


def _write_results(
    folder: Place,
    tokenizer: "PreTrainedTokenizerBase",
    requests: list[GeneratorInput],
    trajectories: list[Trajectory],
    sources: list[str],
    metrics: dict[str, float | None],
) -> None:
    """Write one file of readable rows per data source, and one file with the metrics."""
    rows_of: defaultdict[str, list[JsonObject]] = defaultdict(list)
    env_classes = [env_class for request in requests for env_class in request["env_classes"]]
    columns = zip(_get_extras(requests), env_classes, sources, trajectories, strict=True)
    for extras, env_class, source, trajectory in columns:
        sample, failure = merge_all_turns(trajectory), trajectory.failure
        rows_of[source].append(
            {
                "input_prompt": tokenizer.decode(sample.prompt_ids),
                "output_response": tokenizer.decode(sample.response_ids),
                "score": trajectory.reward,
                "stop_reason": trajectory.stop_reason,
                "env_class": env_class,
                "env_extras": extras,
                "data_source": extras.get("data_source"),
                "failure": None if failure is None else f"{failure.kind}: {failure.message}",
            }
        )
    for source, rows in rows_of.items():
        replace_file(folder / f"{source}.jsonl", _format_json_lines(rows))
    replace_file(folder / f"{AGGREGATED}.jsonl", _format_json_lines([metrics]))


def _format_json_lines(rows: list[JsonObject]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
