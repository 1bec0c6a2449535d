"""Helper modules of this folder, which importlib mode does not add to the search path, and data that tests share."""

import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

# Each composition copies all settings that any test has registered: half of its time. It loads copies of copies.
setattr(ConfigStore, "__deepcopy__", lambda store, _: store)  # noqa: B010 (pyright: it has none)

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "dev"))  # docs_site


@pytest.fixture(scope="session")
def spider(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The databases of Spider where the environment looks for them."""
    folder = tmp_path_factory.mktemp("sql")
    with tarfile.open(test_data / "sql_spider" / "databases.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(folder)
    (folder / "spider").mkdir()
    (folder / "databases" / "spider").rename(folder / "spider" / "database")
    return folder


@pytest.fixture(scope="module", autouse=True)
def unregister_example_components() -> Iterator[None]:
    """Remove the losses and estimators of examples that a module has imported: other tests look at all there are, and
    send them to ranks, which cannot import an example."""
    from composed_scripts import EXAMPLE_ENTRY_POINTS

    from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry
    from skyrl_train.algorithms.losses.contract import PolicyLossRegistry, TokenSelectorRegistry

    registries: list[Any] = [PolicyLossRegistry, TokenSelectorRegistry, AdvantageEstimatorRegistry]
    before = [registry.list_available() for registry in registries]
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry.list_available()) - set(names):
            registry.unregister(name)
    for name in EXAMPLE_ENTRY_POINTS:
        sys.modules.pop(name, None)
