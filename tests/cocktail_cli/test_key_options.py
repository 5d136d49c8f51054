"""Options named like keys of a recipe are the same as KEY=VALUE arguments, as users of TRL type them."""

import pytest
from typer.main import get_command

from cocktail_cli.errors import Failure
from cocktail_cli.key_options import rewritten
from cocktail_cli.main import app

ROOT = get_command(app)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--learning-rate 1e-4", "learning_rate=1e-4"),
        ("--learning_rate=1e-4", "learning_rate=1e-4"),
        ("--training.learning_rate 1e-4", "training.learning_rate=1e-4"),
        ("--max_steps -1", "max_steps=-1"),
        ("--packing", "packing=true"),
        ("--packing --seed 3", "packing=true seed=3"),
        ("--bf16 True --packing False", "bf16=true packing=false"),
        ("--no-packing", "packing=false"),
        ("--lora --seed 3", "lora=true seed=3"),
        ("--use-peft", "lora=true"),
        ("--no-lora", "lora=false"),
        ("--max-samples 9", "max_samples=9"),
        ("--load_in_4bit --peers 2", "load_in_4bit=true --peers 2"),
    ],
)
def test_an_option_named_like_a_key_is_that_key(typed: str, meant: str) -> None:
    given = ["launch", "smoke", "max_length=64", *typed.split()]

    assert rewritten(given, ROOT) == ["launch", "smoke", "max_length=64", *meant.split()]


@pytest.mark.parametrize(
    "typed",
    [
        "launch smoke --output-dir x --peers 2 -o y",
        "launch smoke --data --seed",  # a file of that name
        "launch smoke -- --seed",
        "join --seed 3",
        "recipes schema --seed",
        "--version",
    ],
)
def test_options_of_the_command_itself_and_other_commands_are_left_alone(typed: str) -> None:
    assert rewritten(typed.split(), ROOT) == typed.split()


def test_an_option_of_the_command_may_be_written_with_underscores() -> None:
    typed = ["launch", "smoke", "--micro_batch_size", "4"]

    assert rewritten(typed, ROOT) == ["launch", "smoke", "--micro-batch-size", "4"]


@pytest.mark.parametrize(
    ("typed", "message", "hint"),
    [
        ("--learing-rate 1", "no such option: --learing-rate", "did you mean --learning-rate?"),
        ("--otput-dir x", "no such option: --otput-dir", "did you mean --output-dir?"),
        ("--lr 1", "no such option: --lr", "cocktail calls this training.learning_rate"),
        ("--r 8", "no such option: --r", "cocktail calls this lora.lora_r"),
        ("--bits 2", "no such option: --bits", "cocktail calls this compression.quant_bits"),
        ("--dataset_name x", "no such option: --dataset_name", "cocktail calls this --data"),
        ("--zzzzzz", "no such option: --zzzzzz", "the keys of a recipe: cocktail recipes schema"),
        (
            "--learning-rate",
            "--learning-rate needs a value",
            "--learning-rate VALUE, or --learning-rate=VALUE",
        ),
        ("--seed --packing", "--seed needs a value", "--seed VALUE, or --seed=VALUE"),
    ],
)
def test_a_misspelt_or_foreign_option_is_a_usage_error_with_the_right_name(
    typed: str, message: str, hint: str
) -> None:
    with pytest.raises(Failure) as caught:
        rewritten(["launch", "smoke", *typed.split()], ROOT)

    assert (caught.value.code, caught.value.message, caught.value.hints) == ("usage", message, (hint,))
