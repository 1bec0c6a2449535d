"""Text adventures from JSON worlds in TextWorld's format (https://arxiv.org/abs/1806.11532)."""
