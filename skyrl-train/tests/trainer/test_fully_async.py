"""Asynchronous training: staleness 0 equals synchronous training, and nothing is lost, repeated or trained too old."""

import asyncio
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from async_runs import (
    APART,
    CORRECTED,
    assert_equal_runs,
    asynchronous,
    steps_of,
    trained_ages,
    trained_samples,
    trained_tokens,
)

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_inspect.simulate.__main__ import main as simulate
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.validation import validate_cfg
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.errors import AllRolloutsFailedError, ConfigError, WeightSyncError
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer, GeneratedOutputGroup
from skyrl_train.generators.base import GeneratorOutput
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.utils.run_folder import RunFolder

EXAMPLES = Path(__file__).parents[3] / "examples"


FIVE_STEPS = {"max_training_steps": 5, "epochs": 2, "hf_save_interval": 5, "eval_before_train": False}  # 4 an epoch


def test_staleness_0_is_bitwise_equal_to_synchronous_training(settings: Any, merged: Any, run: Any, tmp_path: Path):
    synchronous = settings(tmp_path / "synchronous", {"trainer": merged(FIVE_STEPS, APART)})
    zero = {"fully_async": {"enabled": True, "max_staleness_steps": 0, "order": "exact"}}
    other = settings(tmp_path / "asynchronous", {"trainer": merged(FIVE_STEPS, merged(APART, zero))})
    run(synchronous)
    run(other)
    assert len(steps_of(other)) == 5
    assert_equal_runs(other, synchronous)


