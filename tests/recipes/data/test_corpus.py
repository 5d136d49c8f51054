"""The corpus: what becomes a sample, what of it is trained, in which order it is seen, and how it travels."""

import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.config import load_recipe
from recipes.data import (
    Sample,
    SampleLimits,
    batches,
    build_corpus,
    collate,
    pack_samples,
    shuffled_order,
    unpack_samples,
)
from recipes.errors import DataError


def read(tokenizer: Any, sample: Sample) -> tuple[str, str]:
    """(the whole sample, its trained part) as text."""
    return tokenizer.decode(sample.tokens), tokenizer.decode(sample.tokens[sample.trained])


# ---- kinds of rows -------------------------------------------------------------------------------


def test_text_is_trained_whole_but_for_its_first_token_and_ends_with_the_end_token(
    corpus_of, tokenizer
) -> None:
    corpus = corpus_of([{"text": "Hello there."}])
    [sample] = corpus.samples

    assert read(tokenizer, sample)[0] == "Hello there.<|endoftext|>"
    assert sample.trained.tolist() == [False] + [True] * (len(sample.tokens) - 1)
    assert corpus.found[0].endswith("my.jsonl: 1 rows, detected text")


def test_of_prompt_and_completion_the_completion_is_trained(corpus_of, tokenizer) -> None:
    rows = [{"prompt": "Two and two is", "completion": " four."}]

    [sample] = corpus_of(rows).samples
    [whole] = corpus_of(rows, "completion_only_loss=false").samples

    assert read(tokenizer, sample) == ("Two and two is four.<|endoftext|>", " four.<|endoftext|>")
    assert whole.count == len(whole.tokens) - 1


def test_a_token_that_joins_prompt_and_completion_is_trained(corpus_of, tokenizer) -> None:
    assert tokenizer.tokenize("a the") == ["a", "Ġthe"]  # what makes the case: "a t" has another second token

    [sample] = corpus_of([{"prompt": "a t", "completion": "he end"}]).samples

    assert read(tokenizer, sample) == ("a the end<|endoftext|>", " the end<|endoftext|>")


def test_alpaca_rows_become_a_prompt_and_the_output_is_trained(corpus_of, tokenizer) -> None:
    rows = [{"instruction": "Add.", "input": "2 2", "output": "4"}, {"instruction": "Sing.", "output": "La"}]

    first, second = (read(tokenizer, s) for s in corpus_of(rows, "max_length=512").samples)

    assert "### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n4" in first[0]
    assert first[1] == "4<|endoftext|>"
    assert "### Input" not in second[0]
    assert second[1] == "La<|endoftext|>"


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


@pytest.mark.parametrize(
    ("template", "text", "trained"),
    [
        ("plain", "User: Hi\nAssistant: Yes<|endoftext|>\n", "Yes<|endoftext|>"),
        (
            "chatml",
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|><|endoftext|>\n",
            "Yes<|im_end|><|endoftext|>",
        ),
        ("alpaca", "### Instruction:\nHi\n\n### Response:\nYes<|endoftext|>\n\n", "Yes<|endoftext|>"),
    ],
)
def test_of_a_chat_the_assistants_words_are_trained(corpus_of, tokenizer, template, text, trained) -> None:
    [sample] = corpus_of([{"messages": CHAT}], f"chat_template={template}", "max_length=256").samples

    assert read(tokenizer, sample) == (text, trained)


def test_all_of_a_chat_is_trained_when_asked_for(corpus_of) -> None:
    [sample] = corpus_of([{"messages": CHAT}], "assistant_only_loss=false").samples

    assert sample.count == len(sample.tokens) - 1


def test_a_chat_without_a_template_uses_plain_and_says_so_and_the_tokenizer_keeps_it(
    corpus_of, tokenizer
) -> None:
    corpus = corpus_of([{"messages": CHAT * 2}])

    assert any("no chat template" in warning for warning in corpus.warnings)
    assert "Assistant: " in tokenizer.chat_template
    assert read(tokenizer, corpus.samples[0])[1] == "Yes<|endoftext|>Yes<|endoftext|>"


def test_sharegpt_names_are_known(corpus_of, tokenizer) -> None:
    theirs = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]

    [ours] = corpus_of([{"messages": CHAT}]).samples
    [sample] = corpus_of([{"conversations": theirs}]).samples
    [mapped] = corpus_of([{"talk": theirs}], "datasets.0.column_map={messages: talk}").samples

    assert sample.tokens.tolist() == mapped.tokens.tolist() == ours.tokens.tolist()


