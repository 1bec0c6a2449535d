"""Scores a generator on an evaluation set, by data source and over all. Knows no trainer."""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from skyrl_train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl_train.generators.batches import (
    concatenate_generator_outputs,
    prepare_generator_input,
    validate_generator_output,
)
from skyrl_train.generators.faults import LengthLimits
from skyrl_train.generators.metrics import check_not_all_failed, get_metrics_from_generator_output
from skyrl_train.generators.rewards import total_reward
from skyrl_train.generators.sampling import get_sampling_params
from skyrl_train.generators.step_wise import per_row, whole_trajectories
from skyrl_train.generators.trajectory_rows import trajectory_rows
from skyrl_train.utils.io import expand_path, write_atomically
from skyrl_train.utils.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from skyrl_train.config import SkyRLConfig


async def evaluate(
    eval_dataloader: Iterable[list[dict[str, Any]]],
    generator: GeneratorInterface,
    cfg: "SkyRLConfig",
    global_step: int | None,
    tokenizer: "PreTrainedTokenizerBase",
) -> dict[str, float | None]:
    """One pass over the evaluation set with `generator.eval_sampling_params`.

    With n = `generator.eval_n_samples_per_prompt`, for each data source (the rows' `data_source`) and for `all`:
    `eval/<source>/avg_score`, `eval/<source>/pass_at_<n>`, `eval/<source>/mean_positive_reward`; and the rollout
    metrics as `eval/all/<name>`. With `trainer.dump_eval_results` every trajectory is written to a folder under
    `trainer.export_path`/dumped_evals; with `trainer.dump_trajectories`, token by token, to the run folder. Scores are
    of whole trajectories, whether turns are rows of their own or not.

    A data source of which every trajectory failed has None for scores.

    Raises:
        AllRolloutsFailedError: every trajectory of the set failed (what they were is written nevertheless).

    Args:
        eval_dataloader: batches of dataset rows.
        global_step: the trainer's step, part of the sampling seed and of the folder's name; None without a trainer.
    """
    limits = LengthLimits.of(cfg.generator, cfg.generator.eval_sampling_params)
    inputs, outputs, uids = [], [], []
    for rows in eval_dataloader:
        generator_input, batch_uids = prepare_generator_input(
            rows,
            cfg.generator.eval_n_samples_per_prompt,
            get_sampling_params(cfg.generator.eval_sampling_params),
            cfg.environment.env_class,
            "eval",
            global_step,
        )
        output = await generator.generate(generator_input)
        validate_generator_output(len(generator_input["prompts"]), output, limits)
        inputs.append(generator_input)
        outputs.append(output)
        uids += batch_uids
    turns = concatenate_generator_outputs(outputs)
    output = whole_trajectories(turns)
    sources = [sanitize_data_source(extras.get("data_source")) for extras in _extras(inputs)]
    metrics = calculate_per_dataset_metrics(output, uids, sources, cfg.generator.eval_n_samples_per_prompt)
    metrics |= {f"eval/all/{name}": value for name, value in (output["rollout_metrics"] or {}).items()}
    if cfg.trainer.dump_eval_results:
        name = "eval_only" if global_step is None else f"global_step_{global_step}_evals"
        folder = expand_path(cfg.trainer.export_path) / "dumped_evals" / name
        _dump(folder, tokenizer, inputs, output, sources, metrics)
    if cfg.trainer.dump_trajectories and global_step is not None:
        rows = trajectory_rows(turns, per_row(turns, uids), tokenizer)
        RunFolder(cfg.trainer.run_dir).write_trajectories(global_step, "eval", rows)
    what = "the evaluation failed, so there is no score"
    check_not_all_failed(output.get("failures") or [None] * len(output["response_ids"]), what)
    return metrics


def calculate_per_dataset_metrics(
    output: GeneratorOutput, uids: list[str], data_sources: list[str], n_samples_per_prompt: int
) -> dict[str, float | None]:
    """`eval/<source>/…` for each data source, and `eval/all/…`."""
    indices_of: defaultdict[str, list[int]] = defaultdict(list)
    for index, source in enumerate(data_sources):
        indices_of[source].append(index)
    metrics: dict[str, float | None] = {}
    for source, indices in {**indices_of, "all": list(range(len(uids)))}.items():
        scores = get_metrics_from_generator_output(_scored_part(output, indices), [uids[i] for i in indices])
        metrics[f"eval/{source}/avg_score"] = scores["avg_score"]
        metrics[f"eval/{source}/pass_at_{n_samples_per_prompt}"] = scores["pass_at_n"]
        metrics[f"eval/{source}/mean_positive_reward"] = scores["mean_positive_reward"]
    return metrics


def sanitize_data_source(data_source: str | None) -> str:
    """A data source as part of a metric's or a file's name."""
    return "unknown" if data_source is None else str(data_source).replace("/", "_")


def _scored_part(output: GeneratorOutput, indices: list[int]) -> GeneratorOutput:
    """Some trajectories of an output: of each column those entries."""
    columns = {
        key: [column[i] for i in indices] if isinstance(column, list) else column for key, column in output.items()
    }
    return GeneratorOutput(**columns)  # pyright: ignore[reportArgumentType]


def _extras(inputs: list[GeneratorInput]) -> list[dict[str, Any]]:
    return [extras for generator_input in inputs for extras in generator_input.get("env_extras") or []]


def _dump(
    folder: "Path",
    tokenizer: "PreTrainedTokenizerBase",
    inputs: list[GeneratorInput],
    output: GeneratorOutput,
    sources: list[str],
    metrics: dict[str, float | None],
) -> None:
    """One file of readable rows for each data source, and one with the metrics."""
    rows_of: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    env_classes = [env_class for generator_input in inputs for env_class in generator_input["env_classes"]]
    stop_reasons = output["stop_reasons"] or [None] * len(sources)
    failures = output.get("failures") or [None] * len(sources)
    for i, extras in enumerate(_extras(inputs)):
        failure = failures[i]
        rows_of[sources[i]].append(
            {
                "input_prompt": tokenizer.decode(output["prompt_token_ids"][i]),
                "output_response": tokenizer.decode(output["response_ids"][i]),
                "score": total_reward(output["rewards"][i]),
                "stop_reason": stop_reasons[i],
                "env_class": env_classes[i],
                "env_extras": extras,
                "data_source": extras.get("data_source"),
                "failure": None if failure is None else f"{failure.kind}: {failure.message}",
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    for source, rows in rows_of.items():
        write_atomically(folder / f"{source}.jsonl", _json_lines(rows))
    write_atomically(folder / "aggregated_results.jsonl", _json_lines([metrics]))


def _json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
