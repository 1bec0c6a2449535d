"""Reference of the classes and functions that users subclass, call or register."""

from pathlib import Path

CLASSES: dict[str, tuple[str, ...]] = {
    "Environments": (
        "skyrl_gym.core.Env",
        "skyrl_gym.envs.base_text_env.BaseTextEnv",
        "skyrl_gym.envs.base_text_env.BaseTextEnvStepOutput",
        "skyrl_gym.envs.base_text_env.Example",
        "skyrl_gym.envs.registration.register",
        "skyrl_gym.wrappers.Wrapper",
        "skyrl_gym.tools.core.ToolGroup",
        "skyrl_gym.tools.core.tool",
    ),
    "Losses and estimators": (
        "skyrl_train.algorithms.losses.contract.PolicyLoss",
        "skyrl_train.algorithms.losses.contract.TokenSelector",
        "skyrl_train.config.requirements.register_policy_loss",
        "skyrl_train.config.requirements.register_advantage_estimator",
        "skyrl_train.config.registry.Registry",
        "skyrl_train.config.registry.Registration",
        "skyrl_train.config.requirements.LossRequirements",
        "skyrl_train.config.requirements.EstimatorRequirements",
        "skyrl_train_testing.loss_checks.check_policy_loss",
        "skyrl_train_testing.estimator_checks.check_advantage_estimator",
    ),
    "Trainer and entry point": (
        "skyrl_train.entrypoints.main_base.BasePPOExp",
        "skyrl_train.training_run.TrainingRun",
        "skyrl_train.hooks.TrainerHook",
        "skyrl_train.hooks.ObservedRun",
        "skyrl_train.trainer.RayPPOTrainer",
        "skyrl_train.fully_async_trainer.FullyAsyncRayPPOTrainer",
    ),
    "Rollouts and generators": (
        "skyrl_train.generators.base.GeneratorInterface",
        "skyrl_train.generators.base.GeneratorInput",
        "skyrl_train.generators.base.BatchMetadata",
        "skyrl_train.generators.skyrl_gym_generator.SkyRLGymGenerator",
        "skyrl_train.rollouts.types.TrainingSample",
        "skyrl_train.rollouts.types.Trajectory",
        "skyrl_train.rollouts.types.TrajectoryGroup",
        "skyrl_train.rollouts.types.RolloutBatch",
    ),
    "Rollout engines": (
        "skyrl_train.inference_engines.base.InferenceEngineInterface",
        "skyrl_train.inference_engines.base.EngineInfo",
        "skyrl_train.inference_engines.request.GenerationRequest",
        "skyrl_train.inference_engines.request.Completion",
        "skyrl_train.inference_engines.columns.InferenceEngineInput",
        "skyrl_train.inference_engines.columns.InferenceEngineOutput",
        "skyrl_train.config.engine_kinds.EngineTraits",
    ),
    "Training backends": (
        "skyrl_train.training_backends.base.TrainingBackend",
        "skyrl_train.training_backends.base.RankInfo",
        "skyrl_train.training_backends.base.ParallelInfo",
        "skyrl_train.training_backends.base.Objective",
        "skyrl_train.training_backends.transformers_backend.TransformersBackend",
        "skyrl_train.training_backends.fsdp2.backend.FSDP2Backend",
        "skyrl_train.config.training_backends.TrainingBackendTraits",
    ),
    "Agents": (
        "skyrl_agent.tools.base.BaseTool",
        "skyrl_agent.tools.base.ToolContext",
        "skyrl_agent.tools.base.ToolOutput",
        "skyrl_agent.tools.base.register_tool",
        "skyrl_agent.tasks.base.BaseTask",
        "skyrl_agent.runtimes.base.Runtime",
        "skyrl_agent.integrations.base.Backend",
    ),
    "Errors": (
        "skyrl_train.errors.SkyRLError",
        "skyrl_train.errors.ConfigError",
        "skyrl_train.errors.DataError",
        "skyrl_train.errors.AllRolloutsFailedError",
        "skyrl_train.errors.CheckpointError",
        "skyrl_train.errors.WorkerError",
        "skyrl_train.errors.WorkerMemoryError",
        "skyrl_train.errors.DiagnosticError",
        "skyrl_train.errors.NonFiniteUpdateError",
        "skyrl_train.errors.RolloutGapError",
        "skyrl_train.errors.WeightSyncError",
        "skyrl_train.errors.UnsupportedByEngine",
        "skyrl_train.errors.RolloutError",
        "skyrl_gym.error.Error",
        "skyrl_gym.error.RegistrationError",
        "skyrl_gym.error.TaskError",
        "skyrl_gym.error.InfraError",
        "skyrl_agent.errors.AgentError",
        "skyrl_agent.errors.ConfigError",
        "skyrl_agent.errors.TaskRowError",
        "skyrl_agent.errors.BackendError",
        "skyrl_agent.errors.UnavailableError",
        "skyrl_agent.errors.BatchFailedError",
        "skyrl_agent.errors.StageTimeout",
        "tx.errors.ConfigError",
        "tx.errors.RequestError",
        "tx.errors.Busy",
        "tx.errors.ModelError",
    ),
}
"""Title of a page -> full names on it."""

SOURCES = ("skyrl-train", "skyrl-gym", "skyrl-agent", "skyrl-tx")


def file_name(title: str) -> str:
    """Return the name of the page with this title."""
    return title.lower().replace(" ", "-") + ".md"


def page(title: str) -> str:
    """Return a page of directives, which mkdocstrings replaces by signatures and docstrings read from the source."""
    return "\n\n".join([f"# {title}", *(f"::: {name}" for name in CLASSES[title])]) + "\n"


def source_of(name: str, root: Path) -> Path | None:
    """Return the file of the module that holds the class or function with this full name."""
    module = name.rpartition(".")[0].split(".")
    candidates = [
        root.joinpath(folder, *module[:-1], end)
        for folder in SOURCES
        for end in (f"{module[-1]}.py", f"{module[-1]}/__init__.py")
    ]
    return next((path for path in candidates if path.exists()), None)
