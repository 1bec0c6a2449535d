"""Self-hosted training service for language models with the protocol of the `tinker` SDK."""

__version__ = "0.1.0"
