from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cocktail_cli.extensions.proofs.receipts import NAME, Receipt, ReceiptFile, ReceiptWriter
from cocktail_cli.extensions.proofs.signed_documents import SignedDocument
from cocktail_cli.machine import home
from transport.ledger import Counted, Ledger, RoundRow
from transport.protocol import CurveKeys, RunKeys, messages, short_key
from transport.scheduling import CommitSeconds

PEER = CurveKeys.generate().public


class Rounds:
    """A ledger, and the commits of its rounds, each of four samples of one peer."""

    def __init__(self, folder: Path, keys: RunKeys) -> None:
        self.ledger = Ledger(folder, run="toy", samples=400)
        self.writer = ReceiptWriter(keys, self.ledger)

    def commit(self) -> messages.Committed:
        r = len(self.ledger.rounds())
        counted = (Counted(r, "ann", "s", ((4 * r, 4 * r + 4),), PEER),)
        self.ledger.commit(RoundRow(r, r, 1.0, 2.0, 7, ("ann",), ("ann",), 1.0, 9), b"packet", counted)
        bodies = self.writer.counted(r, counted, CommitSeconds(0.0, 0.0))
        return messages.Committed(r, 6, "00", ["ann"], extra={NAME: bodies["s"]})


@pytest.fixture
def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rounds]:
    monkeypatch.setenv("COCKTAIL_HOME", str(tmp_path / "home"))
    found = Rounds(tmp_path / "ledger", KEYS)
    yield found
    found.ledger.close()


KEYS = RunKeys.generate()
URL = KEYS.url("127.0.0.1", 1, "toy")


def test_the_newest_receipt_is_on_the_disk(rounds: Rounds) -> None:
    warnings: list[str] = []
    file = ReceiptFile(URL, PEER, warnings.append)
    for _ in range(3):
        file.committed(rounds.commit())
    file.committed(messages.Committed(3, 6, "00", []))  # a round without this peer's samples

    assert file.path is not None
    assert list((home() / "receipts").iterdir()) == [file.path]
    said = SignedDocument.parse(file.path.read_text(), "receipt").statement
    assert (said["samples"], said["rounds"], said["committed"], said["peer"]) == (12, 3, 3, PEER)
    assert (file.samples, said["head"], said["hub"], warnings) == (
        12,
        rounds.ledger.head(3),
        short_key(URL.key),
        [],
    )


def test_a_receipt_that_is_not_genuine_is_told_once_and_the_one_before_stays(
    rounds: Rounds, tmp_path: Path
) -> None:
    warnings: list[str] = []
    file = ReceiptFile(URL, PEER, warnings.append)
    first = rounds.commit()
    file.committed(first)
    assert file.path is not None
    before = file.path.read_text()
    other = Rounds(tmp_path / "other", RunKeys.generate())

    file.committed(other.commit())
    receipt = msgspec.msgpack.decode(first.extra[NAME], type=Receipt)
    fewer = msgspec.msgpack.encode(msgspec.structs.replace(receipt, samples=5))
    for body in (fewer, b"no receipt"):
        file.committed(msgspec.structs.replace(first, extra={NAME: body}))
    other.ledger.close()

    assert "does not belong" in warnings[0], "its hub has another key"
    assert (len(warnings), file.path.read_text()) == (1, before)


def test_a_full_disk_costs_the_receipt_and_not_the_training(rounds: Rounds) -> None:
    warnings: list[str] = []
    file = ReceiptFile(URL, PEER, warnings.append)
    home().mkdir()
    (home() / "receipts").write_text("a file where the folder should be")

    file.committed(rounds.commit())
    file.committed(rounds.commit())

    assert (len(warnings), file.path) == (1, None)
