"""Real stages over real sockets compute what they do in one process, to the bit, however their lines fare."""

import time
from collections.abc import Iterator

import pytest
import torch
from test_stage_worker import AQ_SGD, gradients, lease, model_of, terms_of

from cocktail_cli.extensions.stages.lines import Neighbour, StageLink, StageMessage
from scripts.swarms.stage_ring import LineSetting, StageRing
from scripts.swarms.tcp_link import Link
from transport.protocol import CurveKeys
from transport.wire import RouterWire

LIMIT, PATIENCE = 1 << 20, 90.0


class LinkedRing(StageRing):
    """The stages of a ring with a link each, dialled through a proxy."""

    def __init__(self, stages: int, setting: LineSetting) -> None:
        super().__init__(model_of(), stages, setting)
        self.links, self.proxies = list[StageLink](), list[Link]()
        self.mismatches = self.cuts = 0
        named = []
        for number in range(stages):
            keys = CurveKeys.generate()
            wire = RouterWire("127.0.0.1", 0, keys, 1, allowed=lambda key, n=number: self.links[n].knows(key))
            self.links.append(StageLink(wire, keys, LIMIT))
            self.proxies.append(Link(wire.port))
            named.append(Neighbour(f"s{number}", keys.public, f"127.0.0.1:{self.proxies[-1].port}"))
        for number, link in enumerate(self.links):
            link.connect(named[number - 1], named[(number + 1) % stages], named[number].address)

    def step(self, number: int, parts: list, cut_every: int) -> None:
        """Compute a step's gradient; every so many messages a line is cut."""
        self.workers[0].begin(number, parts, terms_of(parts), in_flight=4)
        until, came = time.monotonic() + PATIENCE, 0
        while not all(worker.step == number and worker.finished for worker in self.workers):
            assert time.monotonic() < until, "no stage has anything to do"
            for worker, link in zip(self.workers, self.links, strict=True):
                found = link.receive(0.002)
                answers = worker.work() or []
                if isinstance(found, StageMessage):
                    came += 1
                    if cut_every and came % cut_every == 0:
                        self.cuts += self.proxies[came % len(self.proxies)].cut()
                    answers += worker.receive(StageMessage(**vars(found)))
                for answer in answers:
                    self.mismatches += answer.kind == "mismatch"
                    link.send(StageMessage(**vars(answer)))

    def close(self) -> None:
        for link in self.links:
            link.close()
        for proxy in self.proxies:
            proxy.close()


@pytest.fixture
def ring() -> Iterator[LinkedRing]:
    ring = LinkedRing(3, AQ_SGD)
    yield ring
    ring.close()


def test_gradients_are_those_of_one_process_though_lines_are_cut(ring: LinkedRing) -> None:
    """Three epochs of quantised changes: to the bit, and without a sample that is sent directly again."""
    alone, parts = StageRing(model_of(), 3, AQ_SGD), lease(1, 8, 6)
    for number in range(3):
        alone.gradient(parts, terms_of(parts), in_flight=4)
        ring.step(number, parts, cut_every=5)
    wanted, found = gradients(alone), gradients(ring)
    for name in wanted:
        assert torch.equal(found[name], wanted[name])
    assert ring.mismatches == 0
    assert ring.cuts