def test_tokens_are_taken_as_they_are_and_trained_where_labels_or_masks_say(corpus_of) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8]},
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 0, 1], "assistant_masks": None},
    ]

    corpus = corpus_of(rows)

    assert [s.tokens.tolist() for s in corpus.samples] == [[5, 6, 7, 8]] * 3
    assert [s.trained.tolist() for s in corpus.samples] == [
        [False, True, True, True],
        [False, False, True, True],
        [False, False, False, True],
    ]
    assert corpus.found[0].endswith("3 rows, detected tokenized")
    assert corpus_of(rows[2:], "completion_only_loss=false").samples[0].count == 3


PADDING = {"right": ([5, 6, 7, 0, 0], [1, 1, 1, 0, 0]), "left": ([0, 0, 5, 6, 7], [0, 0, 1, 1, 1])}


@pytest.mark.parametrize("side", PADDING)
def test_padding_of_rows_is_neither_trained_nor_read(corpus_of, side: str) -> None:
    ids, mask = PADDING[side]
    row = {"input_ids": ids, "attention_mask": mask}

    for labels in ({}, {"labels": ids}, {"labels": [-100 if t in (0, 5) else t for t in ids]}):
        [sample] = corpus_of([row | labels]).samples
        assert sample.tokens.tolist() == [5, 6, 7]
        assert sample.trained.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("first", "later", "unused"),
    [
        ({"messages": CHAT}, {"messages": CHAT, "system": "Be kind.", "id": 7, "score": None}, "system, id"),
        ({"conversations": CHAT}, {"messages": CHAT, "conversations": CHAT}, "conversations"),
        ({"text": "a"}, {"text": "a", "completion": "b"}, "completion"),
        ({"instruction": "a", "output": "b"}, {"instruction": "a", "output": "b", "history": []}, "history"),
        ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "position_ids": [0, 1]}, "position_ids"),
    ],
)
def test_columns_of_any_row_are_used_or_named(
    corpus_of, monkeypatch, first: dict[str, Any], later: dict[str, Any], unused: str
) -> None:
    for processes in (1, 2):
        monkeypatch.setattr("recipes.data.tokenization.ProcessPoolExecutor", threads)
        corpus = corpus_of([first, first, later], f"dataset_num_proc={processes}", "max_length=256")
        assert corpus.found[0].endswith(f" (not used: {unused})")


def test_special_tokens_that_come_twice_are_a_warning(corpus_of, tokenizer) -> None:
    end = tokenizer.eos_token
    hello = {"role": "assistant", "content": f"Hello{end}"}

    for row in ({"text": f"a{end}{end}"}, {"messages": [CHAT[0], hello]}, {"input_ids": [5, 6, 0, 0]}):
        [warning] = [one for one in corpus_of([row, row]).warnings if "twice" in one]
        assert f"my.jsonl:1: `{end}` comes twice in a row" in warning
    assert not any(
        "twice" in one for one in corpus_of([{"text": f"a{end}"}, {"messages": CHAT}][:1]).warnings
    )


def test_a_message_whose_text_has_a_special_token_is_a_warning(corpus_of, tokenizer) -> None:
    asks = {"role": "user", "content": f"What is {tokenizer.eos_token}?"}

    for messages, times in (([asks, CHAT[1]], 1), (CHAT, 0)):
        said = " ".join(corpus_of([{"messages": messages}] * 2).warnings)
        assert said.count(f"my.jsonl:1: `{tokenizer.eos_token}` in a message's text") == times


def test_an_empty_answer_and_texts_without_an_end_are_warnings(corpus_of, tokenizer) -> None:
    for row in ({"prompt": "a", "completion": ""}, {"instruction": "a", "output": " "}):
        [warning] = [one for one in corpus_of([row, row], "max_length=256").warnings if "empty answer" in one]
        assert "my.jsonl:1: an empty answer" in warning
    tokenizer.eos_token = None
    assert any("learns no end" in one for one in corpus_of([{"text": "Many words here."}]).warnings)


def test_a_hint_names_the_data_set_that_it_is_about(corpus_of, tmp_path) -> None:
    with pytest.raises(DataError) as caught:
        corpus_of([{"text": "ab"}], f"eval_datasets=[{{path: {tmp_path}/my.jsonl, split: nosuch}}]")

    assert caught.value.hint.startswith("eval_datasets.0.split=train")


