"""Mathematics of the algorithms: pure functions of tensors. Imports torch and the configuration only."""
