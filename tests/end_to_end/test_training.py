"""Whole runs with real models: what the swarm computes is what Algorithm 1 says, to the bit on every peer."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from in_process import FAMILIES, Member, Swarm, recipe_of, rows, save_tiny
from transformers import get_cosine_schedule_with_warmup

from recipes.algorithm import GlobalModel
from recipes.config import load_recipe
from recipes.data import collate
from recipes.models import load_model
from recipes.objectives import NextTokens, evaluate, loss_sum
from recipes.training import Event, FlatParameters, StepDone, build_optimizer
from scripts.swarms.processes import wait_for
from transport.protocol import events as hub
from transport.transfer import BandwidthBudget

pytestmark = pytest.mark.slow

EXACT = {"random_ratio": 1.0, "topk_ratio": 1.0, "quant_bits": 32, "staleness": 0}


def plain_pytorch(swarm: Swarm, steps: int) -> torch.Tensor:
    """The same run as anybody would write it: one process, the whole batch. Returns the weights, (P,)."""
    model = swarm.model().train()
    flat = FlatParameters(model)
    optimizer = build_optimizer(flat.masters, swarm.recipe.training)
    batch = swarm.recipe.training.global_batch_size
    for step in range(steps):
        places = range(step * batch, min((step + 1) * batch, len(swarm.corpus)))
        samples = [swarm.corpus.sample(place) for place in places]
        flat.grad.zero_()
        loss, tokens = loss_sum(model, collate(samples))
        (loss / tokens).backward()
        optimizer.step()
    return flat.vector


def test_lossless_and_fresh_sgd_is_synchronous_data_parallel_sgd(
    neox: Path, data: Path, tmp_path: Path
) -> None:
    """Three peers with unequal leases, three shards: the weights of SGD on all of the batch, almost."""
    recipe = recipe_of(
        neox,
        data,
        compression=EXACT | {"shards": 3},
        training={"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "global_batch_size": 7},
    )
    with Swarm(recipe, tmp_path / "run", min_peers=3) as swarm:
        swarm.start("ann", "bob", "cat")
        swarm.finish()
        swarm.audit()

        steps = len(swarm.all(hub.RoundCommitted))
        plain = plain_pytorch(swarm, steps)
        moved = (plain - FlatParameters(swarm.model()).vector).abs().max()
        assert moved > 0.01
        torch.testing.assert_close(swarm.members["ann"].common, plain, rtol=0, atol=float(moved) * 1e-3)
        assert all(torch.equal(swarm.members["ann"].common, one.common) for one in swarm.members.values())


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_run_of_one_peer_trains_like_plain_pytorch(
    neox: Path, data: Path, tmp_path: Path, staleness: int
) -> None:
    """With staleness too: the peer's own steps are in its own model at once, only x' is rounds behind, and
    the last round brings it up.
    """
    exact = EXACT | {"staleness": staleness}
    recipe = recipe_of(neox, data, compression=exact, training={"max_grad_norm": 0.0})
    with Swarm(recipe, tmp_path / "run") as swarm:
        swarm.start("ann")
        swarm.finish()

        plain = plain_pytorch(swarm, len(swarm.all(hub.RoundCommitted)) - min(staleness, 1))
        ours, before = swarm.members["ann"].common, FlatParameters(swarm.model()).vector
        assert (plain - before).abs().max() > 0.01
        # within rounding; Adam makes more of it where a gradient is nearly zero
        assert (ours - plain).norm() < 3e-4 * (plain - before).norm()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_recipe_as_users_write_it_trains_one_peer_like_plain_pytorch(
    tmp_path: Path, staleness: int
) -> None:
    """The recipe `smoke` with its schedule, clipping and AdamW, against a loop that knows nothing of ours."""
    wanted = EXACT | {"staleness": staleness}
    overrides = [f"compression.{key}={json.dumps(value)}" for key, value in wanted.items()]
    overrides += [
        "data.max_length=32",
        "data.val_set_size=2",
        "global_batch_size=6",
        "max_steps=8",
        "training.optim=adamw_torch",
    ]
    with Swarm(load_recipe("smoke", overrides), tmp_path / "run") as swarm:
        swarm.start("ann")
        swarm.finish()

        model, t = swarm.model().train(), swarm.recipe.training
        before = FlatParameters(swarm.model()).vector
        betas = (t.adam_beta1, t.adam_beta2)
        optimizer = torch.optim.AdamW(
            model.parameters(), t.learning_rate, betas, t.adam_epsilon, weight_decay=0
        )
        schedule = get_cosine_schedule_with_warmup(optimizer, int(t.warmup_steps), 8)
        for step in range(8):
            tokens = torch.stack(
                [torch.from_numpy(swarm.corpus.sample(6 * step + i).tokens) for i in range(6)]
            )
            optimizer.zero_grad()
            model(input_ids=tokens.long(), labels=tokens.long()).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), t.max_grad_norm)
            optimizer.step()
            schedule.step()
        plain = FlatParameters(model).vector
        moved = (plain - before).abs().max()
        assert t.weight_decay == 0
        assert moved > 0.01
        ours = swarm.members["ann"].common
        # within rounding; Adam makes more of it where a gradient is nearly zero
        assert (ours - plain).norm() < 3e-4 * (plain - before).norm()


def test_all_peers_hold_the_same_bits_after_every_round_joiners_included(
    neox: Path, data: Path, tmp_path: Path
) -> None:
    """One joins late, one leaves and comes back: equal fingerprints, every sample counted once."""
    recipe = recipe_of(neox, data, compression={"shards": 3}, training={"num_train_epochs": 2})

    with Swarm(recipe, tmp_path / "run", min_peers=2) as swarm:

        def at_round(member: Member, event: Event) -> None:
            if isinstance(event, StepDone) and event.round == 3 and member.name == "ann":
                swarm.start("late")
            if isinstance(event, StepDone) and event.round == 5 and member.name == "bob":
                member.leave()
            if isinstance(event, StepDone) and event.round == 8 and member.name == "ann":
                swarm.start("bob")

        first_bob = swarm.start("ann", "bob", watch=at_round)[1]
        swarm.finish()
        first_bob.join()

        seen: dict[int, set[int]] = {}
        for member in [*swarm.members.values(), first_bob]:
            for step in member.steps:
                seen.setdefault(step.round, set()).add(step.fingerprint)
        assert len(seen) == len(swarm.all(hub.RoundCommitted)) > 20
        assert all(len(fingerprints) == 1 for fingerprints in seen.values())
        assert swarm.members["late"].steps[0].round >= 4
        assert swarm.members["bob"].steps[0].round >= 9
        assert {event.reason for event in swarm.all(hub.PeerLeft) if event.peer == "bob"} >= {
            "left: left on request"
        }
        truth = swarm.folded().view(torch.int32)
        for member in swarm.members.values():
            assert torch.equal(member.common.view(torch.int32), truth)
        swarm.audit()


def test_lines_that_become_thin_in_a_run_give_all_peers_the_same_longer_rounds(
    neox: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p, bits, staleness, decay and H change. Each sample is counted once, one model comes out, and who joins
    then is on the rung of the others.

    What peers measure of their lines is made up here: it has tests of its own, and a busy machine is no line.
    """
    recipe = recipe_of(neox, data, compression={"auto": True}, training={"max_steps": 32})
    with Swarm(recipe, tmp_path / "run", min_peers=2) as swarm:

        def thin(budget: BandwidthBudget, size: int) -> float:
            return 70.0 if len(swarm.all(hub.RoundCommitted)) > 4 else 0.5

        monkeypatch.setattr(BandwidthBudget, "needs", thin)

        def joined(member: Member, event: Event) -> None:
            if isinstance(event, StepDone) and event.local_steps == 2 and "late" not in swarm.members:
                swarm.start("late")
                wait_for(lambda: "late" in [it.peer for it in swarm.all(hub.PeerReady)], "late is ready", 30)

        bob, ann = swarm.prepare("bob"), swarm.prepare("ann")
        swarm.go(bob)
        swarm.go(ann, joined)
        swarm.finish()
        rounds = {event.round: event.local_steps for event in swarm.all(hub.RoundCommitted)}
        for member in swarm.members.values():
            assert torch.equal(member.common, swarm.folded())
            assert all(step.local_steps == rounds[step.round] for step in member.steps)
        swarm.audit()

    assert list(rounds.values())[:15] == [1] * 10 + [2] * 5
    assert set(list(rounds.values())[15:]) == {4}
    assert swarm.members["late"].steps[0].local_steps > 1
    assert [event.step for event in swarm.all(hub.RoundCommitted)][-1] == 32


