"""The chat template: nothing of a conversation is left out silently, and TRL's tokens and masks are ours.

TRL is the reference: `SFTTrainer` prepares the same rows with the same tokenizer, as a user of it would see.
"""

import json
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from recipes.config import Data, Dataset, load_recipe
from recipes.data import RowTokenizer, make_row_tokenizer
from recipes.data.conversations import ChatTemplate, Conversation, ConversationReader
from recipes.data.sources import Row
from recipes.errors import DataError
from recipes.models import BUILTIN_MODELS, TextGenerator, configs_with_eos, open_tokenizer

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<think>",
    "</think>",
    "</s>",
]
CALL = {
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2, "b": {"c": [1, None, "é🎉"]}, "none": None}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
ASK = {"role": "user", "content": "What is 2 + 3?"}
ANSWER = {"role": "assistant", "content": "It is five 🎉."}
CHATS = [
    {
        "messages": [
            ASK,
            ANSWER,
            {"role": "user", "content": "Sure?"},
            {**ANSWER, "content": "  Yes\n\nit is. "},
        ]
    },
    {"messages": [ASK, ANSWER]},
]
CALLED: dict[str, Any] = {
    "messages": [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "5"},
        ANSWER,
    ],
    "tools": [TOOL],
}
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OLD_TRL = tuple(map(int, version("trl").split(".")[:2])) < (1, 16)
# template -> what it can do; "masks": it has generation marks, or TRL has a variant that has
TEMPLATES = {
    "cohere": "masks",
    "cohere2": "masks",
    "deepseek_r1_distill": "masks",
    "deepseekv3": "masks",
    "gemma": "masks",
    "gemma3": "masks system",
    "gemma4_v5": "tools system",
    "glm4moe": "masks tools system",
    "gptoss": "masks tools",
    "lfm2": "masks system",
    "lfm2_2_5_v2": "masks tools system",
    "lfm2_v2": "masks tools system",
    "llama3": "masks system",
    "llama3_1": "tools system",
    "llama3_2": "tools system",
    "nemotron_3_nano": "masks tools system",
    "phi3": "masks system",
    "phi3_5": "masks system",
    "qwen2_5": "masks tools system",
    "qwen3": "masks tools system",
    "qwen3_5_think": "masks tools system",
    "qwen3_instruct_2507": "masks tools system",
    "qwen3_vl": "masks tools system",
    "chatml": "system",
    "mistral": "",
}


def source_of(name: str) -> str:
    if name in ("chatml", "mistral"):
        return {"chatml": CHATML, "mistral": MISTRAL}[name]
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja"
    if not file.exists():
        pytest.skip(f"trl {version('trl')} has no template {name}")
    return file.read_text(encoding="utf-8")


@pytest.fixture
def speaking(tokenizer: Any) -> Any:
    """Template -> a tokenizer with it, and with the special tokens of several models."""

    def made(source: str) -> Any:
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "bos_token": "<s>"})
        tokenizer.chat_template = source
        return tokenizer

    return made


def ours(rows: list[dict[str, Any]], tokenizer: Any, **data: Any) -> list[tuple[list[int], list[bool]]]:
    given = [Row(json.loads(json.dumps(row)), f"my.jsonl:{n}") for n, row in enumerate(rows, start=1)]
    rows_to_tokens = make_row_tokenizer(tokenizer, Data(**data), Dataset(path="my.jsonl"), given[0])
    return [(d.tokens.tolist(), d.trained.tolist()) for d in rows_to_tokens.tokenize(given)]


def of_trl(rows: list[dict[str, Any]], tokenizer: Any, assistant: bool) -> list[tuple[list[int], list[bool]]]:
    """The token ids and loss masks that TRL's SFTTrainer makes of the same rows."""
    from datasets import Dataset as Table
    from trl import SFTConfig, SFTTrainer
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    args = SFTConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", max_length=None)
    args.assistant_only_loss = assistant
    patched = assistant and not has_generation_markers(tokenizer.chat_template)
    trainer: Any = SimpleNamespace(  # what `_prepare_dataset` reads of a trainer, as its __init__ sets it
        _tokenizer=tokenizer,
        chat_template=get_training_chat_template(tokenizer) if patched else None,
        completion_only_loss="prompt" in rows[0],
    )
    table = Table.from_list(rows, on_mixed_types="use_json")
    made = SFTTrainer._prepare_dataset(trainer, table, tokenizer, args, False, None, "train")
    return [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in made]


