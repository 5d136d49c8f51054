"""Replicas of several machines in a real run: to the hub each is one peer, to the model a whole one."""

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Member, Swarm, recipe_of, save_tiny, write_rows

from cocktail_cli.extensions.stages.compute import (
    RingHead,
    StageFailed,
    StageLost,
    StageMachine,
    StageModel,
    StagePart,
    StageServer,
    build_staged_peer,
    cut_at_layers,
    cut_of,
    layers_of,
    load_replica,
    mend,
    parameter_costs,
)
from cocktail_cli.extensions.stages.lines import LineLost, StageMessage
from compress import fingerprint, split
from recipes.algorithm import aggregator_of
from recipes.config import Recipe
from recipes.data import Sample
from recipes.models import load_trained, meta_trained_model
from recipes.objectives import Measured
from recipes.training import CaughtUp, EvaluatedPart

pytestmark = pytest.mark.slow

LOSSLESS = {"random_ratio": 1.0, "topk_ratio": 1.0, "quant_bits": 32, "staleness": 0}
SGD = {"optim": "sgd", "learning_rate": 0.3}


class Lines:
    """A machine's lines to its neighbours, as queues."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[StageMessage | LineLost] = queue.Queue()
        self.next = self.before = self
        self.sent = Counter[str]()

    def send(self, message: StageMessage) -> None:
        self.sent[message.kind] += len(message.body)
        to = self.next if message.kind in ("activations", "request") else self.before
        to.inbox.put(message)

    def receive(self, timeout: float) -> StageMessage | LineLost | None:
        try:
            return self.inbox.get(timeout=timeout) if timeout else self.inbox.get_nowait()
        except queue.Empty:
            return None

    def refuse(self, kind: str, why: str) -> None:
        raise AssertionError(why)


class Replica:
    """The machines of one peer, which the head has loaded. Each of the others has a thread."""

    def __init__(self, base: Path, recipe: Recipe, stages: int, name: str) -> None:
        self.base, self.recipe, self.stages, self.name = base, recipe, stages, name
        self.lines = [Lines() for _ in range(stages)]
        self.machines = [StageMachine(number) for number in range(stages)]
        self.servers: dict[int, tuple[StageServer, threading.Thread]] = {}
        layers = cut_of(parameter_costs(meta_trained_model(recipe, base)), stages, recipe)
        self.head = RingHead(self.machines[0], self.lines[0], layers)
        for number in range(1, stages):
            self.start(number)
        load_replica(self.head, recipe, base, name=name)

    def start(self, number: int) -> None:
        self.lines[number].inbox = queue.Queue()
        for here, there in zip(self.lines, self.lines[1:] + self.lines[:1], strict=True):
            here.next, there.before = there, here
        server = StageServer(self.machines[number], self.lines[number], len(self.machines))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        self.servers[number] = server, thread

    def start_again(self, number: int) -> None:
        """Start a machine that was lost: with new lines, and x_0."""
        layers = [n for n, layer in enumerate(layers_of(self.compute(number))) if holds(layer)]
        stage = StageModel(
            load_trained(self.recipe, self.base), range(layers[0], layers[-1] + 1), first=False
        )
        part = StagePart(stage, self.machines[0].part.whole, self.recipe, self.name)
        part.compute.step = self.head.steps
        self.machines[number] = StageMachine(number)
        self.machines[number].trained = part
        self.start(number)

    def replace_head(self, name: str) -> None:
        """Put another machine in the place of the head, which is lost."""
        stops = [0] * self.stages
        for number in range(self.stages):
            for n, layer in enumerate(layers_of(self.compute(number))):
                stops[number] = n + 1 if holds(layer) else stops[number]
        self.head.close()
        self.machines[0], self.lines[0].inbox = StageMachine(0), queue.Queue()
        layers = tuple(map(range, [0, *stops[:-1]], stops))
        self.head = RingHead(self.machines[0], self.lines[0], layers)
        assert not load_replica(self.head, self.recipe, self.base, name=name)

    def compute(self, number: int) -> Any:
        return self.machines[number].part.compute.stage.model

    def end(self, number: int) -> None:
        server, thread = self.servers.pop(number)
        server.stop.set()
        thread.join(120)

    def kill(self, number: int) -> None:
        """End a machine in the middle of whatever it does; its neighbours are told."""
        self.end(number)
        gone = f"stage {number} is gone"
        self.lines[number].next.inbox.put(LineLost(gone))
        self.lines[number].before.inbox.put(LineLost(gone))

    def close(self) -> None:
        for number in list(self.servers):
            self.end(number)
        self.head.close()


class StagedSwarm(Swarm):
    """A run whose peers are replicas of several machines."""

    def __init__(self, recipe: Recipe, folder: Path, min_peers: int = 1, stages: int = 2) -> None:
        super().__init__(recipe, folder, min_peers=min_peers)
        self.stages, self.replicas = stages, dict[str, Replica]()
        self.closing: list[Callable[[], object]] = []

    def __exit__(self, *_: object) -> None:
        for close in self.closing:
            close()
        super().__exit__()

    def prepare(self, name: str) -> Member:
        replica = Replica(self.base.folder, self.recipe, self.stages, name)
        self.replicas[name] = replica
        self.closing.append(replica.close)
        return self.enrol(name, build_staged_peer(replica.head, micro_batch=2))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path, 42)


def staged_recipe(tmp_path: Path, family: str, data: Path, **sections: dict[str, Any]) -> Recipe:
    folder = tmp_path / family
    model = folder if folder.exists() else save_tiny(family, folder)
    return cut_at_layers(recipe_of(model, data, **{"stages": {}, **sections}), model)


def finished(swarm: Swarm, *names: str) -> torch.Tensor:
    """Run to the end; x' as the ledger has it."""
    with swarm:
        swarm.start(*names)
        swarm.finish()
        swarm.audit()
        assert all(step.accepted for member in swarm.members.values() for step in member.steps)
        return swarm.folded()


