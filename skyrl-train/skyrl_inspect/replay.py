"""`python -m skyrl_train.replay RUN --sample UID_N [--phase eval]`: draw a stored sample again, with the weights that
drew it.

Uses the run's settings in one process without Ray, and the checkpoint of the weight version that the tokens name. The
native engine draws the same tokens with the same log-probs, to the bit; other engines may round differently. Writes
nothing to the run folder.
"""

import argparse
import asyncio
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from skyrl_train.checkpoints import extract_step_from_path, list_checkpoint_dirs
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.validation import validate_cfg
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.errors import ConfigError, DataError, SkyRLError
from skyrl_train.evaluate import evaluation_input
from skyrl_train.generators.base import GeneratorInput, request_rollouts
from skyrl_train.rollouts.trajectory_rows import build_trajectory_rows
from skyrl_train.types import JsonObject
from skyrl_train.utils.process_log import configure_logging
from skyrl_train.utils.run_folder import Phase, RunFolder


@dataclass(frozen=True)
class StoredSample:
    """Row of a trajectories file (with step-wise trajectories the rows of its turns), and the step that it was drawn
    for (of an evaluation: after which)."""

    name: str
    step: int
    rows: list[JsonObject]
    phase: Phase = "train"

    @property
    def weight_versions(self) -> list[int]:
        """Versions of the weights that drew its tokens, in order; empty if they were not recorded."""
        versions = {v for row in self.rows for v in row["tokens"].get("weight_versions") or () if v >= 0}
        return sorted(versions)


def find_sample(folder: RunFolder, name: str, step: int | None, phase: Phase = "train") -> StoredSample:
    """Return the sample `UID_N` of training (or evaluation) step `step`; of the newest step that has it if None.

    Raises:
        DataError: the sample does not exist; names the available ones.
    """
    files = [file for file in folder.list_trajectory_files() if file.phase == phase and step in (None, file.step)]
    if not files:
        steps = [file.step for file in folder.list_trajectory_files() if file.phase == phase]
        have = f"; it has those of steps {steps[0]} to {steps[-1]}" if steps else " (trainer.dump_trajectories=false?)"
        kind = "trajectories" if phase == "train" else "trajectories of evaluations"
        raise DataError(f"{folder.path} holds no {kind}{'' if step is None else f' of step {step}'}{have}")
    for file in reversed(files):
        rows = folder.read_trajectories(file.step, phase)
        if found := [row for row in rows if f"{row['uid']}_{row['sample']}" == name]:
            return StoredSample(name, file.step, found, phase)
    examples = ", ".join(f"{row['uid']}_{row['sample']}" for row in rows[:3])
    raise DataError(
        f"{folder.path} has no sample {name}{'' if step is None else f' in step {step}'}: a name is UID_SAMPLE, the "
        f"prompt's uid and the number of the sample, such as {examples}"
    )


def find_checkpoint(ckpt_path: str, sample: StoredSample, version: int | None) -> str | None:
    """Return the checkpoint of the weights that drew a sample; None for those that the run began with.

    Args:
        version: version chosen by the user instead of the sample's own.

    Raises:
        ConfigError: the checkpoint does not exist; names the available ones.
    """
    # A sample that does not tell was drawn, in synchronous training, by the weights after the step before; one of an
    # evaluation by those after its step.
    untold = sample.step - (sample.phase == "train")
    step = version if version is not None else (sample.weight_versions or [untold])[-1]
    places = {extract_step_from_path(place): str(place) for place in list_checkpoint_dirs(ckpt_path)}
    if step == 0 or step in places:
        return places.get(step)
    raise ConfigError(
        f"sample {sample.name} of step {sample.step} was sampled with the weights after step {step}, but {ckpt_path} "
        f"has no checkpoint of it. It has {', '.join(map(str, places)) or 'none'}: pass --checkpoint N to use other "
        "weights (0: the initial weights), or run with trainer.ckpt_interval=1 next time"
    )