@pytest.mark.slow
@pytest.mark.skipif(OLD_TRL, reason="TRL before 1.16 masks some prompts otherwise")
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_are_those_of_trl(name: str, speaking: Any) -> None:
    """Chats, prompt and completion, system messages, tool calls; with assistant_only_loss where TRL can."""
    tokenizer, can = speaking(source_of(name)), TEMPLATES[name].split()
    chats = list(CHATS)
    if "system" in can:
        chats.append({"messages": [{"role": "system", "content": "Be kind."}, ASK, ANSWER]})
    if "tools" in can:
        chats = [{"tools": None, **row} for row in (*chats, CALLED)]
    pairs = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in chats]
    if "tools" in can:  # as JSON text
        pairs = [{**row, "tools": json.dumps([TOOL])} for row in pairs]

    assert ours(chats, tokenizer, assistant_only_loss=False) == of_trl(chats, tokenizer, False)
    assert ours(pairs, tokenizer) == of_trl(pairs, tokenizer, False)
    if "masks" in can:
        assert ours(chats, tokenizer) == of_trl(chats, tokenizer, True)
        assert ours(pairs, tokenizer, assistant_only_loss=True) == of_trl(pairs, tokenizer, True)


@pytest.mark.parametrize(
    "name", ["cohere", "gemma", "gemma3", "lfm2_v2", "llama3", "phi3", "qwen3_instruct_2507"]
)
def test_answers_found_by_rendering_are_those_that_trls_variant_marks(name: str, speaking: Any) -> None:
    tokenizer = speaking(source_of(name))
    rows = [*CHATS, CALLED] if "tools" in TEMPLATES[name] else CHATS

    for row in rows:
        conversation = ConversationReader(Dataset(path="my.jsonl")).conversation(Row(row, "my.jsonl:1"))
        [(text, found)] = ChatTemplate(tokenizer, marked=False).render_answers(conversation)
        [(same, marked)] = ChatTemplate(tokenizer, marked=True).render_answers(conversation)

        assert text == same
        assert "".join(text[a:b] for a, b in found) == "".join(text[a:b] for a, b in marked)


TALK = (
    "{% for m in messages %}{% if m.role != 'narrator' %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments }}{% endfor %}"
    "</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (CALLED, "my.jsonl:1: the chat template leaves out `tools` (hint: data.chat_template"),
        (
            {"messages": [ASK, {**ANSWER, "reasoning_content": "2 + 3"}]},
            "message 1: the chat template leaves out `reasoning_content` of role assistant (hint",
        ),
        (
            {"messages": [ASK, {**ANSWER, "tool_call": [CALL]}]},
            "the chat template leaves out `tool_call` of role assistant: did you mean `tool_calls`?",
        ),
        ({"messages": [{"role": "narrator", "content": "x"}, ASK, ANSWER]}, "leaves out messages of role"),
        ({"messages": [ASK, {**ANSWER, "weight": 0}]}, "leaves out `weight` of role assistant (hint"),
        ({"messages": [{"role": "function", "content": "5"}, ANSWER]}, "unknown role `function`"),
        ({"messages": [ASK]}, "my.jsonl:1: no message of an assistant to train on"),
        (
            {"messages": [ASK, ANSWER], "chat_template_kwargs": {"enable_thinkin": False}},
            "my.jsonl:1: the chat template has no variable `enable_thinkin`",
        ),
    ],
)
def test_what_the_template_would_leave_out_is_an_error(
    speaking: Any, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        ours([row], speaking(TALK))

    assert message in str(caught.value)


def test_a_template_without_tool_calls_refuses_them_rather_than_train_an_empty_answer(speaking: Any) -> None:
    with pytest.raises(
        DataError, match=r"message 1: the chat template leaves out `tool_calls` of role assistant"
    ):
        ours([{"messages": CALLED["messages"]}], speaking(CHATML))


FORGETFUL = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}"""


def test_an_answer_is_trained_whole_or_not_at_all(speaking: Any) -> None:
    """DeepSeek's template drops the thoughts of every answer."""
    thought = {"role": "assistant", "content": "<think>\n2 + 3\n</think>\n\n5"}
    template = ChatTemplate(speaking(FORGETFUL), marked=True)

    [(text, spans)] = template.render_answers(Conversation([ASK, thought, ASK, ANSWER], "my.jsonl:1"))

    [trained] = [text[start:end].partition("<|im_end|>")[0] for start, end in spans]
    assert trained == ANSWER["content"]
    assert list(template.warnings) == ["answers whose thoughts the chat template leaves out are not trained"]
    with pytest.raises(DataError, match="message 1: the chat template shows only a part"):
        template.render_answers(Conversation([ASK, thought], "my.jsonl:1"))


