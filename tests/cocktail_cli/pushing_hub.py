"""A stand-in for the client of the Hugging Face hub, as far as it pushes."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError


@dataclass
class Hub:
    """A stand-in for HfApi that records requests."""

    made: list[dict[str, Any]] = field(default_factory=list)
    pushed: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None

    def create_repo(self, repo_id: str, **more: Any) -> SimpleNamespace:
        if self.error:
            raise self.error
        self.made.append({"repo_id": repo_id, **more})
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, folder_path: Path, allow_patterns: list[str], **more: Any) -> SimpleNamespace:
        if self.error:
            raise self.error
        from huggingface_hub.utils import filter_repo_objects

        every = [str(path.relative_to(folder_path)) for path in folder_path.rglob("*") if path.is_file()]
        sent = sorted(filter_repo_objects(every, allow_patterns=allow_patterns))
        self.pushed.append({"sent": sent, **more})
        return SimpleNamespace(commit_url="https://hub/me/m/commit/1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: found)
    return found


def status(code: int) -> HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=code, headers={}, request=None)
    return HfHubHTTPError("no", response=response)