@pytest.mark.parametrize(
    "row", [{"text": "a</new>"}, {"prompt": "</new>", "completion": "a"}, {"messages": CHAT}]
)
def test_a_row_with_a_token_beyond_the_embedding_is_reported_and_no_other(
    tmp_path, corpus_of, tokenizer, row: dict[str, Any]
) -> None:
    corpus_of([row, row])
    path, known = tmp_path / "my.jsonl", len(tokenizer)
    tokenizer.add_tokens(["</new>"])
    tokenizer.chat_template = MARKLESS + "</new>"
    recipe = load_recipe(tmp_path / "bare.yaml", data=str(path))

    with pytest.raises(DataError, match=r"my.jsonl:1: token 320, `</new>`, is beyond the model's embedding"):
        build_corpus(recipe, tokenizer, vocabulary=known)
    assert len(build_corpus(recipe, tokenizer, vocabulary=known + 1).samples) == 2
    path.write_text('{"text": "a"}\n')
    assert len(build_corpus(recipe, tokenizer, vocabulary=known).samples) == 1


def threads(count: int, context: object, begin: Any, sent: Any) -> ThreadPoolExecutor:
    """Stand in for processes: what those are sent is sent, and threads start in no time."""
    return ThreadPoolExecutor(count, "process", begin, pickle.loads(pickle.dumps(sent)))


def test_several_processes_come_to_what_one_comes_to(corpus_of, monkeypatch) -> None:
    monkeypatch.setattr("recipes.data.tokenization.ProcessPoolExecutor", threads)
    monkeypatch.setattr("recipes.data.corpus.BATCH", 2)
    rows = [{"messages": [CHAT[0], {"role": "assistant", "content": str(i)}]} for i in range(5)]

    one, two = corpus_of(rows), corpus_of(rows, "dataset_num_proc=2")

    assert one.digest() == two.digest()


MARKLESS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_rewrites_earlier_messages_is_refused_rather_than_masked_wrongly(
    corpus_of, tokenizer
) -> None:
    tokenizer.chat_template = "{{ messages[-1].content }}" + MARKLESS

    with pytest.raises(DataError, match=r"my.jsonl:1: .* rewrites earlier messages"):
        corpus_of([{"messages": CHAT * 2}])


def test_answers_that_are_samples_of_their_own_are_held_out_with_their_conversation(
    corpus_of, tokenizer
) -> None:
    tokenizer.chat_template = "{{ messages | length }}" + MARKLESS
    rows = [{"messages": [{**message, "content": f"{n}."} for message in CHAT * 3]} for n in range(4)]

    corpus = corpus_of(rows, "val_set_size=1", "max_length=256")

    trained, held = (
        [read(tokenizer, one)[1].partition(".")[0] for one in part]
        for part in (corpus.samples, corpus.held_out)
    )
    assert sorted(trained + held) == [str(n) for n in range(4) for _ in range(3)]
    assert len(held) == 3
    assert len({*held}) == 1


def test_columns_can_be_renamed(corpus_of, tokenizer) -> None:
    rows = [{"q": "One?", "a": " Two."}]

    [sample] = corpus_of(rows, "datasets.0.column_map={prompt: q, completion: a}").samples
    [text] = corpus_of(rows, "datasets.0.column_map={text: q}").samples
    [spaced] = corpus_of([{" q ": "One?"}], 'datasets.0.column_map.text=" q "').samples

    assert read(tokenizer, sample) == ("One? Two.<|endoftext|>", " Two.<|endoftext|>")
    assert read(tokenizer, text)[0] == read(tokenizer, spaced)[0] == "One?<|endoftext|>"


# ---- length --------------------------------------------------------------------------------------


def test_long_rows_are_cut_and_counted(corpus_of) -> None:
    corpus = corpus_of([{"text": "x" * 100}, {"text": "short"}], "max_length=16")

    assert len(corpus.samples[0].tokens) == 16
    assert corpus.warnings[0].endswith("my.jsonl: only 2 rows: the model will learn them by heart")
    assert corpus.warnings[1:] == (
        "1 rows (50.0 %) longer than max_length 16 were cut (the longest has 101 tokens)",
    )


def test_a_row_whose_trained_part_was_cut_away_is_left_out_and_counted(corpus_of) -> None:
    corpus = corpus_of(
        [{"prompt": "x" * 100, "completion": "y"}, {"prompt": "a", "completion": "b"}], "max_length=16"
    )

    assert len(corpus.samples) == 1
    assert "1 samples have no token to train on and are left out" in corpus.warnings


