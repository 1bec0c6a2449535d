"""Datasets of prompts and examples: reading, filtering, batching, conversion to tensors."""

from skyrl_train.dataset.dataset import PromptDataset

__all__ = ["PromptDataset"]
