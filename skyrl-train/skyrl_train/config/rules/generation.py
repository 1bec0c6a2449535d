"""Rules of generation: lengths, sampling, chat templates, turns as samples."""

import warnings
from pathlib import Path

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.generation import GeneratorConfig, SamplingParams
from skyrl_train.config.harness import HarnessConfig
from skyrl_train.config.rules.checks import check_not_negative, check_positive, check_rule

_SET_BY_THE_GENERATOR = {"add_generation_prompt", "chat_template", "continue_final_message", "return_dict", "tokenize"}

_SET_BY_THE_AGENT = (
    "max_turns",
    "use_conversation_multi_turn",
    "append_eos_token_after_stop_str_in_multi_turn",
    "chat_template",
    "chat_template_kwargs",
    "step_wise_trajectories",
    "merge_stepwise_output",
    "zero_reward_on_non_stop",
    "apply_overlong_filtering",
    "overlong_filtering_by",
    "max_rollout_retries",
)

_READ_WITH_A_HARNESS = ("chat_template", "chat_template_kwargs", "max_rollout_retries")


def check_generation(config: SkyRLConfig) -> None:
    """Check all rules of this file."""
    check_positive(
        config,
        (
            "trainer.eval_batch_size",
            "trainer.max_prompt_length",
            "generator.n_samples_per_prompt",
            "generator.eval_n_samples_per_prompt",
            "generator.max_input_length",
            "generator.max_turns",
            "environment.skyrl_gym.env_timeout_seconds",
        ),
    )
    check_not_negative(config, ("generator.max_rollout_retries", "environment.skyrl_gym.max_env_workers"))
    if not config.generator.harness.is_on:
        _check_harness_is_unset(config.generator.harness)
    if config.generator.uses_environments:
        _check_lengths(config)
    else:
        _check_agent(config.generator)
    _check_sampling(config.generator.sampling_params, "generator.sampling_params")
    _check_sampling(config.generator.eval_sampling_params, "generator.eval_sampling_params")
    _check_evaluation_samples(config)
    _check_chat_template(config)
    _check_step_wise(config)


def _check_lengths(config: SkyRLConfig) -> None:
    prompt, limit, turns = (
        config.trainer.max_prompt_length,
        config.generator.max_input_length,
        config.generator.max_turns,
    )
    check_rule(
        turns > 1 or limit == prompt,
        f"generator.max_input_length={limit} must be trainer.max_prompt_length={prompt} when generator.max_turns=1: "
        "the engine's input is then only the prompt",
    )
    check_rule(
        limit >= prompt,
        f"generator.max_input_length={limit} must be at least trainer.max_prompt_length={prompt}: it includes the "
        "prompt and the previous turns",
    )


def _check_agent(generator: GeneratorConfig) -> None:
    """Check that settings controlled by a task file or a harness are at their defaults."""
    defaults, harness = GeneratorConfig(), generator.harness
    check_rule(
        generator.task is None or not harness.is_on,
        f"generator.task={generator.task} and generator.harness both set an agent; remove one of them",
    )
    agent = "generator.harness" if harness.is_on else f"generator.task={generator.task}"
    owner = "the harness" if harness.is_on else "the task file"
    for name in _SET_BY_THE_AGENT:
        value, default = getattr(generator, name), getattr(defaults, name)
        read = harness.is_on and name in _READ_WITH_A_HARNESS
        check_rule(
            read or value == default,
            f"generator.{name}={value!r} has no effect with {agent}; remove it: {owner} controls turns, templates, "
            "masking and retries",
        )
    if harness.is_on:
        _check_harness(generator)


def _check_harness_is_unset(harness: HarnessConfig) -> None:
    """Check that harness settings are at their defaults without a harness."""
    for name, default in vars(HarnessConfig()).items():
        value = getattr(harness, name)
        check_rule(
            value == default,
            f"generator.harness.{name}={value!r} has no effect: generator.harness has neither command nor function, "
            "so no harness runs. Set one of them, or remove it",
        )


