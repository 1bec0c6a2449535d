"""Problems of the Hugging Face hub, read by the optional package `datasets`."""

from collections.abc import Sequence

import httpx

from skyrl_gym.datasets.problems import Problem
from skyrl_gym.error import Error


def load_hub(name: str) -> Sequence[Problem]:
    """Load a set of the hub, named `NAME[:CONFIG]@SPLIT[#REVISION]`. Rows are read lazily during iteration.

    Raises:
        Error: the package is not installed, the hub cannot be reached, or has no such set.
    """
    try:
        import datasets  # heavy, and not needed for local files
        from datasets.exceptions import DatasetsError
    except ImportError as missing:
        raise Error(
            f"{name} on the hub needs the package `datasets`, which is not installed: `pip install datasets`, or use "
            "a local file"
        ) from missing
    dataset, _, revision = name.partition("#")
    dataset, _, split = dataset.partition("@")
    path, _, config = dataset.partition(":")
    try:
        return datasets.load_dataset(path, config or None, split=split or "train", revision=revision or None)  # pyright: ignore[reportReturnType]
    except (OSError, ValueError, httpx.HTTPError, DatasetsError) as failure:
        raise Error(
            f"{name} could not be downloaded from the hub ({type(failure).__name__}: {failure}): check name and "
            "network, or use a local file"
        ) from failure
