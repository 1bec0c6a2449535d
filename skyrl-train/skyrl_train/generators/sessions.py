"""Sessions of a batch: the names that the requests of its samples carry to the engines."""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager

from skyrl_train.generators.base import TrajectoryID
from skyrl_train.inference_engines.base import InferenceEngineInterface


def announced(
    engines: InferenceEngineInterface, sessions: Sequence[tuple[TrajectoryID, str]]
) -> AbstractContextManager[None]:
    """Announce the sessions of a batch before their requests come (`InferenceEngineInterface.announced`), those of one
    prompt as a group.

    Args:
        sessions: (sample, the `session_ids` entry of its requests), those of one prompt next to each other.
    """
    groups = itertools.groupby(sessions, key=lambda entry: entry[0].instance_id)
    return engines.announced([[session for _, session in samples] for _, samples in groups])