@pytest.mark.parametrize("worth", [0, 1 << 40], ids=["compiled", "NumPy"])
def test_a_run_takes_any_vector_by_the_loops_of_long_ones_and_of_short_ones(
    worth: int, neox: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is exchanged: the empty first round, deltas, what a leaver hands over, what a joiner folds."""
    monkeypatch.setattr("compress.backends.WORTH", worth)
    with Swarm(recipe_of(neox, data), tmp_path / "run") as swarm:

        def at_round(member: Member, event: Event) -> None:
            if isinstance(event, StepDone) and event.round == 3 and member.name == "ann":
                swarm.start("late")
                member.leave()

        swarm.start("ann", watch=at_round)
        swarm.finish()

        fingerprints = [step.fingerprint for step in swarm.members["ann"].steps]
        assert len(set(fingerprints)) >= 3, "the first round changes nothing, the others do"
        truth = swarm.folded().view(torch.int32)
        assert torch.equal(swarm.members["late"].common.view(torch.int32), truth)
        assert swarm.all(hub.PeerLeft)[0].legacy > 0
        swarm.audit()


def test_the_exchange_of_a_round_spans_the_whole_compute_of_that_round(
    neox: Path, data: Path, tmp_path: Path
) -> None:
    """Sent before the first micro-batch, awaited after the last, joined before the next round."""
    with Swarm(recipe_of(neox, data), tmp_path / "run", min_peers=2) as swarm:
        for member in swarm.start("ann", "bob"):
            member.peer.micro_batch = 1
        swarm.finish()

        for member in swarm.members.values():
            with_work = [step for step in member.steps if step.compute_started is not None]
            assert len(with_work) == 10
            for step, following in pairwise(with_work):
                assert step.exchange_started <= step.compute_started
                assert max(step.exchange_finished, step.compute_finished) < following.exchange_started


def test_both_directions_are_compressed_and_staleness_is_one_round(
    neox: Path, data: Path, tmp_path: Path
) -> None:
    """The first round's packets are empty; the second delivers the first lease; a last one drains."""
    with Swarm(recipe_of(neox, data), tmp_path / "run", min_peers=2) as swarm:
        swarm.start("ann", "bob")
        events = swarm.finish()

        commits = [event for event in events if isinstance(event, hub.RoundCommitted)]
        fp16 = 2 * swarm.work.parameters
        assert commits[0].tokens == 0
        assert all(commit.tokens > 0 for commit in commits[1:])
        assert commits[-1].step == commits[-1].steps == len(commits) - 1
        for commit in commits[1:]:
            assert fp16 / commit.size > 60
            assert all(fp16 / size > 60 for size in commit.packets.values())


def test_a_peer_whose_model_differs_is_dropped_by_name_and_the_run_goes_on(
    neox: Path, data: Path, tmp_path: Path
) -> None:
    with Swarm(recipe_of(neox, data), tmp_path / "run", min_peers=2) as swarm:

        def flip_a_bit(member: Member, event: Event) -> None:
            if isinstance(event, StepDone) and event.round == 3:
                common: GlobalModel = member.peer.worker.global_model
                common.vector.view(torch.int32)[7] ^= 1
                common.fingerprint = GlobalModel(common.vector, common.compressor, common.seed).fingerprint

        swarm.start("ann", "cat")
        swarm.start("mallory", watch=flip_a_bit)
        events = swarm.wait()

        ended = events[-1]
        assert isinstance(ended, hub.RunEnded)
        assert ended.finished
        removed = {e.peer: e.reason for e in events if isinstance(e, hub.PeerLeft) and e.how == "removed"}
        assert removed.keys() == {"mallory"}
        assert "is not the one of the run" in removed["mallory"]


KINDS = {
    "text": lambda text: {"text": text},
    "prompt_completion": lambda text: {"prompt": text[:20], "completion": text[20:]},
    "chat": lambda text: {
        "messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:]}]
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_jsonl_of_any_known_kind_is_trained_on(kind: str, neox: Path, tmp_path: Path) -> None:
    """And only what should be: of a prompt nothing, of a chat the assistant's words."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(KINDS[kind](text)) + "\n" for text in rows(30)))
    recipe = recipe_of(neox, data, training={"learning_rate": 1e-2})
    with Swarm(recipe, tmp_path / "run") as swarm:
        swarm.start("ann")
        swarm.finish()

        losses = [event.loss for event in swarm.all(hub.EvaluationDone)]
        assert losses[-1] < losses[0]
        shares = {sample.count / len(sample.tokens) for sample in swarm.corpus.samples}
        assert (min(shares) > 0.9) == (kind == "text")
        swarm.audit()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_exports_what_was_measured(family: str, data: Path, tmp_path: Path) -> None:
    """The exported folder loads with from_pretrained and has the loss that the run told for x'."""
    recipe = recipe_of(save_tiny(family, tmp_path / "model"), data, training={"learning_rate": 1e-2})
    with Swarm(recipe, tmp_path / "run", min_peers=2) as swarm:
        swarm.start("ann", "bob")
        swarm.finish()

        losses = [event.loss for event in swarm.all(hub.EvaluationDone)]
        assert losses[-1] < losses[0]
        exported = load_model(swarm.export(tmp_path / "exported"))
        found = evaluate(NextTokens(), exported, swarm.corpus.held_out, 3)
        assert found.mean == pytest.approx(losses[-1], rel=1e-5)
        swarm.audit()
