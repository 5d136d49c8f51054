"""A late joiner with a real model: by the base or by a snapshot it holds the x' of the run to the bit."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Any

import pytest
import torch
from in_process import Member, Swarm, recipe_of, rows, save_tiny
from safetensors.torch import save_file

from cocktail_cli.host import CommittedModel, versions
from cocktail_cli.machine import cache
from cocktail_cli.ui import Event, Progressed
from cocktail_cli.volunteer import Bootstrap, VolunteerLimits
from cocktail_cli.volunteer.run_link import RunLink
from compress import PACKET_VERSION
from recipes.training import StepDone, finetune
from transport import RunSettings
from transport.membership import refusal
from transport.peer import CatchUpSource
from transport.protocol import RefusedByHub, messages
from transport.transfer import block_hashes

AT = 4  # round of the snapshot


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCKTAIL_HOME", str(tmp_path / "home"))


@contextmanager
def in_the_middle(folder: Path, family: str = "gpt2_tied", **sections: Any) -> Iterator[tuple[Swarm, Flag]]:
    """A run whose only peer has paused after six rounds, until the flag is set."""
    data = folder / "data.txt"
    data.write_text("\n".join(rows(60)))
    recipe = recipe_of(save_tiny(family, folder / "model"), data, **sections)
    paused, go_on = Flag(), Flag()

    def watch(member: Member, event: object) -> None:
        if isinstance(event, StepDone) and event.round == 5:
            paused.set()
            assert go_on.wait(120)

    with Swarm(recipe, folder) as swarm:
        swarm.start("ann", watch=watch)
        assert paused.wait(120)
        try:
            yield swarm, go_on
        finally:
            go_on.set()


def offer_snapshot(swarm: Swarm, folder: Path) -> messages.SnapshotOffer:
    """x' of round AT as the hub will write it, offered."""
    x = CommittedModel(swarm.recipe, swarm.base.folder, swarm.folder).load(AT)
    file = folder / "snapshot.safetensors"
    tensors = dict(zip(x.layout.names, x.layout.views(x.global_model.vector), strict=True))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, {"format": "pt"})
    return offer(swarm, file)


def offer(swarm: Swarm, file: Path) -> messages.SnapshotOffer:
    name, hashes = f"snapshot/{AT}/model.safetensors", block_hashes(file)
    swarm.work.files[name] = file
    swarm.work.hashes[f"hashes/{name}"] = hashes
    before = swarm.memory.ledger.rounds()[AT].offset
    offered = messages.SnapshotOffer(AT, file.stat().st_size, hashlib.sha256(hashes).hexdigest(), before)
    swarm.memory.hub.offer([offered])
    return offered


def preparation(swarm: Swarm, told: list[Event], name: str = "bob") -> Bootstrap:
    link = swarm.memory.link(name)
    link.connect(30.0)
    return Bootstrap(link, VolunteerLimits(name, ["cpu"], 2), told.append, nullcontext)


@pytest.mark.parametrize("way", [CatchUpSource.BASE, CatchUpSource.SNAPSHOT])
def test_a_late_joiner_holds_x_to_the_bit_and_trains_to_the_end(tmp_path: Path, way: CatchUpSource) -> None:
    told: list[Event] = []
    with in_the_middle(tmp_path) as (swarm, go_on):
        if way is CatchUpSource.SNAPSHOT:
            offer_snapshot(swarm, tmp_path)
        joining = preparation(swarm, told)
        prepared = joining.carry_out()
        common = prepared.peer.worker.global_model
        truth = CommittedModel(swarm.recipe, swarm.base.folder, swarm.folder).load(common.round).global_model
        assert (joining.machine.plan.way, common.round) == (way, 6)
        assert torch.equal(common.vector, truth.vector)
        assert common.fingerprint == truth.fingerprint
        link = RunLink(joining.link, joining.spool)
        link.knows(prepared.bounds)
        link.holds = prepared.holds
        thread = Thread(target=lambda: list(finetune(link, prepared.peer, common.round)))
        thread.start()
        go_on.set()
        swarm.finish()
        thread.join(120)
        assert torch.equal(prepared.peer.worker.global_model.vector, swarm.folded())
        swarm.audit()

    assert sorted(prepared.holds) == (
        ["base", "recipe", "tokenizer"] if way is CatchUpSource.BASE else ["recipe", "tokenizer"]
    )
    assert not (cache() / "snapshots").exists() or not list((cache() / "snapshots").iterdir())
    states = [event.state for event in told if isinstance(event, Progressed)]
    assert states[-1] == f"caught up to round 6 with {6 if way is CatchUpSource.BASE else 2} packets"
    assert f"fetching the {way.value}" in states