@pytest.mark.parametrize(
    ("family", "stages", "lora"),
    [("gpt_neox", 2, None), ("llama", 3, None), ("llama", 2, {"lora_r": 4, "lora_dropout": 0.0})],
)
def test_two_replicas_of_stages_end_where_two_whole_peers_do(
    tmp_path: Path, data: Path, family: str, stages: int, lora: dict[str, Any] | None
) -> None:
    """Runs of the same samples end at the same x' to rounding, where nothing is quantised."""
    sections = {"compression": LOSSLESS, "training": SGD} | ({"lora": lora} if lora else {})
    recipe = staged_recipe(tmp_path, family, data, **sections)
    plain = Swarm(recipe, tmp_path / "whole", min_peers=2)
    whole = finished(plain, "ann", "bob")
    staged = StagedSwarm(recipe, tmp_path / "staged", min_peers=2, stages=stages)
    start = staged.folded()
    found = finished(staged, "ann", "bob")

    moved = (whole - start).abs().max()
    assert (found - whole).abs().max() < 1e-4 * moved
    assert held_out(staged) == pytest.approx(held_out(plain), rel=1e-4)


def test_machines_of_a_replica_make_steps_as_long_as_a_whole_peer_does(tmp_path: Path, data: Path) -> None:
    """Each measures the noise of its own layers; the head knows that of them all."""
    training = {"optim": "adamw_torch", "learning_rate": 1e-3}
    recipe = staged_recipe(tmp_path, "llama", data, compression=LOSSLESS, training=training)
    plain = Swarm(recipe, tmp_path / "whole", min_peers=2)
    whole = finished(plain, "ann", "bob")
    staged = StagedSwarm(recipe, tmp_path / "staged", min_peers=2, stages=2)
    start = staged.folded()
    found = finished(staged, "ann", "bob")

    want = plain.members["ann"].peer.trainer.noise.sums
    assert want.factor > 1.02
    noise = staged.members["ann"].peer.trainer.noise  # as the head added it up before the last step
    assert noise.places == want.places
    assert noise.factor == pytest.approx(want.factor, rel=0.1)
    assert torch.dist(found, whole) < 0.05 * torch.dist(whole, start)


def held_out(swarm: Swarm) -> list[float]:
    """The held-out loss of every evaluation, from the parts of all peers."""
    found = defaultdict[int, Measured](Measured)
    for member in swarm.members.values():
        for event in member.events:
            if isinstance(event, EvaluatedPart):
                found[event.round] += event.measured
    assert len(found) > 1
    return [found[round].mean for round in sorted(found)]


def holds(layer: torch.nn.Module) -> bool:
    return any(True for _ in layer.parameters())


