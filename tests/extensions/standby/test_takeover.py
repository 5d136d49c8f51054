"""A real hub, real peers and a real standby over sockets: the run goes on with the standby's copy."""

import hashlib
import json
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import msgspec
from toy_swarm import ToyPeer, ToyWork, toy_settings
from waiting import until

from cocktail_cli.extensions.standby import StandbyPeer
from cocktail_cli.extensions.standby.bodies import NAME, Follow
from cocktail_cli.extensions.standby.follower import Follower
from cocktail_cli.extensions.standby.hub import Replication
from cocktail_cli.extensions.standby.hub_process import HubProcess
from cocktail_cli.extensions.standby.ledger_copy import LedgerCopy
from cocktail_cli.extensions.standby.succession import Lookout, Succession
from transport.hub import Extend, Hub, Late
from transport.ledger import Ledger, UpdateLog
from transport.peer import LinkLimits, PeerIdentity, PeerLink
from transport.protocol import Event, RunEnded, RunKeys, RunSettings, WeightedPacket, messages

FILE = b"the tokenizer"


class FollowedWork(ToyWork):
    """A toy that logs its updates, as an aggregator does, for its standby."""

    def __init__(self, folder: Path, packets: Sequence[bytes] = ()) -> None:
        super().__init__(list(packets))
        self.log = UpdateLog(folder / "updates.log", len(packets))

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        packet = super().aggregate(round, updates)
        self.log.begin(round, [WeightedPacket(*one) for one in updates])
        self.log.seal(hashlib.sha256(packet).digest())
        return packet


def file_of(name: str) -> bytes | Path:
    """The one file of a run, and its manifest."""
    if name.startswith("replica/manifest/"):
        files = [{"path": "tokenizer/t.json", "size": len(FILE), "stamp": 10**18}]
        return json.dumps({"files": files, "saved": 0, "own_key": "", "record": {}}).encode()
    return FILE


def standing_by(keys: RunKeys, ledger: Ledger, lag: int = 0) -> list[Extend]:
    """The hub's part of a standby."""
    begin = partial(Replication, lag=lag, process=HubProcess(keys, ledger, file_of))
    return [begin if lag == 0 else Late(NAME, begin)]


def hub_of(
    folder: Path, keys: RunKeys, settings: RunSettings, port: int = 0
) -> tuple[Hub, list[Event], FollowedWork]:
    ledger = Ledger(folder, run=settings.run, samples=settings.samples)
    work = FollowedWork(folder, [packet for _, packet in ledger.packets()])
    hub, told = (
        Hub(("127.0.0.1", port), keys, ledger, settings, work, standing_by(keys, ledger)),
        list[Event](),
    )
    hub.start()
    threading.Thread(target=lambda: told.extend(filter(None, hub.events())), daemon=True).start()
    return hub, told, work


def test_a_standby_takes_over_on_its_hosts_word_and_the_old_hub_which_is_alive_stops(tmp_path: Path) -> None:
    """The order of a host in a split network. Peers come by themselves, each sample is counted once, and the
    old hub says in one sentence why it stops."""
    keys = RunKeys.generate()
    own = replace(RunKeys.generate(), token=keys.token)
    settings = toy_settings(
        samples=60, min_peers=2, ping_s=0.1, grace_s=0.3, recover_s=2.0,
        start_timeout=8.0,
    )  # fmt: skip
    old, told, _ = hub_of(tmp_path / "hub", keys, settings)
    url, gate = keys.url("127.0.0.1", old.port, settings.run), threading.Event()
    state = Succession(settings.run, keys.token)
    with closing(Lookout(("127.0.0.1", 0), own.pair, state, lambda: inf)) as lookout:
        follow = msgspec.msgpack.encode(Follow(f"127.0.0.1:{lookout.port}", keys.stop))
        me = PeerIdentity("standby", keys=own.pair, extra={NAME: follow})
        follower = Follower(
            url, me, tmp_path / "standby", lambda copy: None, lambda what: None, lambda _: 1 << 20
        )
        follower.start()

        def wait_once(opened: messages.Round) -> None:
            if opened.round == 4:
                gate.wait(120)

        peers = [
            ToyPeer(PeerLink(url, PeerIdentity(name), LinkLimits(patience=30.0)), before_exchange=wait_once)
            for name in ("ann", "bob")
        ]
        for peer in peers:
            peer.link.listen({NAME: StandbyPeer(peer.link).received})
        threads = [peer.start() for peer in peers]
        until(lambda: [peer.rounds[-1] for peer in peers if peer.rounds] == [4, 4])
        until(lambda: follower.copy.rounds == 4)
        until(lambda: follower.silence < 1.0)
        assert (tmp_path / "standby/tokenizer/t.json").read_bytes() == FILE
        follower.close()
        with LedgerCopy(tmp_path / "standby/ledger") as copy:
            copy.take_over(own.public, NAME)
    new, more, _ = hub_of(tmp_path / "standby/ledger", own, settings, lookout.port)
    gate.set()

    for thread in threads:
        thread.join(120)
    assert [(peer.error, peer.over is not None and peer.over.finished) for peer in peers] == [
        (None, True)
    ] * 2
    assert old.join(120)
    assert new.join(120)
    ended = [event for event in told if isinstance(event, RunEnded)]
    assert [one.exit_code for one in ended] == [6]
    assert f"the standby at 127.0.0.1:{lookout.port} has taken this run over" in ended[0].reason
    audit = new.ledger.verify(complete=True)
    assert audit.counted == 60
    assert [packet for _, packet in new.ledger.packets()] == peers[0].packets == peers[1].packets
    with Ledger(tmp_path / "hub", write=False) as before:
        known = [packet for _, packet in before.packets()]
    assert known[:4] == peers[0].packets[:4]
    assert next(event for event in more if isinstance(event, RunEnded)).finished
    old.ledger.close()
    new.ledger.close()
