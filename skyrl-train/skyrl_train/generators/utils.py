"""Public import location of functions defined in this folder."""

from skyrl_train.generators.inputs import prepare_generator_input
from skyrl_train.generators.rewards import apply_overlong_filtering
from skyrl_train.generators.sampling import get_sampling_params
from skyrl_train.generators.tokenization import (
    encode_messages_subset,
    get_generation_prompt_ids,
    get_response_ids_and_loss_mask_from_messages,
)
from skyrl_train.rollouts.adapter import (
    concatenate_generator_outputs,
    get_metrics_from_generator_output,
    validate_generator_output,
)
from skyrl_train.rollouts.metrics import get_rollout_metrics
from skyrl_train.utils.chat_templates import CUSTOM_CHAT_TEMPLATES, get_custom_chat_template

__all__ = [
    "CUSTOM_CHAT_TEMPLATES",
    "apply_overlong_filtering",
    "concatenate_generator_outputs",
    "encode_messages_subset",
    "get_custom_chat_template",
    "get_generation_prompt_ids",
    "get_metrics_from_generator_output",
    "get_response_ids_and_loss_mask_from_messages",
    "get_rollout_metrics",
    "get_sampling_params",
    "prepare_generator_input",
    "validate_generator_output",
]
