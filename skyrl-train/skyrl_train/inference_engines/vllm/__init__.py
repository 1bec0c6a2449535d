"""vLLM as a rollout engine. Nothing here imports vllm before an engine is made: it is heavy and optional."""
