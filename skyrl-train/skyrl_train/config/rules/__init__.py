"""Rules between settings, one file per subject. `skyrl_train.config.validation` selects the rules of each kind
of run.
"""
