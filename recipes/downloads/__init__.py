"""The Hugging Face hub and https addresses."""

from .https_fetch import DownloadError, fetch_text, open_url
from .hub_access import OFFLINE, HubAnswer, Licence, ask_hub, gated_models, hub_cache, licence_of
from .hugging_face import (
    Progress,
    Repository,
    dataset_commit,
    fetch_dataset_files,
    fetch_model_files,
    is_hub_outage,
    licence_hint,
)
from .remote_code import CODE_FILES, from_pretrained_options
