"""`cocktail preview`: what a model would be trained on, to the eye and for programs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cocktail_cli.commands.check import painted
from cocktail_cli.main import app
from cocktail_cli.ui import say_styled

RECIPE = """\
version: 1
name: looked-at
model: {model_name_or_path: "builtin:tiny-gpt-neox"}
datasets: [{path: DATA}]
data: {max_length: 24}
"""
ROWS = [
    {"prompt": "Two and two is", "completion": " four."},
    {"prompt": "One and one is", "completion": " two, and one more is three, as everybody knows."},
    {"prompt": "a prompt that is much longer than any sample may be", "completion": "lost"},
]


@pytest.fixture
def previewed(tmp_path: Path):
    def run(*arguments: str) -> Result:
        (tmp_path / "my.yaml").write_text(RECIPE)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        data = ["--data", str(tmp_path / "rows.jsonl")]
        return CliRunner().invoke(app, ["preview", str(tmp_path / "my.yaml"), *data, *arguments])

    return run


def test_preview_puts_masked_text_in_brackets_and_trained_text_outside(previewed) -> None:
    done = previewed("-n", "1")

    assert done.exit_code == 0, done.output
    assert "rows.jsonl: prompt_completion, the first 3 rows are 2 samples" in done.output
    assert "[Two and two is] four.<|endoftext|>" in done.output
    assert "sample 2" not in done.output
    assert done.stderr.startswith("Next: cocktail launch ")
    assert done.stderr.endswith("rows.jsonl\n")


def test_preview_counts_dropped_rows_and_sample_lengths(previewed) -> None:
    [told] = json.loads(previewed("--json").stdout)["data"]

    assert (told["rows"], told["samples"], told["cut"], told["left_out"]) == (3, 2, 2, 1)
    assert sum(row["samples"] for row in told["lengths"]) == 2
    assert (told["lengths"][0]["from"], told["lengths"][-1]["to"]) == (1, 24)
    assert told["full"] == round(told["tokens"] / 48, 4)
    assert sum(part["tokens"] for shown in told["shown"] for part in shown["parts"]) == told["tokens"]
    trained = [part["tokens"] for shown in told["shown"] for part in shown["parts"] if part["trained"]]
    assert sum(trained) == told["trained"]


def test_preview_shows_tool_calls_as_the_model_gets_them_and_names_unused_columns(
    previewed, tmp_path: Path
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": messages, "id": 7}) + "\n")
    (tmp_path / "tools.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
        "{% for c in m.tool_calls %}CALL {{ c.function | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    template = f"chat_template={tmp_path / 'tools.jinja'}"

    done = previewed(template, "max_length=256", "--data", str(tmp_path / "talk.jsonl"))

    called = 'CALL {"name": "add", "arguments": {"a": 2}}<|endoftext|>'
    assert f"[<user>2+2<|endoftext|><assistant>]{called}\n" in done.output
    assert "not used  id" in done.output


def test_control_characters_of_a_strangers_data_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for color in (False, True):
        say_styled(painted(text, trained, color) for text, trained in (("a\x1b[2Jb\nc", True), ("d", False)))

    plain, colored = "a?[2Jb\nc[d]\n", "\x1b[32ma?[2Jb\nc\x1b[0m\x1b[2md\x1b[0m\n"
    assert capsys.readouterr().out == plain + colored