def test_reasoning_that_is_shown_in_the_last_turn_alone_is_a_warning(speaking: Any) -> None:
    thought = {**ANSWER, "reasoning_content": "2 + 3"}
    template = ChatTemplate(speaking(source_of("qwen3")), marked=False)

    text = template.render(Conversation([ASK, thought, ASK, thought], "my.jsonl:1"))

    assert text.count("2 + 3") == 3  # two questions, and the last answer
    again = template.render(
        Conversation([ASK, thought, {"role": "user", "content": "b"}, ANSWER], "my.jsonl:2")
    )
    assert "<think>" not in again.split("b<|im_end|>")[0]
    assert list(template.warnings) == ["the chat template shows no reasoning of turns before the last"]


def rendered(source: str, speaking: Any, *messages: dict[str, Any]) -> str:
    return ChatTemplate(speaking(source), marked=False).render(Conversation(list(messages), "my.jsonl:1"))


def test_content_in_parts_is_their_text_also_where_the_template_knows_no_parts(speaking: Any) -> None:
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " 2 + 3?"}],
    }

    for name in ("qwen2_5", "gemma3", "smolvlm"):
        source = source_of(name)
        assert rendered(source, speaking, parts, ANSWER).replace("is2", "is 2") == rendered(
            source, speaking, ASK, ANSWER
        )


def test_arguments_of_a_call_are_an_object_or_json_text_and_no_template_quotes_the_text(
    speaking: Any,
) -> None:
    """Qwen2.5 would print text in quotes, DeepSeek-V3 takes nothing else."""
    text = json.dumps(CALL["function"]["arguments"], ensure_ascii=False)
    as_text = {"type": "function", "function": {"name": "add", "arguments": text}}

    for name in ("qwen2_5", "qwen3", "deepseekv3"):
        objects, texts = (
            rendered(source_of(name), speaking, ASK, {"role": "assistant", "tool_calls": [call]}, ANSWER)
            for call in (CALL, as_text)
        )
        assert text in objects
        assert texts == objects


def test_of_several_templates_the_one_for_tools_renders_rows_with_tools(speaking: Any) -> None:
    tokenizer = speaking({"default": CHATML, "tool_use": source_of("qwen2_5")})
    rows = [CHATS[1], CALLED]

    assert ours(rows, tokenizer, assistant_only_loss=False) == [
        ours([row], speaking(source), assistant_only_loss=False)[0]
        for row, source in zip(rows, (CHATML, source_of("qwen2_5")), strict=True)
    ]
    with pytest.raises(DataError, match="no chat template `default`, only rag, tool_use"):
        ours(rows, speaking({"rag": CHATML, "tool_use": CHATML}))


def test_a_template_that_is_no_jinja_is_reported(speaking: Any) -> None:
    with pytest.raises(DataError, match="the chat template is not valid Jinja"):
        ours(CHATS, speaking("{% for m in messages %}"))
    with pytest.raises(DataError, match="the chat template is not valid Jinja: nested too deeply"):
        ours(CHATS, speaking("{{" + "(" * 50_000 + "1" + ")" * 50_000 + "}}"))