@pytest.mark.parametrize("way", [CatchUpSource.BASE, CatchUpSource.SNAPSHOT])
def test_a_joiner_of_a_run_of_adapters_needs_the_base_whatever_the_way(
    tmp_path: Path, way: CatchUpSource
) -> None:
    lora, told = {"lora_r": 4, "lora_dropout": 0.0}, list[Event]()
    all_of_it = {"random_ratio": 1.0, "topk_ratio": 1.0, "quant_bits": 32}  # packets as long as adapters
    with in_the_middle(tmp_path, "gpt_neox", lora=lora, compression=all_of_it) as (swarm, _):
        if way is CatchUpSource.SNAPSHOT:
            offer(swarm, adapters_of(swarm, tmp_path))
        joining = preparation(swarm, told)
        prepared = joining.carry_out()
        common = prepared.peer.worker.global_model
        truth = CommittedModel(swarm.recipe, swarm.base.folder, swarm.folder).load(common.round).global_model

        assert (joining.machine.plan.way, common.round) == (way, 6)
        assert torch.equal(common.vector, truth.vector)
        assert torch.equal(prepared.peer.worker.x, truth.vector)
        assert sorted(prepared.holds) == ["base", "recipe", "tokenizer"]
        assert joining.downloads.bytes >= (swarm.base.folder / "model.safetensors").stat().st_size


def adapters_of(swarm: Swarm, folder: Path) -> Path:
    """x' of round AT as a snapshot has it."""
    (folder / "snapshot").mkdir()
    with swarm.work.model.fold(AT) as fold:
        fold.write(folder / "snapshot")
    return folder / "snapshot" / "adapter_model.safetensors"


def test_a_base_that_is_not_the_runs_is_refused_with_both_hashes(tmp_path: Path) -> None:
    with in_the_middle(tmp_path) as (swarm, _):
        joining = preparation(swarm, [])
        prepared = joining.carry_out()
        other = {**prepared.holds, "base": "12" * 32}
        joining.link.ready(6, prepared.peer.worker.global_model.fingerprint, other)
        with pytest.raises(RefusedByHub, match="base weights: you have 121212121212, the run has") as refused:
            joining.link.next_round()

    assert refused.value.code == "state"


def test_a_cached_base_that_was_damaged_is_mended_before_it_is_loaded(tmp_path: Path) -> None:
    with in_the_middle(tmp_path) as (swarm, _):
        first = preparation(swarm, [])
        first.carry_out()
        weights = first.folder / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-100] ^= 0x10
        weights.write_bytes(data)
        second = preparation(swarm, [], "cem")
        wanted = second.downloads.bytes
        peer = second.carry_out().peer
        truth = CommittedModel(swarm.recipe, swarm.base.folder, swarm.folder).load(6).global_model

    assert wanted == second.link.welcome.log_bytes, "by its size it is there"
    assert torch.equal(peer.worker.global_model.vector, truth.vector)


def test_a_peer_of_another_codec_is_refused_with_both_versions() -> None:
    settings = RunSettings("run", "{}", "00", 1, 1, versions={"codec": "99"})
    refused = refusal(
        messages.Hello(messages.PROTOCOL, "t", "run", "bob", "", versions()),
        settings,
        "t",
        over=False,
        peers=0,
    )

    assert refused == messages.Refused("version", f"codec: you have {PACKET_VERSION}, the run has 99")
