"""Diagnostics: rules over the metrics of a run that name the common failures of training as they happen."""