def test_a_template_that_never_trains_the_end_of_a_turn_is_a_warning(speaking: Any) -> None:
    endless = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    )
    rows = [Row(row, "my.jsonl:1") for row in CHATS]

    for source, warnings in (
        (CHATML, []),
        (endless, ["the chat template marks no end of the assistant's turn as trained"]),
    ):
        made = make_row_tokenizer(speaking(source), Data(), Dataset(path="my.jsonl"), rows[0])
        assert [*made.warnings] == warnings
    plain = speaking("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    plain.eos_token = "!"  # a token of the vocabulary, not one that was added
    assert make_row_tokenizer(plain, Data(), Dataset(path="my.jsonl"), rows[0]).warnings == {}


@pytest.mark.parametrize(
    ("name", "written"), [("llama3_2", "Today Date: 04 Mar 2026"), ("gptoss", "2026-03-04")]
)
def test_a_run_that_is_resumed_on_another_day_finds_the_date_it_began_with(
    name: str, written: str, speaking: Any, tmp_path: Path
) -> None:
    tokenizer = speaking(source_of(name))
    tokenizer.init_kwargs["chat_template_date"] = "2026-03-04"  # as an earlier launch left it
    tokenizer.save_pretrained(tmp_path)
    messages = Conversation([ASK, ANSWER], "my.jsonl:1")

    text = ChatTemplate(open_tokenizer(tmp_path), marked=False).render(messages)
    today = ChatTemplate(speaking(source_of(name)), marked=False).render(messages)

    assert written in text
    del tokenizer.init_kwargs["chat_template_date"]
    assert ChatTemplate(tokenizer, marked=False).render(messages) != text
    assert tokenizer.init_kwargs["chat_template_date"] > "2026-03-04"  # kept, for the folder of the run
    assert today == text


DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe a bot.<|im_end|>\n{% endif %}"
HEADERS = {  # what begins a message, and how an answer is asked for
    "asked": ("<|im_start|>{{ m.role }}\n", "<|im_start|>assistant\n"),
    "never asked": ("<|im_start|>{{ m.role }}\n", ""),
    "asked with thoughts": ("<|im_start|>{{ m.role }}\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    "by name": ("<|im_start|>{{ m.role }} {{ m.name }}\n", "<|im_start|>assistant bot\n"),
    "of words": ("### {{ m.role }}:\n", "### assistant:\n"),
    "none": ("{% if m.role != 'assistant' %}[{{ m.role }}]\n{% endif %}", ""),
}
THOUGHTS = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
LAST_USER = """{% set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"""
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
words = some.text("ab é.<>\n", min_size=1).map(lambda text: f"x{text}x")
answers = some.fixed_dictionaries(
    {"role": some.just("assistant"), "content": words, "name": some.just("bot")},
    optional={"reasoning_content": words, "tool_calls": some.just([CALL])},
)
others = some.fixed_dictionaries({"role": some.sampled_from(["system", "user", "tool"]), "content": words})


@cache
def reader(header: str, default: str, strips: str, end: str, forgets: bool) -> tuple[Any, RowTokenizer]:
    """A tokenizer with a template made of parts, and that of its rows; it may forget earlier thoughts."""
    tokenizer: Any = open_tokenizer(BUILTIN_MODELS["builtin:tiny-gpt-neox"])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "bos_token": "<s>"})
    begins, asks = HEADERS[header]
    thoughts = f"{{% if loop.index0 > last.user %}}{THOUGHTS}{{% endif %}}" if forgets else THOUGHTS
    words = f"{thoughts}{{{{ m.content{strips} }}}}{CALLS}{end}"
    asks = f"{{% if add_generation_prompt %}}{asks}{{% endif %}}"
    default = LAST_USER + default
    tokenizer.chat_template = f"<s>{default}{{% for m in messages %}}{begins}{words}{{% endfor %}}{asks}"
    data, first = Data(), Row({"messages": [ASK, ANSWER]}, "my.jsonl:1")
    return tokenizer, make_row_tokenizer(tokenizer, data, Dataset(path="my.jsonl"), first)


@settings(max_examples=40)
@given(
    some.sampled_from([*HEADERS]),
    some.sampled_from(["", DEFAULT]),
    some.sampled_from(["", " | trim"]),
    some.sampled_from(["<|im_end|>", "<|end|>\n", "{{ eos_token }}"]),
    some.booleans(),
    some.lists(others | answers, min_size=1, max_size=5).filter(lambda m: any("name" in one for one in m)),
)
def test_of_a_conversation_are_trained_the_assistants_words_and_their_end_whatever_comes_first(
    header: str, default: str, strips: str, end: str, forgets: bool, messages: list[dict[str, Any]]
) -> None:
    """Also of a greeting that begins it, of two answers in a row, of thoughts and of calls; each once."""
    tokenizer, rows = reader(header, default, strips, end, forgets)
    said = ""
    for message in messages:
        if message["role"] == "assistant":
            thought = message.get("reasoning_content", "")
            said += f"<think>{thought}</think>" * bool(thought) + message["content"]
            said += "<call>add</call>" * ("tool_calls" in message) + end

    [document] = rows.tokenize([Row({"messages": messages}, "my.jsonl:1")])

    texts = [tokenizer.decode(one.tokens[one.trained]) for one in (document, *document.turns)]
    end = end.replace("{{ eos_token }}", tokenizer.eos_token)
    found, told = ("".join(texts).split(end), said.replace("{{ eos_token }}", end).split(end))
    assert (sorted(found), len(texts)) == (sorted(told), len(texts)) if forgets else (found, 1) == (told, 1)


