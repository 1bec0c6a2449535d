"""vLLM as a rollout engine. vllm is imported only when an engine is created: it is slow to import and optional."""
