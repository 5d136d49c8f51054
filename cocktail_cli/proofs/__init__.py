"""Files that prove something: a peer's receipts, the seals of folders, the hashes a run began with."""

from .begun_files import altered_base_files, begun_files, check_begun_files, hashes_of
from .sealed_folder import (
    COPY_AGAIN,
    SEAL,
    check_files,
    check_sealed_model,
    read_seal,
    sha256_of,
    uncovered,
    write_seal,
)
