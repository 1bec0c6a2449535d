"""Trajectories of a skyrl-agent run (`output.trajectories`) in the form of a run folder's.

A folder with `trajectories.jsonl` counts as a run of one evaluation. The file has text spans instead of tokens; each
span, generated or given, is shown as one token.
"""

from skyrl_train.types import JsonObject

NAME = "trajectories.jsonl"
PHASE, STEP = "eval", 0
"""Place of these trajectories among those of a run's steps."""

STAGES = ("initialize", "generate", "evaluate")
MAX_BRANCHES = 64
"""Rows of a trajectory of which the tree is computed."""


def to_row(record: JsonObject) -> JsonObject:
    """Convert a record of skyrl-agent to a row of a trajectories file. Unknown fields are omitted."""
    seconds = record.get("stage_seconds")
    parts = [part for part in _list(record.get("rows")) if isinstance(part, dict)]
    spans = [span for part in parts for span in _list(part.get("spans")) if isinstance(span, list) and len(span) == 2]
    texts = [str(text) for _, text in spans]
    first = parts[0] if parts else {}
    return {
        "uid": str(record.get("instance_id")),
        "sample": record.get("trajectory_id"),
        "is_replayable": False,
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
        "messages": _list(record.get("messages")),
        "reward_parts": record.get("reward_parts") if isinstance(record.get("reward_parts"), dict) else {},
        "stages": _get_stages(seconds if isinstance(seconds, dict) else {}, record.get("time")),
    }


def _get_stages(seconds: JsonObject, ended: object) -> list[list[object]]:
    """Return the stages of the dispatcher and the waits before them as [name, begin, end], Unix seconds: a file tells
    how long each took, and when the last ended. Attempts at a stage are one."""
    if not isinstance(ended, int | float):
        return []
    # Backwards from the end, as a record has no time of its beginning.
    spans: list[list[object]] = []
    at = float(ended)
    for name in reversed([f"{wait}{stage}" for stage in STAGES for wait in ("queue_", "")]):
        took = seconds.get(name)
        if isinstance(took, int | float) and took > 0:
            spans.append([name, at - took, at])
            at -= took
    return spans[::-1]


def compute_branches(record: JsonObject) -> list[list[int | None]]:
    """Return the place of each row in the tree of a trajectory's rows, as [parent, common tokens]
    (`rollouts.certificate.build_token_tree`). Not for tables: it compares each row with all before."""
    parts = [part for part in _list(record.get("rows")) if isinstance(part, dict)][:MAX_BRANCHES]
    rows = [_list(part.get("prompt_ids")) + _list(part.get("response_ids")) for part in parts]
    found: list[list[int | None]] = []
    for number, row in enumerate(rows):
        shared = [_count_common(row, earlier) for earlier in rows[:number]]
        # The first of the earlier rows that share most is the parent, as in the certificate.
        start = max(shared, default=0)
        found.append([shared.index(start) if start else None, start])
    return found


def _count_common(left: list[object], right: list[object]) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:  # by slices, which are compared faster than their elements
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def _list(value: object) -> list:
    return value if isinstance(value, list) else []
