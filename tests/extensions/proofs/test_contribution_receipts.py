from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from hub_swarm import HubSwarm
from toy_swarm import ToyPeer, ToyWork, toy_settings

from cocktail_cli.extensions.proofs.receipts import NAME, Receipt, ReceiptWriter, receipt_document
from cocktail_cli.extensions.proofs.signed_documents import NotGenuine, SignedDocument, signer_of
from transport import Ledger, PeerLink, RunKeys, RunURL
from transport.peer import PeerIdentity
from transport.protocol import CurveKeys, encode, messages

MOST = 200  # bytes that a receipt adds to a message: transport/PROTOCOL.md says so


class KeepingLink(PeerLink):
    """A link that remembers what was committed."""

    def exchange(self, *arguments: object, **more: object) -> messages.Committed:
        done = super().exchange(*arguments, **more)  # type: ignore[arg-type]  # passed on as they are
        self.committed = [*getattr(self, "committed", []), done]
        return done


@dataclass(frozen=True)
class Told:
    """A run that is over."""

    folder: Path  # of its ledger
    url: RunURL
    keys: RunKeys
    peers: dict[str, CurveKeys]
    commits: dict[str, list[messages.Committed]]  # as each peer heard of them

    def receipts(self, peer: str) -> list[tuple[int, Receipt]]:
        """The rounds that brought a peer a receipt, and these."""
        came = [(done.round, done.extra[NAME]) for done in self.commits[peer] if NAME in done.extra]
        return [(round, msgspec.msgpack.decode(body, type=Receipt)) for round, body in came]

    def first(self, peer: str) -> tuple[int, Receipt]:
        return self.receipts(peer)[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A run of two peers over real sockets."""
    folder, peers = tmp_path_factory.mktemp("run"), {name: CurveKeys.generate() for name in ("ann", "bob")}
    settings = toy_settings(min_peers=2)
    extend = lambda keys, ledger: [lambda _: ReceiptWriter(keys, ledger)]  # noqa: E731
    with HubSwarm(settings, ToyWork(), folder, 0, extend=extend) as swarm:
        links = {name: KeepingLink(swarm.url, PeerIdentity(name, keys=own)) for name, own in peers.items()}
        swarm.train(*map(ToyPeer, links.values()))
    return Told(folder, swarm.url, swarm.keys, peers, {name: link.committed for name, link in links.items()})


def test_each_round_that_counts_a_peer_brings_it_a_receipt_that_agrees_with_the_ledger(run: Told) -> None:
    url = run.url
    with Ledger(run.folder, write=False) as ledger:
        whole = ledger.contributions()
        assert {sum(samples for samples, _ in whole.values())} == {40}
        for name, key in run.peers.items():
            receipts = run.receipts(name)
            assert len(receipts) == whole[key.public][1], "one for each round that counted its samples"
            for round, receipt in receipts:
                document = receipt_document(url.run, url.key, key.public, round, receipt)
                said = SignedDocument.parse(document.text(), "receipt").statement
                assert said["head"] == ledger.head(said["committed"])
                assert (said["samples"], said["rounds"]) == ledger.contributions(said["committed"])[
                    key.public
                ]
                assert said["signer"] == signer_of(run.keys.signing)
            assert (receipts[-1][1].samples, receipts[-1][1].rounds) == whole[key.public]


def test_a_receipt_costs_a_bounded_number_of_bytes(run: Told) -> None:
    for done in run.commits["ann"]:
        bare = msgspec.structs.replace(done, extra={})
        assert len(encode(done)) - len(encode(bare)) < MOST


@pytest.mark.parametrize("field", ["samples", "rounds", "head", "signer", "signature"])
def test_a_receipt_that_the_run_did_not_sign_is_refused(run: Told, field: str) -> None:
    url, (round, receipt) = run.url, run.first("ann")
    was = getattr(receipt, field)
    altered = was + 1 if isinstance(was, int) else bytes([was[0] ^ 1]) + was[1:]

    other = msgspec.structs.replace(receipt, **{field: altered})

    with pytest.raises(NotGenuine):
        receipt_document(url.run, url.key, run.peers["ann"].public, round, other)


def test_a_receipt_of_one_peer_is_none_for_another_or_another_run(run: Told) -> None:
    url, (round, receipt) = run.url, run.first("ann")

    for of, key in ((url, run.peers["bob"]), (replace(url, run="other"), run.peers["ann"])):
        with pytest.raises(NotGenuine):
            receipt_document(of.run, of.key, key.public, round, receipt)
