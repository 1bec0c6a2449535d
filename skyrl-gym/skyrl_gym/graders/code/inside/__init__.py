"""Programs that run inside a sandbox, where this package is not: their text is sent there. They import the standard
library and each other.
"""
