"""Training in Ray processes, sampling by the engines of skyrl_train: vLLM with many adapters, and its other ones."""
