"""Trajectories of a skyrl-agent run (`output.trajectories`) in the form of a run folder's.

A folder with `trajectories.jsonl` counts as a run of one evaluation. Of its tokens the file has texts of spans only:
a span, written by the model or given to it, stands for a token.
"""

from skyrl_train.types import JsonObject

NAME = "trajectories.jsonl"
PHASE, STEP = "eval", 0
"""Place of these trajectories among those of a run's steps."""


def to_row(record: JsonObject) -> JsonObject:
    """Return a record of skyrl-agent as a row of a trajectories file. What is not of its form is left out."""
    parts = [part for part in _list(record.get("rows")) if isinstance(part, dict)]
    spans = [span for part in parts for span in _list(part.get("spans")) if isinstance(span, list) and len(span) == 2]
    texts = [str(text) for _, text in spans]
    first = parts[0] if parts else {}
    return {
        "uid": str(record.get("instance_id")),
        "sample": record.get("trajectory_id"),
        "prompt": str(first.get("prompt", "")),
        "response": "".join(texts),
        "reward": record.get("reward"),
        "stop_reason": record.get("finish_reason"),
        "failure": record.get("failure"),
        "prompt_ids": _list(first.get("prompt_ids")),
        "num_tokens": sum(len(_list(part.get("response_ids"))) for part in parts),
        "tokens": {"text": texts, "loss_mask": [int(bool(is_written)) for is_written, _ in spans]},
        "tool_calls": _list(record.get("tool_calls")),
        "sandbox": _list(record.get("sandbox")),
        "seconds": record.get("stage_seconds"),
    }


def _list(value: object) -> list:
    return value if isinstance(value, list) else []