def module_of(path: Path) -> Any:
    """Import an example, which belongs to no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_example_trains_asynchronously_without_enabled_flag(settings: Any, tmp_path: Path):
    experiment = module_of(EXAMPLES / "fully_async" / "main_fully_async.py").FullyAsyncPPOExp
    changes = asynchronous()
    changes["fully_async"].update(enabled=False)
    cfg = experiment.validate(settings(tmp_path, {"trainer": changes}))
    assert cfg.trainer.fully_async.enabled
    experiment(cfg).run()
    rows = RunFolder(cfg.trainer.run_dir).read_metrics()
    assert [row["async/staleness_violation_count"] for row in rows] == [0, 0]


@pytest.mark.slow
def test_one_step_off_trains_with_staleness_1_and_is_repeatable(settings: Any, merged: Any, run: Any, tmp_path: Path):
    example = module_of(EXAMPLES / "async" / "main_async.py")
    changes = merged({"max_training_steps": 4, "hf_save_interval": 4}, asynchronous())
    runs = [settings(tmp_path / name, {"trainer": changes}) for name in ("one", "other")]
    for cfg in runs:
        example.AsyncPPOExp(cfg).run()
    rows = RunFolder(runs[0].trainer.run_dir).read_metrics()
    ages = [(row["async/staleness_min"], row["async/staleness_max"]) for row in rows]
    assert ages == [(0, 0), (1, 1), (1, 1), (1, 1)]
    assert all(row["async/versions_per_trajectory_max"] == 1 for row in rows)
    assert_equal_runs(*runs)


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize("on_stale", ["regenerate", "drop", "mask"])
def test_each_prompt_is_trained_equally_often_for_every_stale_policy(
    settings: Any, merged: Any, run: Any, tmp_path: Path, on_stale: str
):
    changes = merged({"max_training_steps": 8, "epochs": 2}, asynchronous(on_stale=on_stale, max_staleness_steps=1))
    cfg = settings(tmp_path, {"trainer": changes, "environment": {"env_class": "slow_for_one_prompt"}})
    SlowForOnePrompt.num_graded = SlowForOnePrompt.num_slow = 0
    skyrl_gym.register(id="slow_for_one_prompt", entry_point=SlowForOnePrompt)
    try:
        rows = run(cfg)
    finally:
        skyrl_gym.deregister("slow_for_one_prompt")
    # Rows of a step, once an epoch, with tokens that are trained. With `mask`, too: the slow group has no token that is
    # young enough, and is generated anew.
    assert set(trained_samples(cfg).values()) == {2} and len(trained_samples(cfg)) == 16 * 4
    assert trained_tokens(cfg) == trained_samples(cfg)
    assert trained_ages(cfg) <= {0, 1}
    assert sum(row["async/num_stale_groups"] for row in rows) >= 1
    if on_stale == "regenerate":
        assert simulate([cfg.trainer.run_dir]) == 0, "the folder is one that the simulator reads"
    assert_lanes_hold_every_group(cfg)


def assert_lanes_hold_every_group(cfg: SkyRLConfig) -> None:
    """Each trained group ran before its step, in a slot of its own at that time."""
    records = list(RunFolder(cfg.trainer.run_dir).read_timeline())
    assert [record["step"] for record in records] == list(range(1, 9))
    spans = [group for record in records for group in record["groups"]]
    ends = {ticket: end for ticket, _, _, end, _, outcome in spans if outcome == "finished"}
    assert all(ends[ticket] <= record["ended"] for record in records for ticket in record["trained"])
    assert sum(len(record["trained"]) for record in records) == 8 * 4
    by_slot = sorted((slot, start, end) for _, slot, start, end, _, _ in spans)
    assert all(one[2] <= other[1] for one, other in itertools.pairwise(by_slot) if one[0] == other[0])
    assert {slot for slot, _, _ in by_slot} <= set(range(8)), "as many slots as groups may run"


class SlowForOnePrompt(BaseTextEnv):
    """Holds the first answers to one prompt back until 48 others have been graded meanwhile. Of the twelve groups that
    this takes, the last is started two steps later (seven can be under way, and each step lets four more start): the
    group is then older than one step, on any machine."""

    num_graded = num_slow = 0

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()

    def init(self, prompt: Any) -> Any:
        cls = type(self)
        self.is_slow = prompt[-1]["content"] == "write 3" and cls.num_slow < 4
        cls.num_slow += self.is_slow
        self.end = cls.num_graded + 48
        return super().init(prompt)

    async def step(self, action: str) -> BaseTextEnvStepOutput:
        cls = type(self)
        async with asyncio.timeout(60):
            while self.is_slow and cls.num_graded < self.end:
                await asyncio.sleep(0.01)
        cls.num_graded += 1
        reward = len(set(action)) / max(1, len(action))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


class Hooks(FullyAsyncRayPPOTrainer):
    """The two hooks of other SkyRL releases."""

    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        assert len(set(uids)) == 1 and len(uids) == len(generator_output["response_ids"])
        generator_output["rewards"] = [float(number) for number in range(len(uids))]
        return generator_output

    def convert_generation_group_mini_batch_to_training_input(
        self, groups: list[GeneratedOutputGroup]
    ) -> TrainingInputBatch:
        assert all(group.global_step_when_scheduled <= self.global_step for group in groups)
        self.seen = [group.generator_output["rewards"] for group in groups]
        return super().convert_generation_group_mini_batch_to_training_input(groups)


def experiment_with(trainer: type[FullyAsyncRayPPOTrainer]) -> type[BasePPOExp]:
    class Experiment(BasePPOExp):
        def get_trainer(self, *args: Any, **kwargs: Any) -> FullyAsyncRayPPOTrainer:
            return trainer(*args, **kwargs)

    return Experiment


def test_overridden_trainer_methods_change_rewards_and_batch(settings: Any, tmp_path: Path):
    cfg = settings(tmp_path, {"trainer": asynchronous()})
    experiment_with(Hooks)(cfg).run()
    rows = RunFolder(cfg.trainer.run_dir).read_metrics()
    assert [row["reward/avg_raw_reward"] for row in rows] == [1.5, 1.5]


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"policy": {"model": {"lora": {"rank": 4}}}}, "generator": {"weight_sync_strategy": "adapter"}},
        {"trainer": {"critic_mini_batch_size": 2, "algorithm": {"advantage_estimator": "gae"}}},
        {
            "environment": {"env_class": "up_to_three_turns"},
            "generator": {"step_wise_trajectories": True, "use_conversation_multi_turn": True, "max_turns": 3},
        },
        {"trainer": {"fully_async": {"pause": "abort"}}},
        {"trainer": {"fully_async": {"kv_after_sync": "recompute"}}},
        {"trainer": {"fully_async": {"kv_after_sync": "clear"}}},
        {
            "trainer": {
                "algorithm": {"policy_loss_type": "decoupled_ppo", "off_policy_correction": {"tis_ratio_type": None}}
            }
        },
    ],
    ids=["adapters", "critic", "step-wise", "abort", "recompute", "clear", "decoupled PPO"],
)
@pytest.mark.slow
def test_other_features_train_asynchronously(
    settings: Any, merged: Any, run: Any, tmp_path: Path, chat_model: str, changes: dict[str, Any]
):
    changes = merged({"trainer": asynchronous()}, changes)
    if changes["trainer"]["algorithm"].get("advantage_estimator") == "gae":
        changes = merged(changes, {"trainer": {"critic": {"model": {"path": chat_model}}}})
    cfg = settings(tmp_path, merged(changes, {"trainer": {"max_training_steps": 4}}))
    rows = run(cfg)
    assert len(rows) == 4 and all(row["policy/final_loss"] is not None for row in rows)
    assert len(trained_samples(cfg)) == 16 * 4 and set(trained_samples(cfg).values()) == {1}
    ages = trained_ages(cfg)
    assert 0 in ages and max(ages) in (1, 2), "some tokens are older than the weights they train, none too old"
    if "critic_mini_batch_size" in changes["trainer"]:
        assert all(row["critic/critic_loss"] is not None for row in rows)


class SameRewards(BaseTextEnv):
    """Environment that gives all samples of every other prompt the same reward."""

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()

    def init(self, prompt: Any) -> Any:
        self.teaches = int(prompt[-1]["content"].split()[-1]) % 2 == 1
        return super().init(prompt)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = len(set(action)) / max(1, len(action)) + len(action) if self.teaches else 1.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


@pytest.mark.slow
def test_steps_contain_only_informative_groups(settings: Any, merged: Any, run: Any, tmp_path: Path):
    changes = merged(
        {"max_training_steps": 4, "epochs": 4}, asynchronous(sample_full_batch=True, max_staleness_steps=1)
    )
    changes["algorithm"] |= {"zero_variance_filter": True}
    cfg = settings(tmp_path, {"trainer": changes, "environment": {"env_class": "same_rewards"}})
    skyrl_gym.register(id="same_rewards", entry_point=SameRewards)
    try:
        rows = run(cfg)
    finally:
        skyrl_gym.deregister("same_rewards")
    trained = trained_samples(cfg)
    assert sum(trained.values()) == 4 * 4 * 4 and {int(uid) % 2 for uid, _ in trained} == {1}
    assert sum(row["async/num_filtered_groups"] for row in rows) >= 8
    assert trained_ages(cfg) <= {0, 1}


class Fails(BaseTextEnv):
    """Raises in its grader."""

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        raise ZeroDivisionError("my grader")


class Hangs(Fails):
    def step(self, action: str) -> BaseTextEnvStepOutput:
        import time

        time.sleep(5)
        raise AssertionError


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("environment", "changes", "message"),
    [
        (Fails, {}, r"all 16 rollouts of step 1 failed.*ZeroDivisionError.*my grader"),
        (
            Hangs,
            {"environment": {"skyrl_gym": {"env_timeout_seconds": 0.2}}},
            r"all 16 rollouts of step 1 failed.*0\.2 s",
        ),
        (
            Hangs,
            {"trainer": {"fully_async": {"group_timeout_seconds": 0.3}}},
            r"groups \(.*\) failed; the last: TimeoutError: did not finish within 0\.3 s",
        ),
    ],
    ids=["grader raises", "environment hangs", "group is late"],
)
def test_run_error_names_cause_when_all_groups_fail(
    settings: Any, merged: Any, run: Any, tmp_path: Path, environment: type[BaseTextEnv], changes: Any, message: str
):
    changes = merged({"trainer": asynchronous(), "environment": {"env_class": "broken"}}, changes)
    cfg = settings(tmp_path, changes)
    skyrl_gym.register(id="broken", entry_point=environment)
    try:
        with pytest.raises(AllRolloutsFailedError, match=message):
            run(cfg)
    finally:
        skyrl_gym.deregister("broken")


def test_failed_weight_sync_ends_run(settings: Any, tmp_path: Path):
    class Broken(FullyAsyncRayPPOTrainer):
        async def sync_weights(self) -> None:
            if self.global_step == 1:
                raise WeightSyncError("a tensor differs")
            await super().sync_weights()

    with pytest.raises(WeightSyncError, match="a tensor differs"):
        experiment_with(Broken)(settings(tmp_path, {"trainer": asynchronous()})).run()


Refusal = tuple[dict[str, Any], str]
REFUSALS: list[Refusal] = [
    (
        {"fully_async": {"max_staleness_steps": 3}},
        "max_staleness_steps=3 has an effect only with trainer.fully_async.enabled",
    ),
    (asynchronous() | {"placement": {"colocate_all": True}}, "set trainer.placement.colocate_all=false"),
    (asynchronous() | {"algorithm": {}}, r"policy_loss_type=regular does not correct .* decoupled_ppo, .*rollout_is"),
    (asynchronous(max_staleness_steps=-1), "max_staleness_steps=-1 must be 0"),
    (asynchronous(num_parallel_generation_workers=3), r"num_parallel_generation_workers=3 must be from .*=4 .* = 12"),
    (asynchronous(num_parallel_generation_workers=13), r"num_parallel_generation_workers=13 must be .* null means 12"),
    (asynchronous(sync_every_steps=4), r"sync_every_steps=4 must be from 1 to max_staleness_steps \+ 1 = 3"),
    (asynchronous(group_timeout_seconds=0), "group_timeout_seconds=0.0 must be greater than 0"),
    (asynchronous(sample_full_batch=True), "needs trainer.algorithm.zero_variance_filter=true"),
    (asynchronous(kv_after_sync="recompute", pause="wait"), "kv_after_sync=recompute applies to requests in flight"),
    (
        asynchronous(kv_after_sync="recompute", clear_kv_cache_on_weight_sync=True),
        "clear_kv_cache_on_weight_sync=true means .*kv_after_sync=clear, but it is recompute",
    ),
    (
        asynchronous() | {"algorithm": {**CORRECTED, "dynamic_sampling": {"type": "filter"}}},
        "dynamic_sampling.type=filter .*use trainer.fully_async.sample_full_batch=true",
    ),
    (asynchronous(simulate_training=True), "simulate_training.*skyrl_train.entrypoints.simulate"),
    (asynchronous(max_stalenes_steps=1), "did you mean trainer.fully_async.max_staleness_steps"),
]


@pytest.mark.parametrize(("trainer", "message"), REFUSALS, ids=[message[:40] for _, message in REFUSALS])
def test_invalid_settings_are_refused(
    settings: Callable[..., SkyRLConfig], tmp_path: Path, trainer: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        validate_cfg(settings(tmp_path, {"trainer": trainer}))
