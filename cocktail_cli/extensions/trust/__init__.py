"""Trust: updates are scored over rounds, by what they do to the loss at the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocktail_cli.assembly import Extension, UpdateJudge

if TYPE_CHECKING:
    from cocktail_cli.host import RunDelegate

    from .contribution_score import Probe


class Trust(Extension):
    """Harmful peers are refused, useless ones count for less; peers know nothing of it."""

    def judge(self, work: RunDelegate, round: int) -> UpdateJudge:
        from .contribution_score import ProbeThread

        thread = ProbeThread(lambda: load_probe(work, round), lambda peer, what: work.tell(peer, what))
        thread.start()
        return thread


def load_probe(work: RunDelegate, round: int) -> Probe:
    """Build the probe at the global model of `round`; slow."""
    from recipes.data import Corpus
    from recipes.models import load_trained

    from .contribution_score import Probe
    from .keys import Keys

    section = work.recipe.extensions["trust"]
    assert isinstance(section, Keys)
    assert isinstance(work.corpus, Corpus)  # a recipe with both a probe and a stream is refused
    model = load_trained(work.recipe, work.base.folder, quantized=False)
    probe = Probe(model, work.recipe, work.corpus, section.probe_batch_size)
    if round:
        probe.start_from(work.model.load(round).global_model)
    return probe


extension = Trust()