def test_a_template_that_drops_earlier_thoughts_trains_each_answer_once_as_the_last_of_its_sample(
    speaking: Any,
) -> None:
    """Qwen3's, in a form that TRL does not know: a question later, an answer's empty thoughts are gone."""
    tokenizer = speaking("{#- mine #}" + source_of("qwen3"))
    thought = {"role": "assistant", "content": "5", "reasoning_content": "2 + 3"}
    row = {
        "messages": [
            ASK,
            {**CALLED["messages"][1], "content": ""},
            CALLED["messages"][2],
            thought,
            ASK,
            ANSWER,
        ]
    }
    given = Row(row, "my.jsonl:1")
    rows = make_row_tokenizer(tokenizer, Data(), Dataset(path="my.jsonl"), given)

    [last] = rows.tokenize([given])

    said = [tokenizer.decode(one.tokens[one.trained]) for one in (last, *last.turns)]
    assert said[0] == "<think>\n\n</think>\n\nIt is five 🎉.<|im_end|>\n"
    assert said[1] == "<think>\n2 + 3\n</think>\n\n5<|im_end|>\n"
    assert said[2].startswith('<think>\n\n</think>\n\n<tool_call>\n{"name": "add", ')
    assert said[2].endswith("</tool_call><|im_end|>\n")
    assert not last.turns[2:]
    assert "2 + 3\n" not in tokenizer.decode(last.tokens)
    assert any("samples of their own" in warning for warning in rows.warnings)


def test_a_completion_begins_behind_its_header_also_where_the_template_never_asks_for_it(
    speaking: Any,
) -> None:
    for source in (CHATML, CHATML.partition("{% if")[0]):
        tokenizer = speaking(source)
        [(tokens, trained)] = ours([{"prompt": [ASK], "completion": [ANSWER]}], tokenizer)
        said = [token for token, is_trained in zip(tokens, trained, strict=True) if is_trained]
        assert tokenizer.decode(said) == ANSWER["content"] + "<|im_end|>\n"


def test_what_ends_a_turn_is_remembered_for_the_model_that_is_exported(
    speaking: Any, tmp_path: Path, folders: dict[str, Path]
) -> None:
    tokenizer = speaking(CHATML)
    tokenizer.save_pretrained(tmp_path / "before")
    ours(CHATS, tokenizer)
    tokenizer.save_pretrained(tmp_path / "after")
    texts = {"config.json": '{"eos_token_id": 0, "pad_token_id": 3}'}
    model = load_recipe("smoke").model

    kept, ends = (configs_with_eos(texts, model, tmp_path / name) for name in ("before", "after"))

    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert kept == texts
    assert json.loads(ends["generation_config.json"]) == {"pad_token_id": 3, "eos_token_id": [0, end]}
    assert ends["config.json"] == texts["config.json"]
    assert end in (TextGenerator(folders["gpt2"], tokenizer=tmp_path / "after").ends or [])


def test_a_template_in_a_file_begins_behind_its_byte_order_mark(speaking: Any, tmp_path: Path) -> None:
    for encoding in ("utf-8-sig", "utf-16"):
        (tmp_path / encoding).write_text(CHATML, encoding=encoding)
    plain = ours(CHATS, speaking(CHATML))

    assert ours(CHATS, speaking("x"), chat_template=str(tmp_path / "utf-8-sig")) == plain
    with pytest.raises(DataError, match="utf-16: not UTF-8 text"):
        ours(CHATS, speaking("x"), chat_template=str(tmp_path / "utf-16"))
    tokenizer = speaking("\ufeff" + CHATML)
    tokenizer.save_pretrained(tmp_path)
    assert open_tokenizer(tmp_path).chat_template == CHATML
