"""The key pair by which runs know this machine."""

import json
import os
import stat
import threading

import pytest

from cocktail_cli.errors import Failure
from cocktail_cli.machine import home, own_keys, registered_as
from cocktail_cli.machine.local_files import FILE
from transport.protocol import CurveKeys


def test_a_machine_has_the_same_keys_each_time() -> None:
    first = own_keys()

    assert own_keys() == first
    assert [path.name for path in home().iterdir()] == [FILE]


def test_peers_that_start_together_share_one_key_pair() -> None:
    """Peers of one process too: no two threads write the same temporary file."""
    found: list[CurveKeys] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        found.append(own_keys())

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 8
    assert {keys.public for keys in found} == {own_keys().public}


def test_a_second_process_under_the_same_name_is_not_alone() -> None:
    with (
        registered_as("run", "ann") as first,
        registered_as("run", "ann") as second,
        registered_as("run", "bob") as other,
    ):
        assert (first, second, other) == (True, False, True)
    with registered_as("run", "ann") as later:
        assert later


@pytest.mark.skipif(os.name == "nt", reason="Windows has no mode bits; the user's profile is private there")
def test_the_key_pair_is_readable_by_its_user_alone() -> None:
    own_keys()

    assert stat.S_IMODE((home() / FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"public": "a", "secret": 1}', json.dumps({"public": "a" * 43, "secret": "b" * 43})],
)
def test_a_damaged_key_pair_is_an_error_and_stays_on_disk(text: str) -> None:
    own_keys()
    (home() / FILE).write_text(text)

    with pytest.raises(Failure, match="is damaged") as caught:
        own_keys()
    assert caught.value.exit == 4
    assert (home() / FILE).read_text() == text
