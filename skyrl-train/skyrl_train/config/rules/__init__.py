"""The rules between settings, one file a subject. `skyrl_train.config.validation` says which run must obey which."""
