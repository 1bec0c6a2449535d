"""Adapters of other projects' environments, a folder each: `verifiers`, `openenv`. Each package is imported when the
first of its environments is created.

Their classes are named by `module:Class` without a short id, since an id requires built-in tasks.
"""