def whole_of(replica: Replica) -> torch.Tensor:
    """x' of a replica, from the ranges of its machines."""
    parts = [machine.part for machine in replica.machines]
    whole = torch.full((parts[0].whole.size,), torch.nan)
    for part in parts:
        for shard in part.worker.global_model.shards:
            at = shard.start + shard.offset
            whole[at : at + shard.size] = shard.of(part.worker.global_model.vector)
    return whole


def test_stages_and_whole_peers_hold_the_same_x_prime_to_the_bit(tmp_path: Path, data: Path) -> None:
    """The default compression, and a staleness of 2: two replicas of different stages beside a whole peer."""
    recipe = staged_recipe(tmp_path, "gpt_neox", data, compression={"staleness": 2})
    with StagedSwarm(recipe, tmp_path / "run", min_peers=3) as swarm:
        swarm.prepare("ann")
        swarm.stages = 3
        swarm.prepare("bob")
        cid = Swarm.prepare(swarm, "cid")
        for member in list(swarm.members.values()):
            swarm.go(member)
        swarm.finish()
        swarm.audit()
        folded = swarm.folded()

    assert torch.equal(cid.common, folded)
    for name in ("ann", "bob"):
        assert torch.equal(whole_of(swarm.replicas[name]), folded)
        assert swarm.members[name].steps[-1].fingerprint == fingerprint(folded)
        assert sum(step.tokens for step in swarm.members[name].steps)


def test_quantised_activations_cost_little_loss_and_a_fraction_of_the_bytes(
    tmp_path: Path, data: Path
) -> None:
    """Two epochs with activations in 4 bits, as changes, and their gradients in 8, beside a run without; the
    held-out loss is of the model itself, whatever its lines carry."""
    found, carried = [], []
    for bits in (32, 4):
        sections = {
            "compression": {"staleness": 0},
            "stages": {"activation_bits": bits},
            "training": {"num_train_epochs": 2},
        }
        recipe = staged_recipe(tmp_path, "llama", data, **sections)
        with StagedSwarm(recipe, tmp_path / str(bits)) as swarm:
            swarm.start("ann")
            swarm.finish()
            swarm.audit()
        found.append(held_out(swarm))
        carried.append(sum((lines.sent for lines in swarm.replicas["ann"].lines), Counter[str]()))

    assert found[0][-1] < found[0][0] - 0.2
    assert found[1] == pytest.approx(found[0], rel=0.003)
    # samples are short: heads and tables count
    assert carried[1]["activations"] < carried[0]["activations"] / 2.3
    assert carried[1]["gradients"] < carried[0]["gradients"] / 3


def test_a_replica_that_leaves_has_one_handoff_and_the_next_catches_up(tmp_path: Path, data: Path) -> None:
    """The residuals of all machines are one packet that an aggregator can use. The next replica applies the
    packets it lacks, each machine its own shards of them."""
    recipe = staged_recipe(tmp_path, "gpt_neox", data)

    with StagedSwarm(recipe, tmp_path / "run") as swarm:
        ann = swarm.prepare("ann")
        swarm.go(ann, lambda member, _: member.leave() if len(member.steps) == 3 else None)
        ann.join()
        worker, shards = ann.peer.worker, recipe.compression.shard_count
        before, part = worker.residual_norm(), worker.handoff(1 << 20)
        assert part is not None
        assert all(split(part.packet, shards))
        worker.subtract(part)
        assert worker.residual_norm() < 0.5 * before
        fresh = aggregator_of(recipe, swarm.work.parameters)
        assert fresh.merge_handoff("ann", part.packet, 1.0) == 1
        bob = swarm.go(swarm.prepare("bob"))
        swarm.finish()
        swarm.audit()
        folded = swarm.folded()

    assert [event.packets for event in bob.events if isinstance(event, CaughtUp)] != [0]
    assert torch.equal(whole_of(swarm.replicas["bob"]), folded)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_machine_that_is_lost_costs_the_lease_and_nothing_else(
    tmp_path: Path, data: Path, victim: int
) -> None:
    """One of three machines ends in the middle of a step and starts again with x_0. The samples of its
    replica go back, the others keep what they have, it catches up, and every sample is counted once."""
    recipe = staged_recipe(tmp_path, "gpt_neox", data)
    with StagedSwarm(recipe, tmp_path / "run", min_peers=2, stages=3) as swarm:
        ann, bob = swarm.prepare("ann"), swarm.prepare("bob")
        replica, computing = swarm.replicas["bob"], threading.Event()
        layers, passes = layers_of(replica.compute(victim)), []

        def count(*_: object) -> None:
            passes.append(1)
            if len(passes) == 6:
                computing.set()

        next(layer for layer in layers if holds(layer)).register_forward_hook(count)
        for member in (ann, bob):
            swarm.go(member)
        assert computing.wait(120)
        replica.kill(victim)
        with pytest.raises(StageLost, match=f"stage {victim} is gone"):
            bob.join()
        stepped = len(bob.steps)
        bob.link.link.leave("a machine of this replica is lost")
        replica.start_again(victim)
        mend(bob.peer)
        back = swarm.enrol("bob", bob.peer)
        swarm.go(back)
        swarm.finish()
        swarm.audit()
        folded = swarm.folded()

    assert stepped
    assert sum(step.tokens for step in back.steps)
    assert torch.equal(whole_of(replica), folded)
    assert back.steps[-1].fingerprint == fingerprint(folded)


