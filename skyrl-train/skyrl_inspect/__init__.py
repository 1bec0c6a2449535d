"""Tools that read run folders and settings: dashboard, diff, explain, replay, mismatch, plan, simulate, curve bands."""