def make_replay_settings(
    folder: RunFolder, work: Path, checkpoint: str | None, overrides: Sequence[str]
) -> SkyRLConfig:
    """Return the settings of the run with one rank of the policy and one engine in this process, which write to `work`
    alone.

    Raises:
        ConfigError: an override that cannot be.
    """
    changes: JsonObject = {
        "trainer": {
            "run_dir": str(work),
            "ckpt_path": str(work / "ckpts"),
            "export_path": str(work / "exports"),
            "logger": "console",
            "resume_mode": "none" if checkpoint is None else "from_path",
            "resume_path": checkpoint,
            "eval_interval": -1,
            "eval_before_train": False,
            "critic": {"model": {"path": None}},
            "algorithm": {"use_kl_loss": False, "use_kl_in_reward": False},
            "placement": {"launcher": "inline", "policy_num_nodes": 1, "policy_num_gpus_per_node": 1},
            "fully_async": {"enabled": False},
        },
        "generator": {"num_inference_engines": 1},
    }
    merged = OmegaConf.merge(OmegaConf.load(folder.config_path), changes, OmegaConf.from_dotlist(list(overrides)))
    return validate_cfg(merged)  # type: ignore[arg-type]


class ReplayExperiment(BasePPOExp):
    """Experiment that draws one sample and trains nothing."""

    async def draw(self, sample: StoredSample) -> list[JsonObject]:
        """Return the rows of the sample, drawn again.

        Raises:
            DataError: the data has no such prompt.
        """
        uid, _, number = sample.name.rpartition("_")
        is_evaluation = sample.phase == "eval"
        setting, files = "data.train_data", self.cfg.data.train_data
        if is_evaluation:
            setting, files = "data.val_data", self.cfg.data.val_data
        dataset = self.read_prompts(files) if is_evaluation else self.train_dataset
        assert dataset is not None, "validate_cfg asks for training data"
        place = int(uid) if uid.isdecimal() else len(dataset)
        if place >= len(dataset):
            raise DataError(
                f"no prompt of {setting}={list(files)} has the uid {uid}: pass the data of the run, as {setting}=[FILE]"
            )
        trainer = await self._setup_trainer()
        try:
            await trainer.load_checkpoint()
            await trainer.sync_weights()
            trainer.global_step = sample.step
            own = dataset.collate_fn([dataset[place]])
            whole = evaluation_input(own, self.cfg, sample.step) if is_evaluation else trainer.generator_input(own)
            request = filter_sample(int(number), whole)
            rollouts = await request_rollouts(trainer.generator, request)
        finally:
            await trainer.shutdown()
        return [dict(row) for row in build_trajectory_rows(rollouts.groups, self.tokenizer)]


def filter_sample(number: int, request: GeneratorInput) -> GeneratorInput:
    """Return the input with one of its samples alone."""
    picked: Any = {
        name: value[number : number + 1] if isinstance(value, list) else value for name, value in request.items()
    }
    return picked


@dataclass
class ReplayOutcome:
    """Differences of a sample that was drawn again from the stored one."""

    lines: list[str] = field(default_factory=list)
    is_equal: bool = True

    def add(self, line: str, is_equal: bool) -> None:
        self.lines.append(line)
        self.is_equal &= is_equal


def compare(stored: Sequence[JsonObject], drawn: Sequence[JsonObject]) -> ReplayOutcome:
    """Compare the rows of a sample: prompt, tokens, log-probs, rewards, how it ended."""
    result = ReplayOutcome()
    if len(stored) != len(drawn):
        result.add(f"{len(stored)} turns stored, {len(drawn)} drawn", False)
    for number, (old, new) in enumerate(zip(stored, drawn, strict=False)):
        prefix = f"turn {number}: " if len(stored) > 1 else ""
        if old["prompt_ids"] != new["prompt_ids"]:
            result.add(f"{prefix}the prompts differ: {old['prompt']!r} stored, {new['prompt']!r} drawn", False)
        _compare_tokens(old["tokens"], new["tokens"], prefix, result)
        for name in ("reward", "stop_reason", "failure"):
            if old[name] != new[name]:
                result.add(f"{prefix}{name}: {old[name]} stored, {new[name]} drawn", False)
    return result