def test_nothing_to_train_on_is_an_error(corpus_of) -> None:
    with pytest.raises(DataError, match="no sample has a token to train on"):
        corpus_of([{"prompt": "x" * 100, "completion": "y"}], "max_length=16")


def test_wrapped_packing_loses_no_token_and_fills_every_block_but_the_last(corpus_of) -> None:
    rows = [{"text": f"Row {i} of many."} for i in range(20)]

    loose = corpus_of(rows)
    packed = corpus_of(rows, "packing=true", "packing_strategy=wrapped", "max_length=32")

    assert {len(s.tokens) for s in packed.samples[:-1]} == {32}
    assert [t for s in packed.samples for t in s.tokens] == [t for s in loose.samples for t in s.tokens]


# ---- what is wrong with data ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "my.jsonl: the data set is empty"),
        ("\n \n", "my.jsonl: the data set is empty"),
        ('{"text": "a"}\n{"text": "b"\n', "my.jsonl:2: not valid JSON: Expecting ',' delimiter at column 1"),
        ('{"text": "a"}\n\n[1]\n', "my.jsonl:3: each row must be an object with named fields, not a list"),
        ('{"text": "a"}\n{"txt": "b"}\n', "my.jsonl:2: no field `text`; there is txt"),
        ('{"text": "a"}\n{"text": 3}\n', "my.jsonl:2: field `text` must be text, not int"),
        ('{"text": "a"}\n{"text": null}\n', "my.jsonl:2: field `text` must be text, not null"),
        ('{"text": "a"}\n{"text": "\\ud800"}\n', "my.jsonl:2: field `text` holds half a character at 0"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "my.jsonl:2: not UTF-8 text: invalid start byte at byte 10"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', "my.jsonl:2: no field `completion`"),
        ('{"input_ids": [1, 320]}\n', "my.jsonl:1: token ids must be 0 to 319, there are 1 to 320"),
        ('{"input_ids": []}\n', "my.jsonl:1: token ids must be 0 to 319, there are none"),
        ('{"input_ids": ["a"]}\n', "my.jsonl:1: `input_ids` must be a list of whole numbers"),
        ('{"input_ids": [[1], [2, 3]]}\n', "my.jsonl:1: `input_ids` must be a list of whole numbers"),
        ('{"input_ids": [1, 2], "labels": [1]}\n', "my.jsonl:1: 2 input_ids and 1 `labels`"),
        ('{"input_ids": [1, 2], "labels": [2, -100]}\n', "my.jsonl:1: `labels` must be -100 or the token"),
        ('{"input_ids": [1, 2], "completion_mask": [0, 5]}\n', "my.jsonl:1: `completion_mask` must be 0"),
        ('{"input_ids": [1, 2], "attention_mask": [1]}\n', "my.jsonl:1: 2 input_ids and 1 `attention_mask`"),
        ('{"input_ids": [1, 2], "attention_mask": [0, 0]}\n', "must be 0 to 319, there are none"),
        ('{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}\n', "attention_mask must be 0 before"),
        ('{"messages": "[]"}\n', "`messages` must be a list of messages with at least one, not JSON text"),
        ('{"messages": []}\n', "my.jsonl:1: `messages` must be a list of messages with at least one"),
        ('{"messages": [3]}\n', "my.jsonl:1: message 0 must be an object with role and content"),
        ('{"messages": [{"role": "user"}]}\n', "my.jsonl:1: message 0: no field `content`; there is role"),
        ('{"x": 1, "y": 2}\n', "my.jsonl:1: columns x, y are no known kind of data"),
        ('{"q": "a", "a": "b"}\n', "column_map.prompt=q datasets.0.column_map.completion=a)"),
        ('{"Frage": "a", "Antwort": "b"}\n', "prompt=Frage datasets.0.column_map.completion=Antwort)"),
        ('{" text ": "a"}\n', """'datasets.0.column_map.text=" text "')"""),
        ('{"my text": "a", "b c": "d"}\n', "'datasets.0.column_map.completion=b c')"),
        ('{"text": "a"}\n{"text": "a", "text": "b"}\n', "my.jsonl:2: not valid JSON: an object has the key"),
        (
            '{"messages": [{"role": "user", "role": "tool"}]}\n',
            "my.jsonl:1: not valid JSON: an object has the key `role`",
        ),
        ('{"messages": [{"from": "human", "value": "a", "content": "b"}]}\n', "message 0: two keys hold"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "tools": "[{\\"a\\": 1, \\"a\\": 2}]"}\n',
            "my.jsonl:1: `tools` is not valid JSON: an object has the key `a` twice",
        ),
        ('{"instruction": "a", "input": 0, "output": "b"}\n', "my.jsonl:1: field `input` must be text"),
        ('{"data": [{"text": "a"}]}\n', "rows within `data` are not found"),
        ('{"role": "user", "content": "a"}\n', "a row is a whole conversation"),
        (
            '{"prompt": "a", "completion": "b", "label": false}\n',
            "my.jsonl:1: `label` false calls this answer",
        ),
    ],
)
def test_a_broken_line_is_reported_with_file_and_line(corpus_of, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError) as caught:
        corpus_of(text)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./missing.jsonl", "./missing.jsonl: no such file or folder"),
        ("missing/*.jsonl", "missing/*.jsonl: no such file or folder"),
        ("builtin:poems", "no builtin data `builtin:poems`; there is builtin:python-docs"),
        ("http://example.org/x.jsonl", "data are files here, hub ids, or at https"),
    ],
)
def test_data_that_is_not_there_is_reported(tokenizer, path: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        build_corpus(load_recipe("smoke", data=path), tokenizer)

    assert message in str(caught.value)


def test_an_unknown_template_is_reported_with_the_nearest(corpus_of) -> None:
    with pytest.raises(DataError, match="did you mean `chatml`"):
        corpus_of([{"messages": CHAT}], "chat_template=chatlm")


# ---- the held-out set ----------------------------------------------------------------------------


def test_held_out_rows_are_drawn_by_the_seed_and_are_in_no_training_sample(corpus_of, tokenizer) -> None:
    rows = [{"text": f"row {i}"} for i in range(20)]
    share = corpus_of(rows, "val_set_size=0.25")
    again = corpus_of(rows, "val_set_size=5")
    other = corpus_of(rows, "val_set_size=5", "seed=7")

    def texts(samples: tuple[Sample, ...]) -> list[str]:
        return [read(tokenizer, s)[0] for s in samples]

    assert len(share.held_out) == 5
    assert texts(share.held_out) == texts(again.held_out) != texts(other.held_out)
    assert sorted(texts(share.samples) + texts(share.held_out)) == sorted(
        f"row {i}<|endoftext|>" for i in range(20)
    )


def test_holding_out_everything_is_an_error(corpus_of) -> None:
    with pytest.raises(DataError, match="holds out all of 1 rows"):
        corpus_of([{"text": "only"}], "val_set_size=0.5")


def test_held_out_rows_that_are_trained_too_are_counted(corpus_of, tmp_path) -> None:
    rows = [{"text": f"Row {i}."} for i in range(30)]

    def told(*overrides: str) -> list[str]:
        return [one for one in corpus_of(rows, *overrides).warnings if "trained too" in one]

    same = f"eval_datasets=[{{path: {tmp_path}/my.jsonl, split: 'train[20:]'}}]"
    assert told(same) == ["10 of 10 held-out rows are trained too"]
    assert told(same, "datasets.0.split=train[:21]") == ["1 of 10 held-out rows are trained too"]
    assert told(same, "datasets.0.split=train[:20]") == told("val_set_size=5") == []


def test_an_evaluation_set_of_its_own_is_held_out_whole(tmp_path, corpus_of, tokenizer) -> None:
    corpus_of([{"text": "held"}], file="held.jsonl")
    corpus = corpus_of([{"text": "kept"}], "eval_datasets.0.path=" + str(tmp_path / "held.jsonl"))

    assert [read(tokenizer, s)[0] for s in corpus.held_out] == ["held<|endoftext|>"]
    assert len(corpus.samples) == 1


# ---- order ---------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_each_epoch_sees_every_row_once_in_an_order_that_seed_and_epoch_fix(count, seed, epoch) -> None:
    order = shuffled_order(count, seed, epoch)

    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == shuffled_order(count, seed, epoch).tolist()


def test_the_order_is_the_same_in_every_version_of_numpy() -> None:
    assert shuffled_order(8, seed=42, epoch=0).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]


