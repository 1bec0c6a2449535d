"""Explanation of a hang: who waits for whom, since when, and which process or resource is the cause.

Made of files of the run folder and of `/proc`. No process of the run takes part, except that a signal makes each write
its stacks.
"""