def _compare_tokens(old: JsonObject, new: JsonObject, prefix: str, result: ReplayOutcome) -> None:
    pairs = list(zip(old["ids"], new["ids"], strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    is_equal = same == len(old["ids"]) == len(new["ids"])
    result.add(f"{prefix}{same} of {len(old['ids'])} tokens equal", is_equal)
    if not is_equal:
        result.add(f"{prefix}token {same}: {_format_token(old, same)} stored, {_format_token(new, same)} drawn", False)
    if old["log_probs"] is None or new["log_probs"] is None:
        return
    gaps = [abs(a - b) for a, b in zip(old["log_probs"][:same], new["log_probs"][:same], strict=True)]
    largest = max(gaps, default=0.0)
    where = f" (at token {gaps.index(largest)})" if largest else ""
    result.add(f"{prefix}largest difference of their log-probs: {largest:.3g}{where}", largest == 0.0)


def _format_token(tokens: JsonObject, index: int) -> str:
    if index >= len(tokens["ids"]):
        return "the end"
    log_probs = tokens["log_probs"]
    log_prob = "" if log_probs is None else f", log-prob {log_probs[index]:.4f}"
    return f"{tokens['text'][index]!r} (id {tokens['ids'][index]}{log_prob})"


def replay(
    run: str | Path,
    name: str,
    *,
    step: int | None = None,
    phase: Phase = "train",
    checkpoint: int | None = None,
    overrides: Sequence[str] = (),
) -> ReplayOutcome:
    """Draw a sample of a run again and compare.

    Raises:
        DataError: the folder has no such sample, or no settings.
        ConfigError: no checkpoint has its weights, or the settings cannot be used in one process.
    """
    folder = RunFolder(run)
    if not folder.config_path.exists():
        raise DataError(f"{folder.path} is not a run folder: it has no config.yaml; pass the folder of trainer.run_dir")
    sample = find_sample(folder, name, step, phase)
    ckpt_path = OmegaConf.select(OmegaConf.load(folder.config_path), "trainer.ckpt_path")
    place = find_checkpoint(
        ckpt_path if Path(str(ckpt_path)).is_dir() else str(folder.path / "ckpts"), sample, checkpoint
    )
    with TemporaryDirectory(prefix="skyrl-replay-") as work:
        cfg = make_replay_settings(folder, Path(work), place, overrides)
        drawn = asyncio.run(ReplayExperiment(cfg).draw(sample))
    result = compare(sample.rows, drawn)
    if len(sample.weight_versions) > 1:
        result.add(
            f"its tokens were sampled with the weights after steps {sample.weight_versions}; here with the last", False
        )
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_train.replay",
        description="Sample a stored trajectory of a run again with the weights that produced it, and print what "
        "differs.",
        epilog="Exit status: 0 if tokens, log-probs and reward are equal, 1 if not, 2 if it cannot be sampled.",
    )
    parser.add_argument("run", type=Path, help="the folder of a run (trainer.run_dir)")
    parser.add_argument(
        "--sample", required=True, metavar="UID_N", help="UID_SAMPLE: the prompt's uid and the number of the sample"
    )
    parser.add_argument(
        "--step",
        type=int,
        help="training step of the sample, or step of the evaluation (default: the newest that has it)",
    )
    parser.add_argument("--phase", choices=("train", "eval"), default="train", help="eval: a sample of an evaluation")
    parser.add_argument("--checkpoint", type=int, metavar="N", help="use the weights after step N (0: untrained)")
    parser.add_argument(
        "--import",
        dest="files",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="Python file to run first, which registers custom environments, losses or engines; repeatable",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override those of the run")
    options = parser.parse_intermixed_args(arguments)
    try:
        for file in options.files:
            runpy.run_path(str(file))
        result = replay(
            options.run,
            options.sample,
            step=options.step,
            phase=options.phase,
            checkpoint=options.checkpoint,
            overrides=options.overrides,
        )
    except (SkyRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(result.lines))
    return 0 if result.is_equal else 1


if __name__ == "__main__":
    configure_logging()
    sys.exit(main())
