"""Search in a Python repository by what its code means. Runs where the repository is, so every module here needs the
standard library of Python 3.8 and nothing else."""
