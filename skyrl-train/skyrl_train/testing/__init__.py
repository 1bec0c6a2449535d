"""For whoever writes a loss or an estimator: checks of what must hold for every one. Start at `invariances`."""