def test_positions_run_through_the_epochs_and_every_row_is_met_once_in_each(corpus_of) -> None:
    rows = [{"text": f"row {i}"} for i in range(7)]
    corpus = corpus_of(rows, "num_train_epochs=2.5", "shuffle_dataset=true")

    assert len(corpus) == 18
    ids = [corpus.sample_id(p) for p in range(18)]
    assert sorted(ids[:7]) == sorted(ids[7:14]) == list(range(7))
    assert ids[:7] != ids[7:14]
    assert max(Counter(ids[14:]).values()) == 1
    assert [corpus.sample_id(p) for p in reversed(range(18))] == ids[::-1]
    with pytest.raises(IndexError):
        corpus.sample_id(18)


def test_tokens_of_a_lease_are_the_terms_of_its_loss(corpus_of) -> None:
    corpus = corpus_of([{"prompt": "ab", "completion": "c" * i} for i in range(1, 6)])
    positions = [0, 3, 4]

    batch = collate([corpus.sample(p) for p in positions])

    assert corpus.tokens(positions) == int((batch["labels"][:, 1:] != -100).sum())


# ---- the wire ------------------------------------------------------------------------------------


@st.composite
def some_samples(draw: Any) -> list[Sample]:
    largest = draw(st.sampled_from([300, 65535, 200_000]))
    made = []
    for _ in range(draw(st.integers(0, 5))):
        tokens = draw(st.lists(st.integers(0, largest), min_size=1, max_size=20))
        trained = [False, *draw(st.lists(st.booleans(), min_size=len(tokens) - 1, max_size=len(tokens) - 1))]
        made.append(Sample(np.array(tokens, dtype=np.int32), np.array(trained, dtype=bool)))
    return made


