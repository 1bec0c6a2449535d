"""Finish reasons of trajectories and their consequences: one table."""

from dataclasses import dataclass

FINISH_TOOL = "FINISH_TOOL"
FINISH = "FINISH"
CONTEXT_WINDOW_EXCEEDED = "CONTEXT_WINDOW_EXCEEDED"
MAX_ITERATIONS_REACHED = "max_iterations_reached"
STUCK_IN_A_LOOP = "stuck_in_a_loop"
BAD_LLM_RESPONSE = "BAD_LLM_RESPONSE"
NO_GIT_PATCH = "no_git_patch"
CMD_TIMEOUT = "cmd_timeout"
ERROR_RUNTIME = "error_runtime"
ERROR_EVALUATION = "error_evaluation"
ERROR_AGENT = "error_agent"
CANCELLED = "cancelled"


@dataclass(frozen=True)
class Ending:
    """Consequences of a finish reason.

    Args:
        trains: its tokens have a loss. Otherwise the loss mask is 0; the reward stays.
        in_baseline: its reward counts for its group. An infrastructure failure is not evidence about the model.
        evaluated: a reward is computed from the result so far.
        metric: name of its share in `rollout_metrics/`.
    """

    trains: bool
    in_baseline: bool
    evaluated: bool
    metric: str


ENDINGS = {
    FINISH_TOOL: Ending(True, True, True, "finish_tool_ratio"),
    FINISH: Ending(True, True, True, "finish_ratio"),
    CONTEXT_WINDOW_EXCEEDED: Ending(False, True, True, "context_exceed_ratio"),
    MAX_ITERATIONS_REACHED: Ending(False, True, True, "iter_cap_ratio"),
    STUCK_IN_A_LOOP: Ending(False, True, True, "stuck_in_a_loop_ratio"),
    BAD_LLM_RESPONSE: Ending(False, True, True, "bad_llm_response"),
    NO_GIT_PATCH: Ending(True, True, False, "no_git_patch"),
    CMD_TIMEOUT: Ending(False, True, True, "cmd_timeout"),
    ERROR_RUNTIME: Ending(False, False, False, "error_runtime"),
    ERROR_EVALUATION: Ending(False, False, False, "error_evaluation"),
    ERROR_AGENT: Ending(False, False, False, "error_agent"),
    CANCELLED: Ending(False, False, False, "cancelled"),
}


def get_ending(finish_reason: str | None) -> Ending:
    """Return the consequences of a finish reason. An unknown or missing reason counts as an agent error."""
    return ENDINGS.get(finish_reason or ERROR_AGENT, ENDINGS[ERROR_AGENT])
