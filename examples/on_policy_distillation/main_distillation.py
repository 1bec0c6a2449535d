"""A training run whose only reward is the teacher's opinion: `main_base`, with the environments' rewards left out.

The teacher is the reference model (`trainer.ref.model.path`); the settings that make it the reward are in
`run_distillation.sh`. Environments still answer, end conversations and score evaluations.
"""

import multiprocessing
from dataclasses import replace

import hydra
from omegaconf import DictConfig

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, run_experiment
from skyrl_train.generators.base import GeneratorInput
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.rollouts.filters import map_trajectories, without_rewards
from skyrl_train.rollouts.metrics import scores_of_groups
from skyrl_train.rollouts.types import RolloutBatch


class UnrewardedGenerator(SkyRLGymGenerator):
    """Trajectories for training have reward 0 everywhere; what they would have earned is `environment/avg_score`."""

    async def generate_groups(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> RolloutBatch:
        rollouts = await super().generate_groups(input_batch, disable_tqdm)
        metadata = input_batch.get("batch_metadata")
        if metadata is not None and metadata.training_phase == "eval":
            return rollouts
        score = scores_of_groups(rollouts.groups)["avg_score"]
        earned = {} if score is None else {"environment/avg_score": score}
        return replace(map_trajectories(rollouts, without_rewards), metrics=rollouts.metrics | earned)


class DistillationExp(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client) -> UnrewardedGenerator:
        return UnrewardedGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            model_name=cfg.trainer.policy.model.path,
        )


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    run_experiment(cfg, DistillationExp)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    main()
