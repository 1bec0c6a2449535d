"""Prompts: read, filtered, dealt out in batches, and turned into tensors."""

from skyrl_train.dataset.dataset import PromptDataset

__all__ = ["PromptDataset"]
