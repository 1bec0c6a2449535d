"""Test kits for users' losses, estimators, backends and engines: checks that hold for every one. Start at
`invariances`."""
