"""The command `tx`. The check runs before its imports, which fail with other releases of libraries."""

from skyrl_train.library_versions import PACKAGE, check_libraries

for _package in ("skyrl-tx", PACKAGE):
    check_libraries(_package)
