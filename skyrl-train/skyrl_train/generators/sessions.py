"""Sessions of a batch: the session ids of its samples' requests to the engines."""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager

from skyrl_train.generators.base import TrajectoryID
from skyrl_train.inference_engines.base import InferenceEngineInterface


def announced(
    engines: InferenceEngineInterface, sessions: Sequence[tuple[TrajectoryID, str]]
) -> AbstractContextManager[None]:
    """Announce the sessions of a batch to the engines before their requests (`InferenceEngineInterface.announced`),
    grouped by prompt.

    Args:
        sessions: pairs of sample and `session_ids` entry of its requests; samples of a prompt are consecutive.
    """
    groups = itertools.groupby(sessions, key=lambda entry: entry[0].instance_id)
    return engines.announced([[session for _, session in samples] for _, samples in groups])
