import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import cloudpickle

from skyrl_train_testing.backend_layouts import BackendRanks

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[BackendRanks]:
    """Ranks in processes, for jobs and backends of the test's file, which they cannot import."""
    cloudpickle.register_pickle_by_value(request.module)
    yield BackendRanks(tmp_path_factory.mktemp("ranks"))
    cloudpickle.unregister_pickle_by_value(request.module)
