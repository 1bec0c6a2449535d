"""Folders that are replaced whole, under readers and where names cannot be swapped."""

import os
import sys
import threading
from pathlib import Path

import pytest

from skyrl_gym import whole_folders
from skyrl_gym.whole_folders import replacing


def replace_folder(place: Path, text: str) -> None:
    with replacing(place) as folder:
        (folder / "model").write_text(text)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a folder is replaced in two renames")
def test_readers_find_folder_during_replacement(tmp_path: Path):
    place = tmp_path / "export"
    replace_folder(place, "0")
    missing, is_over = [], threading.Event()

    def read() -> None:
        while not is_over.is_set():
            try:
                assert (place / "model").read_text().isdecimal()
            except FileNotFoundError as error:
                missing.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        replace_folder(place, str(number))
    is_over.set()
    reader.join()
    assert not missing
    assert (place / "model").read_text() == "199"
    assert os.listdir(tmp_path) == ["export"]


def test_folder_is_replaced_without_rename_exchange(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(whole_folders, "_RENAME_SWAP", 1 << 20)  # a flag that no kernel knows: EINVAL
    replace_folder(tmp_path / "export", "old")
    replace_folder(tmp_path / "export", "new")
    assert (tmp_path / "export" / "model").read_text() == "new"
    assert os.listdir(tmp_path) == ["export"]
