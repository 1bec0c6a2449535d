from skyrl_train.utils.lean_imports import leave_out_unused_packages

leave_out_unused_packages()  # before the first import of a model
