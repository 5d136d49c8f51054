"""Packed documents: none is lost, and to the model each is alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_config, tiny_model

from recipes.config import Data, load_recipe
from recipes.data import Sample, collate, pack_samples, unpack_samples
from recipes.data.tokenization import TokenizedDocument, make_samples
from recipes.errors import ModelError
from recipes.models import check_fit, check_packing_isolation
from recipes.models.causal_lm import visible_in
from recipes.objectives import logits_of, loss_sum
from recipes.training import build_peer

KEPT_APART = [
    (kind, attention)
    for kind in ("gpt_neox", "gptj", "llama", "mistral", "qwen2", "qwen3")
    for attention in ("eager", "sdpa")
    if (kind, attention) != ("gptj", "sdpa")  # there is none
]


def document(*tokens: int, prompt: int = 0) -> TokenizedDocument:
    return TokenizedDocument(np.array(tokens), np.arange(len(tokens)) >= prompt)


def packed(*lengths: int) -> Sample:
    """A sample of documents of these lengths, all their tokens different."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    trained = np.ones(len(tokens), dtype=bool)
    trained[np.cumsum((0, *lengths[:-1]))] = False
    return Sample(tokens, trained, lengths if len(lengths) > 1 else ())


def alone(sample: Sample) -> list[Sample]:
    """Each of its documents as a sample."""
    ends = np.cumsum(sample.lengths)
    return [
        Sample(sample.tokens[end - n : end], sample.trained[end - n : end])
        for n, end in zip(sample.lengths, ends, strict=True)
    ]


@pytest.mark.parametrize(("kind", "attention"), KEPT_APART)
def test_packed_documents_have_the_logits_and_the_loss_of_documents_alone(kind: str, attention: str) -> None:
    """A shorter sample is in the same batch, so that there is padding."""
    model, samples = tiny_model(kind, attention=attention), [packed(7, 1, 12, 5), packed(3, 9), packed(4)]

    with torch.no_grad():
        logits = logits_of(model, collate(samples))
        loss, count = loss_sum(model, collate(samples))
        singles = [[logits_of(model, collate([one]))[0] for one in alone(sample)] for sample in samples]
        losses = [loss_sum(model, collate([one])) for sample in samples for one in alone(sample)]

    for row, sample, parts in zip(logits, samples, singles, strict=True):
        torch.testing.assert_close(row[: len(sample.tokens)], torch.cat(parts), atol=2e-4, rtol=2e-4)
    assert float(loss) == pytest.approx(sum(float(part) for part, _ in losses), rel=1e-4)
    assert count == sum(number for _, number in losses) == 41 - 7
    assert not visible_in(model).documents


@pytest.mark.parametrize("kind", ["bloom", "falcon", "mpt", "opt"])
def test_a_class_that_lets_documents_see_each_other_is_reported_by_hub_and_peer(
    kind: str, tmp_path: Any
) -> None:
    model = tiny_model(kind)
    tiny_config(kind, 320).save_pretrained(tmp_path)
    recipe = load_recipe("smoke", ["packing_strategy=bfd"])

    with pytest.raises(ModelError, match="lets packed documents attend to each other"):
        check_fit(recipe, tmp_path)
    with pytest.raises(ModelError, match="lets packed documents attend to each other"):
        build_peer(model, recipe, 1)


def test_flash_attention_is_given_one_long_row_since_it_looks_for_documents_in_no_more() -> None:
    met: list[Any] = []

    class Echo(torch.nn.Module):
        config = SimpleNamespace(_attn_implementation="flash_attention_2")

        def forward(self, input_ids: Any, position_ids: Any, use_cache: bool) -> Any:
            met.append((input_ids.tolist(), position_ids.tolist(), use_cache))
            return SimpleNamespace(logits=input_ids[..., None].float())

    logits = logits_of(Echo(), collate([packed(2, 3), packed(2, 1)]))

    assert met == [([[1, 2, 3, 4, 5, 1, 2, 3, 0, 0]], [[0, 1, 0, 1, 2, 0, 1, 0, 0, 1]], False)]
    assert logits[..., 0].tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]


# ---- how documents become samples ----------------------------------------------------------------


@pytest.mark.slow  # importing trl and datasets takes seconds
def test_best_fit_packing_cuts_or_splits_what_is_too_long_and_loses_nothing_else() -> None:
    documents = [document(*range(100 * n, 100 * n + n), prompt=2) for n in (3, 9, 20, 5, 12, 1)]

    cut = make_samples(documents, Data(max_length=12, packing=True))
    split = make_samples(documents, Data(max_length=12, packing=True, packing_strategy="bfd_split"))

    assert sorted(s.lengths for s in cut.samples) == [(5, 1), (9, 3), (12,), (12,)]
    assert [t for s in cut.samples for t in s.tokens if t >= 2000] == list(range(2000, 2012))
    assert (cut.dropped.truncated, cut.dropped.tokens, cut.dropped.longest) == (1, 8, 20)
    assert sorted(t for s in split.samples for t in s.tokens) == sorted(
        t for d in documents for t in d.tokens
    )
    assert split.dropped.truncated == split.dropped.tokens == 0
    for sample in (*cut.samples, *split.samples):
        assert not any(part.trained[0] for part in alone(sample))
        for part in alone(sample):
            assert part.trained[1:].tolist() == [t % 100 >= 2 for t in part.tokens[1:]]


def test_a_packed_sample_comes_out_of_its_bytes_with_its_documents_and_costs_four_bytes_for_each() -> None:
    samples = [packed(7, 1, 12), packed(4), packed(2, 2)]

    data = pack_samples(samples)

    assert [s.documents for s in unpack_samples(data)] == [(7, 1, 12), (), (2, 2)]
    assert [s.trained.tolist() for s in unpack_samples(data)] == [s.trained.tolist() for s in samples]
    assert len(data) == 10 + 4 * 3 + 4 * 6 + 2 * 28


def test_a_model_that_keeps_documents_apart_is_let_through() -> None:
    check_packing_isolation(tiny_model("gpt_neox"))


def test_each_sequence_is_cut_and_a_sample_with_one_that_teaches_nothing_is_left_out() -> None:
    """The prompt of 4 tokens fills a max_length of 4, as in TRL; counts name the document once."""
    document = TokenizedDocument(np.arange(13), np.array([0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]) > 0, (7, 6))
    data = load_recipe("smoke", ["packing=false"]).data

    whole, cut, gone = (
        make_samples([document], data.model_copy(update={"max_length": length})) for length in (7, 5, 4)
    )

    assert whole.samples[0].lengths == (7, 6)
    assert whole.dropped.truncated == 0
    assert (cut.samples[0].lengths, cut.samples[0].tokens.tolist()) == (
        (5, 5),
        [0, 1, 2, 3, 4, 7, 8, 9, 10, 11],
    )
    assert (cut.dropped.truncated, cut.dropped.longest, cut.samples[0].count) == (1, 7, 2)
    assert gone.samples == []
    assert gone.dropped.samples == 1
    [back] = unpack_samples(pack_samples(cut.samples))
    assert (back.lengths, back.trained.tolist()) == ((5, 5), cut.samples[0].trained.tolist())