def _check_harness(generator: GeneratorConfig) -> None:
    harness = generator.harness
    check_rule(
        harness.command is None or harness.function is None,
        f"generator.harness.command={harness.command} and generator.harness.function={harness.function} both set a "
        "harness; remove one of them",
    )
    check_rule(harness.command is None or len(harness.command) > 0, "generator.harness.command=[] must name a program")
    for name in ("deadline_seconds", "grade_seconds", "max_turns", "max_tokens", "max_parallel", "memory_gb"):
        value = getattr(harness, name)
        check_rule(value is None or value > 0, f"generator.harness.{name} must be greater than 0; got {value}")
    defaults = HarnessConfig()
    for name in ("image", "pull"):
        value = getattr(harness, name)
        check_rule(
            harness.sandbox in ("docker", "podman") or value == getattr(defaults, name),
            f"generator.harness.{name}={value!r} has an effect only with generator.harness.sandbox=docker or podman; "
            f"it is {harness.sandbox}: change it, or remove generator.harness.{name}",
        )
    for folder in harness.visible:
        path = Path(folder)
        check_rule(
            path.is_absolute() and path.exists() and path != Path("/"),
            f"generator.harness.visible has {folder!r}, which must be the absolute path of a folder on this machine",
        )
    check_rule(
        generator.sampling_params.logprobs is not None,
        "generator.sampling_params.logprobs=null has no effect with generator.harness, which records the log-prob of "
        "each token; remove it",
    )
    for name in ("sampling_params", "eval_sampling_params"):
        for field in ("stop", "additional_kwargs"):
            value = getattr(getattr(generator, name), field)
            check_rule(
                not value,
                f"generator.{name}.{field}={value!r} has no effect with generator.harness, whose requests set their "
                "own stop conditions; remove it",
            )


def _check_sampling(params: SamplingParams, name: str) -> None:
    check_rule(params.max_generate_length > 0, f"{name}.max_generate_length must be greater than 0")
    check_rule(params.temperature >= 0, f"{name}.temperature must be 0 (greedy) or greater; got {params.temperature}")
    check_rule(0 < params.top_p <= 1, f"{name}.top_p must be above 0 and at most 1 (1 = off); got {params.top_p}")
    check_rule(params.top_k == -1 or params.top_k > 0, f"{name}.top_k must be -1 (off) or above 0; got {params.top_k}")
    check_rule(0 <= params.min_p <= 1, f"{name}.min_p must be from 0 (off) to 1; got {params.min_p}")
    check_rule(
        params.repetition_penalty > 0,
        f"{name}.repetition_penalty must be greater than 0 (1 = off); got {params.repetition_penalty}",
    )
    check_rule(
        params.logprobs in (None, 0),
        f"{name}.logprobs={params.logprobs} is not supported: 0 records the log-prob of every sampled token, which is "
        "all that training needs; null records none",
    )
    check_rule(
        "" not in (params.stop or []),
        f"{name}.stop contains an empty string, which would end every response immediately",
    )
    declared = {"max_tokens", *vars(params)} - {"additional_kwargs"}
    twice = sorted(declared & set(params.additional_kwargs))
    check_rule(
        not twice, f"{name}.additional_kwargs must not contain {', '.join(twice)}: use the settings of {name} instead"
    )


def _check_evaluation_samples(config: SkyRLConfig) -> None:
    generator = config.generator
    check_rule(
        generator.eval_n_samples_per_prompt == 1 or generator.eval_sampling_params.temperature > 0,
        f"generator.eval_n_samples_per_prompt={generator.eval_n_samples_per_prompt} with "
        "generator.eval_sampling_params.temperature=0 samples the same response that many times; raise the "
        "temperature, or set generator.eval_n_samples_per_prompt=1",
    )


def _check_chat_template(config: SkyRLConfig) -> None:
    from skyrl_train.utils.chat_templates import get_custom_chat_template

    generator = config.generator
    check_rule(
        generator.chat_template.source == "name" or generator.chat_template.name_or_path is not None,
        "generator.chat_template.source=file needs generator.chat_template.name_or_path, the path of a Jinja file",
    )
    get_custom_chat_template(generator.chat_template)
    reserved = sorted(_SET_BY_THE_GENERATOR & set(generator.chat_template_kwargs))
    check_rule(
        not reserved,
        f"generator.chat_template_kwargs must not contain {', '.join(reserved)}: the generator sets them (for a "
        "custom template use generator.chat_template)",
    )
    if (
        generator.use_conversation_multi_turn
        and generator.sampling_params.stop
        and not generator.append_eos_token_after_stop_str_in_multi_turn
    ):
        warnings.warn(
            "generator.sampling_params.stop is set and generator.append_eos_token_after_stop_str_in_multi_turn is "
            "false: turns that end with a stop string will lack the end-of-sequence token that the chat template "
            "puts after a message",
            stacklevel=5,
        )


def _check_step_wise(config: SkyRLConfig) -> None:
    generator = config.generator
    check_rule(
        generator.step_wise_trajectories or not generator.merge_stepwise_output,
        "generator.merge_stepwise_output=true merges turns of step-wise trajectories, but "
        "generator.step_wise_trajectories=false; set both or neither",
    )
    if not generator.step_wise_trajectories:
        return
    check_rule(
        generator.use_conversation_multi_turn,
        "generator.step_wise_trajectories=true makes a sample of every turn, but with "
        "generator.use_conversation_multi_turn=false all turns form one message; set the latter to true",
    )