@given(some_samples())
def test_samples_come_out_of_their_bytes_as_they_went_in(samples: list[Sample]) -> None:
    again = unpack_samples(pack_samples(samples))

    assert [s.tokens.tolist() for s in again] == [s.tokens.tolist() for s in samples]
    assert [s.trained.tolist() for s in again] == [s.trained.tolist() for s in samples]


def test_a_host_holds_out_no_more_samples_than_its_peers_evaluate(
    corpus_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": "a b c"}] * 8
    monkeypatch.setattr("recipes.data.corpus.MOST", 3)

    assert len(corpus_of(rows, "val_set_size=3").held_out) == 3
    with pytest.raises(DataError, match="4 held-out samples, a run evaluates at most 3") as caught:
        corpus_of(rows, "val_set_size=4")
    assert "val_set_size" in caught.value.hint


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    data = pack_samples([Sample(np.array([1, 320], dtype=np.int32), np.array([False, True]))])

    assert len(unpack_samples(data, SampleLimits(1000, 1, vocabulary=321))) == 1
    with pytest.raises(DataError, match="token 320 in a vocabulary of 320"):
        unpack_samples(data, SampleLimits(1000, 1, vocabulary=320))


def test_text_costs_two_bytes_a_token_on_the_wire() -> None:
    trained = np.ones(2048, dtype=bool)
    trained[0] = False
    sample = Sample(np.full(2048, 50_000, dtype=np.int32), trained)

    assert len(pack_samples([sample])) == 2 * 2048 + 14


def test_a_batch_is_padded_on_the_right_and_padding_is_never_trained() -> None:
    long = Sample(np.array([5, 6, 7], dtype=np.int32), np.array([False, False, True]))
    short = Sample(np.array([8, 9], dtype=np.int32), np.array([False, True]))

    batch = collate([long, short], pad=9)

    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 7], [-100, 9, -100]]
    assert [len(part) for part in batches([long, short, short], 2)] == [2, 1]


def test_samples_of_like_length_share_a_batch_and_the_longest_come_first() -> None:
    samples = [Sample(np.arange(n, dtype=np.int32), np.arange(n) > 0) for n in (3, 9, 2, 8, 5)]

    assert [[len(s.tokens) for s in part] for part in batches(samples, 2)] == [[9, 8], [5, 3], [2]]


def test_a_sample_costs_its_tokens_and_the_pairs_within_its_documents() -> None:
    """At a length of 6 widths attention takes as much as all linear layers; documents are apart."""
    width, trained = 4, np.arange(48) > 0
    one, two = (Sample(np.zeros(48, dtype=np.int32), trained, cut) for cut in ((), (24, 24)))

    assert one.cost(width) == 48 * 3
    assert two.cost(width) == 2 * 24 * 2


def test_leases_know_what_samples_cost_where_they_differ(corpus_of) -> None:
    uneven, even = (corpus_of([{"text": "word " * n} for n in lengths]) for lengths in ([3, 40], [7, 7]))
    cost = uneven.costs(64)

    assert [cost(i) for i in range(2)] == [uneven.sample(i).cost(64) for i in range(2)]
    assert even.costs(64) is None
