"""The process of a volunteer: prompt, bootstrap, sessions, link to the hub."""

from .base_weights import (
    DownloadPlan,
    base_folder,
    bytes_to_fetch,
    check_files,
    fetch_base,
    free_bytes,
    spool_within,
)
from .bootstrap import Bootstrap, Imports, micro_batch_of
from .checkpoint_store import path_of
from .join_prompt import JoinQuestion, Offer, read_url
from .limits import CONNECT_TIMEOUT, NOMINAL, Resources, VolunteerLimits, lacking, requirements_column
from .session import VolunteerSession, take_turns
