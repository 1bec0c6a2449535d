"""Explanation of a hang: which process waits for which, since when, and which process or resource is the cause.

Reads files of the run folder and `/proc`. Processes of the run are not involved, except that a signal makes each write
its stacks.
"""
