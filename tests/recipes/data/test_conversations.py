"""Conversations reach the template whole, and whatever is wrong with one is told with file and line."""

import json
from typing import Any

import pytest

from recipes.config import Dataset
from recipes.data.conversations import ConversationReader
from recipes.data.sources import Row
from recipes.errors import DataError

ASK = {"role": "user", "content": "Two and two?"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2, "b": {"deep": [1, None, 2.5]}, "c": None}},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def read(fields: dict[str, Any], **column_map: str) -> Any:
    dataset = Dataset(path="my.jsonl", column_map=column_map)
    row = Row(json.loads(json.dumps(fields)), "my.jsonl:1")
    reader = ConversationReader(dataset, frozenset({"critic"}))
    return reader.prompt_and_completion(row) if "prompt" in fields else reader.conversation(row)


def test_tool_calls_results_and_reasoning_come_through_unchanged() -> None:
    messages = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Let me add."},
        {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "Four."},
    ]

    found = read({"messages": messages, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}})

    called = {key: value for key, value in messages[1].items() if value is not None}
    assert found.messages == [ASK, called, *messages[2:]]
    assert found.tools == [TOOL]
    assert found.arguments == {"enable_thinking": False}


def test_null_and_empty_values_of_a_message_are_absent() -> None:
    whole = {"role": "assistant", "content": "Four.", "tool_calls": None, "name": None}

    found = read({"messages": [ASK, whole | {"tool_calls": []}, whole], "tools": [], "images": None})

    assert found.messages[1:] == [{"role": "assistant", "content": "Four."}] * 2
    assert found.tools is None


def test_tools_are_a_list_or_its_json_text() -> None:
    answer = {"role": "assistant", "content": "Four."}

    assert read({"messages": [ASK, answer], "tools": json.dumps([TOOL])}).tools == [TOOL]
    assert read({"messages": [ASK, answer], "functions": [TOOL]}, tools="functions").tools == [TOOL]
    assert read({"messages": [ASK, answer], "tools": "null"}).tools is None


def test_prompt_and_completion_may_be_messages_also_sharegpt_ones() -> None:
    theirs = {"prompt": [{"from": "human", "value": "Hi"}], "completion": [{"from": "gpt", "value": "Yes"}]}

    found = read(theirs)

    assert found.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    assert found.prompt == 1


def test_roles_and_message_keys_can_be_renamed_or_dropped_on_purpose() -> None:
    messages = [
        {"who": "Customer", "content": "Hi", "stamp": 12},
        {"who": "critic", "content": "Hm."},
        {"who": "bot", "content": "", "calls": [CALL]},
    ]
    names = {"role": "who", "user": "Customer", "tool_calls": "calls", "stamp": "-", "tools": "-"}

    found = read({"messages": messages, "tools": [TOOL]}, **names)

    assert found.messages == [
        {"role": "user", "content": "Hi"},
        {"role": "critic", "content": "Hm."},  # the template knows it
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    assert found.tools is None


def parts(*listed: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(listed)}]}


def answered(**message: Any) -> dict[str, Any]:
    return {"messages": [ASK, {"role": "assistant", **message}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "humn", "content": "a"}]}, "unknown role `humn`: did you mean `human`?"),
        ({"messages": [{"role": "xyz", "content": "a"}]}, "unknown role `xyz`: known: system, developer"),
        (answered(content=""), "message 1: the assistant has neither content nor tool calls"),
        (answered(content=None), "message 1: the assistant has neither content nor tool calls"),
        (answered(tool_calls=[]), "message 1: the assistant has neither content nor tool calls"),
        (answered(content=[{"type": "text", "text": " "}]), "the assistant has neither content nor"),
        (answered(contnet="Four."), "neither content nor tool calls: did you mean `content`?"),
        (answered(function_call={"name": "f"}), "neither content nor tool calls: did you mean `tool_calls`?"),
        (answered(content=5), "message 1: field `content` must be text, not int"),
        ({"messages": [{"role": "user", "content": None}]}, "message 0: field `content` must be text"),
        ({"messages": [{"role": "tool"}]}, "message 0: no field `content`; there is role"),
        ({"messages": [{**ASK, "tool_calls": [CALL]}]}, "`tool_calls` belong to an assistant"),
        (answered(tool_calls=CALL), "message 1: `tool_calls` must be a list of calls"),
        (answered(tool_calls=[{"id": "x"}]), "message 1: tool call 0 must be an object such as"),
        (
            answered(tool_calls=[{"name": "f", "arguments": '{"a": '}]),
            "message 1: tool call 0: the arguments are not valid JSON: Expecting value",
        ),
        (answered(tool_calls=[{"name": "\ud800"}]), "message 1: `tool_calls` holds half a character"),
        (parts({"type": "image_url", "image_url": "x"}), "message 0: part 0 is `image_url`: cocktail"),
        (parts({"type": "text", "text": "a"}, {"type": "image"}), "message 0: part 1 is `image`"),
        (parts("a"), 'part 0 must be an object such as {"type": "text", "text": ...}'),
        (parts({"type": "text", "text": "a", "cache": 1}), "part 0 has a key `cache`, which would be lost"),
        ({**parts(), "messages": [ASK], "images": ["x.png"]}, "`images`: cocktail trains on text only"),
        ({"messages": [ASK], "tools": "[{"}, "my.jsonl:1: `tools` is not valid JSON"),
        ({"messages": [ASK], "tools": {"a": 1}}, "my.jsonl:1: `tools` must be a list of tools"),
        ({"messages": [ASK], "chat_template_kwargs": [1]}, "`chat_template_kwargs` must be an object"),
        ({"messages": [ASK], "chat_template_kwargs": {"tools": 1}}, "cannot set `tools`"),
        ({"prompt": [ASK], "completion": "Four."}, "my.jsonl:1: `completion` must be a list of messages"),
        ({"prompt": [ASK], "completion": []}, "`completion` must be a list of messages with at least one"),
        ({"prompt": [ASK], "completion": [5]}, "my.jsonl:1: completion message 0 must be an object"),
    ],
)
def test_a_broken_conversation_is_reported_with_its_place(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        read(fields)

    assert message in str(caught.value)
    assert str(caught.value).startswith("my.jsonl:1: ")
