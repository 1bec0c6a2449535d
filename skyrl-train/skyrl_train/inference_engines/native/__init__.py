from skyrl_train.utils.lean_imports import hide_unused_packages

hide_unused_packages()  # before the first import of a model
