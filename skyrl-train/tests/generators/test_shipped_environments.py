"""Every environment that skyrl-gym ships is driven by the trainer's generator as a plain loop drives it."""

import pytest

import skyrl_gym
from skyrl_gym.check.services import services_for
from skyrl_gym.envs.registration import env_class_of
from skyrl_gym.episode import run_episode
from skyrl_train.config import GeneratorConfig, SamplingParams, SkyRLGymConfig
from skyrl_train.generators.base import GeneratorInput, TrajectoryID
from skyrl_train.generators.sampling import compute_episode_seed
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator

SHIPPED = sorted(
    env_id for env_id, spec in skyrl_gym.registry.items() if str(spec.entry_point).startswith("skyrl_gym.envs.")
)
NUM_EXAMPLES = 2
SEED = 5


@pytest.mark.slow
@pytest.mark.parametrize("env_id", SHIPPED)
async def test_oracle_reward_equals_plain_loop_reward(env_id, scripted_engine, say, characters):
    env_class = env_class_of(skyrl_gym.spec(env_id))
    examples = env_class.examples()[:NUM_EXAMPLES]
    assert examples
    ids = [TrajectoryID(str(i), 0) for i in range(len(examples))]
    with services_for(env_id) as settings:
        config = dict(examples[0].env_config) | settings
        expected = []
        for example, trajectory_id in zip(examples, ids, strict=True):
            oracle = iter(example.oracle)
            env = skyrl_gym.make(env_id, env_config=config, extras=example.extras)
            seed = compute_episode_seed(SEED, None, trajectory_id)
            expected.append(run_episode(env, example.prompt, lambda _, oracle=oracle: next(oracle), seed=seed))
        max_turns = max(len(result.rewards) for result in expected)

        sampling = SamplingParams(max_generate_length=100_000)
        generator = SkyRLGymGenerator(
            GeneratorConfig(
                sampling_params=sampling,
                eval_sampling_params=sampling,
                max_turns=max(max_turns, *(example.extras.get("max_turns", 1) for example in examples)),
                max_input_length=1_000_000,
                seed=SEED,
            ),
            SkyRLGymConfig(env_configs={env_id: config}),
            scripted_engine(
                characters,
                {i.to_string(): [say(text) for text in e.oracle] for i, e in zip(ids, examples, strict=True)},
            ),
            characters,
            "scripted",
        )
        output = await generator.generate(
            GeneratorInput(
                prompts=[example.prompt for example in examples],
                env_classes=[env_id] * len(examples),
                env_extras=[example.extras for example in examples],
                trajectory_ids=ids,
            ),
            disable_tqdm=True,
        )
    assert output["failures"] == [None] * len(examples)
    rewards = [reward if isinstance(reward, float) else sum(reward) for reward in output["rewards"]]
    assert rewards == pytest.approx([result.total_reward for result in expected])
    assert min(rewards) > 0
