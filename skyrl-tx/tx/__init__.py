"""A training service for language models that speaks the protocol of the `tinker` SDK, on one's own hardware."""

__version__ = "0.1.0"
