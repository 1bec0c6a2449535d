"""Helper modules of this folder, which importlib mode does not add to the search path, and data that tests share."""

import sys
import tarfile
from pathlib import Path

import pytest

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
