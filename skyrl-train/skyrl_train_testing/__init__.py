"""Test kits for users' losses, estimators, backends and engines: checks that hold for every one. Start at
`invariances`. The runtime, `skyrl_train`, does not import this package."""
