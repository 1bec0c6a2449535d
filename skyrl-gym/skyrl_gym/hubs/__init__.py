"""Adapters of other projects' environments, a folder each: `verifiers`, `openenv`. None of these packages is imported
before one of its environments is made.

Their classes are named by `module:Class` and have no short id: an id promises tasks of its own.
"""