def test_a_lost_head_is_replaced_and_the_others_keep_what_they_have(tmp_path: Path, data: Path) -> None:
    """The head of three machines ends in an evaluation. Another takes its place in the ring, and joins; it
    catches up from x_0, and the others go on with x_i, residual and optimizer."""
    recipe = staged_recipe(tmp_path, "gpt_neox", data)
    with StagedSwarm(recipe, tmp_path / "run", min_peers=2, stages=3) as swarm:
        ann, bob = swarm.prepare("ann"), swarm.prepare("bob")
        replica = swarm.replicas["bob"]

        def end(member: Member, _: object) -> None:
            if len(member.steps) == 3:
                replica.head.lose(StageLost("its process was killed"))

        swarm.go(ann)
        swarm.go(bob, end)
        with pytest.raises(StageLost, match="was killed"):
            bob.join()
        bob.link.link.leave("its process was killed")
        others = [machine.part for machine in replica.machines[1:]]
        others[0].use_global_model()
        rounds = [part.worker.global_model.round for part in others]
        replica.replace_head("dan")
        del swarm.members["bob"]
        dan = swarm.enrol("dan", build_staged_peer(replica.head, micro_batch=2))
        swarm.go(dan)
        swarm.finish()
        swarm.audit()
        folded = swarm.folded()

    assert min(rounds) > 0
    assert [machine.part for machine in replica.machines[1:]] == others
    assert all(part.compute.learns for part in others)
    assert sum(step.tokens for step in dan.steps)
    assert torch.equal(whole_of(replica), folded)
    assert dan.steps[-1].fingerprint == fingerprint(folded)


def test_a_machine_started_again_unnoticed_is_a_lost_one_and_is_loaded_again(
    tmp_path: Path, data: Path
) -> None:
    """Its neighbours do not tell the head, as in a ring of four or more they may not before it is asked."""
    recipe = staged_recipe(tmp_path, "gpt_neox", data)
    replica = Replica(tmp_path / "gpt_neox", recipe, 3, "ann")
    try:
        replica.end(2)
        replica.machines[2] = StageMachine(2)
        replica.start(2)
        with pytest.raises(StageLost, match="stage 2: it was started again"):
            replica.head.ask("zero")
        replica.lines[1].send(StageMessage(0, "activations", 0, b""))
        with pytest.raises(StageLost, match="stage 2: it was started again"):
            replica.head.next(wait=True)
        replica.head.mend()
        load_replica(replica.head, recipe, tmp_path / "gpt_neox", name="ann")
        assert len(replica.head.ask("zero")) == 3
    finally:
        replica.close()


def test_a_machine_without_memory_for_one_sequence_has_failed(tmp_path: Path, data: Path) -> None:
    """So another can have its place; with more than one at a time the head tries fewer."""
    recipe = staged_recipe(tmp_path, "gpt_neox", data)
    replica = Replica(tmp_path / "gpt_neox", recipe, 3, "ann")

    def full(*_: object) -> None:
        raise MemoryError("none is left")

    try:
        next(filter(holds, layers_of(replica.compute(2)))).register_forward_hook(full)
        trainer = build_staged_peer(replica.head, 2).trainer
        one = Sample(np.arange(8, dtype=np.int32), np.ones(8, bool))
        with pytest.raises(MemoryError, match="stage 2: none is left"):
            trainer.backward([[one, one]], 14)
        with pytest.raises(StageFailed, match="has no memory for one sequence") as met:
            trainer.backward([[one]], 7)
    finally:
        replica.close()
    assert met.value.stage == 2
