"""Simulation of asynchronous training in virtual time, on the scheduler that a run uses."""
