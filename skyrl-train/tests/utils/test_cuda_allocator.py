"""Settings of CUDA's allocator, in the order in which torch gets them."""

import pytest
import torch

from skyrl_train.utils import cuda_allocator
from skyrl_train.utils.cuda_allocator import VARIABLES, disable_expandable_segments, enable_expandable_segments


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings given to torch; the process keeps its own."""
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    monkeypatch.setattr(cuda_allocator, "_is_expandable", False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return given


def test_memory_for_other_processes_is_not_expandable(settings: list[str]):
    enable_expandable_segments()
    with disable_expandable_segments():
        settings.append("allocate")
    on, off = "expandable_segments:True", "expandable_segments:False"
    assert settings == [on, off, "allocate", on]


def test_allocator_is_unchanged_by_default(settings: list[str]):
    with disable_expandable_segments():
        pass
    assert settings == []


def test_settings_of_environment_are_kept(settings: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True")
    with disable_expandable_segments():
        pass
    assert settings == [f"max_split_size_mb:128,expandable_segments:{value}" for value in ("False", "True")]
