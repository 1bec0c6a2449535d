"""Commands of the trainer. The check runs before their imports, which fail with other releases of libraries."""

from skyrl_train.library_versions import check_libraries

check_libraries()
