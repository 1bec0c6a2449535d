"""The mathematics: pure functions of tensors. Imports torch and the configuration, nothing else."""
