"""The base model from a stranger's hub: names checked, contents checked, nothing fetched twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cocktail_cli.base import check_names, fetch_base, missing
from cocktail_cli.errors import Failure


@dataclass(frozen=True)
class Named:
    name: str
    size: int
    sha256: str


@dataclass
class FakeHub:
    """Serves these files and counts what was asked for."""

    contents: dict[str, bytes]
    asked: list[str] = field(default_factory=list)

    def files(self) -> list[Named]:
        return [Named(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in self.contents.items()]

    def fetch(self, name: str, to: Path, progress: Callable[[int, int], None]) -> None:
        self.asked.append(name)
        data = self.contents[name.removeprefix("base/")]
        to.write_bytes(data)
        progress(len(data), len(data))


def told(name: str, done: int, total: int) -> None:
    assert done <= total


def test_a_base_is_fetched_once_and_found_the_second_time() -> None:
    hub = FakeHub({"config.json": b"{}", "model.safetensors": b"weights"})

    folder = fetch_base(hub.files(), hub.fetch, told)
    assert fetch_base(hub.files(), hub.fetch, told) == folder

    assert hub.asked == ["base/config.json", "base/model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_only_what_is_missing_or_damaged_is_fetched_again() -> None:
    hub = FakeHub({"config.json": b"{}", "model.safetensors": b"weights"})
    folder = fetch_base(hub.files(), hub.fetch, told)
    (folder / "model.safetensors").write_bytes(b"weighty")

    assert [file.name for file in missing(hub.files(), folder)] == ["model.safetensors"]
    fetch_base(hub.files(), hub.fetch, told)
    assert hub.asked[2:] == ["base/model.safetensors"]


def test_other_contents_than_announced_are_refused_and_not_kept() -> None:
    hub = FakeHub({"config.json": b"{}"})
    announced = hub.files()
    hub.contents["config.json"] = b"[]"

    with pytest.raises(Failure, match="another checksum"):
        fetch_base(announced, hub.fetch, told)


@pytest.mark.parametrize(
    "name",
    ["../evil.json", "/etc/passwd", "a/b.json", "modeling.py", ".hidden.json", "c:evil.json", "x" * 200, ""],
)
def test_a_file_that_could_leave_the_folder_or_be_code_is_refused(name: str) -> None:
    with pytest.raises(Failure) as caught:
        check_names([Named(name, 1, "")])

    assert caught.value.exit == 6


def test_a_file_may_come_once_only() -> None:
    with pytest.raises(Failure):
        check_names([Named("config.json", 1, ""), Named("config.json", 2, "")])
