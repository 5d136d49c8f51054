"""Prompts are beginnings of held-out texts: the data's own prompt, or the first tokens of plain text."""

import numpy as np
import pytest

from cocktail_cli.extensions.results import Results
from cocktail_cli.extensions.results.sample_writer import prompts_of
from cocktail_cli.recipe_request import RecipeRequest
from recipes.data import LONGEST, NEW, SHOWN, Prompt, Sample, prompt_of


def sample(length: int, first_trained: int = 1, documents: tuple[int, ...] = ()) -> Sample:
    return Sample(np.arange(length, dtype=np.int32), np.arange(length) >= first_trained, documents)


def test_plain_text_is_split_after_its_first_tokens() -> None:
    assert prompt_of(sample(200)) == Prompt(list(range(SHOWN)), list(range(SHOWN, SHOWN + NEW)))
    assert prompt_of(sample(6)) == Prompt([0, 1, 2], [3, 4, 5])


def test_a_prompt_of_the_data_is_the_prompt_and_its_end_where_it_is_long() -> None:
    assert prompt_of(sample(50, 30)) == Prompt(list(range(30)), list(range(30, 50)))
    assert prompt_of(sample(500, 400)).tokens == list(range(400 - LONGEST, 400))


def test_of_packed_documents_the_first_is_continued() -> None:
    assert prompt_of(sample(100, documents=(4, 96))) == Prompt([0, 1], [2, 3])


def test_prompts_come_from_the_whole_held_out_part() -> None:
    held = [sample(2 * (number + 1)) for number in range(10)]

    assert [len(one.tokens) for one in prompts_of(held, 2)] == [1, 6]
    assert len(prompts_of(held, 16)) == 10


@pytest.mark.parametrize("typed", [(), ("sample_prompts=0",)])
def test_of_own_data_that_are_held_out_base_and_model_answer_two_unless_another_number_is_typed(
    typed: tuple[str, ...],
) -> None:
    held = {"data.val_set_size": 6}
    keys = held | Results().chosen(held)
    recipe = RecipeRequest("", typed, "rows.jsonl", "./model", keys).load()

    assert recipe.extensions["results"].sample_prompts == (0 if typed else 2)
    assert not Results().chosen({})
