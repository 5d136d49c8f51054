"""Rows to conversations: messages, tools, and arguments of the chat template, checked, otherwise unchanged.

Messages are OpenAI's ({role, content, tool_calls, ...}) or ShareGPT's ({from, value}). A key that is null is
absent, as in transformers; the nulls inside a tool call's arguments are the user's.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from typing import Any

from recipes.config import Dataset
from recipes.errors import DataError
from recipes.foreign_json import parse_json

from .sources import Row

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
MESSAGE_KEYS = ("role", "content", "tool_calls", "reasoning_content", "name", "tool_call_id")
SAYING = ("content", "tool_calls")  # keys of which an assistant's message needs one
NAMED = ("prompt", "completion", "chosen", "rejected")  # fields of messages that an error names
DROPPED = "-"  # in column_map: what is not to be read, on purpose
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # columns of data that are not text alone
# what a chat template is given by the renderer, never by a row
RESERVED = "messages conversations tools chat_template add_generation_prompt continue_final_message tokenize"
RESERVED += " return_assistant_tokens_mask return_dict return_tensors"


@dataclass(frozen=True)
class Conversation:
    """A row that is a conversation, ready for the chat template."""

    messages: list[dict[str, Any]]
    place: str  # "my.jsonl:17"
    tools: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # the row's chat_template_kwargs
    prompt: int = 0  # how many messages are the prompt; 0: there is no prompt apart


@dataclass
class ConversationReader:
    """Reads conversations from the rows of one data set. Errors: DataError with the place of the message."""

    dataset: Dataset
    template_texts: frozenset[str] = frozenset()  # texts in the chat template: its own roles are among them

    def __post_init__(self) -> None:
        mapped = self.dataset.column_map.items()
        self.dropped = {our for our, their in mapped if their == DROPPED}
        theirs = {their: our for our, their in mapped if their != DROPPED}
        self.keys = {their: our for their, our in theirs.items() if our in MESSAGE_KEYS}
        self.roles = SHAREGPT_ROLES | {their: our for their, our in theirs.items() if our in ROLES}

    def conversation(self, row: Row) -> Conversation:
        """Read the messages of a row."""
        return self.joined(row, self.messages(row, messages_column(self.dataset, row)))

    def prompt_and_completion(self, row: Row) -> Conversation:
        """Read a row whose prompt and completion are messages."""
        names = self.dataset.column("prompt"), self.dataset.column("completion")
        for name in names:
            if not isinstance(row.value(name), list):
                raise DataError(
                    f"{row.place}: `{name}` must be a list of messages, as the first row's prompt"
                )
        prompt, completion = (self.messages(row, name) for name in names)
        return self.joined(row, prompt + completion, len(prompt))

    def joined(self, row: Row, messages: list[dict[str, Any]], prompt: int = 0) -> Conversation:
        """Join messages with the row's tools and arguments; the first `prompt` messages are the prompt."""
        for name in MEDIA:
            if row.fields.get(self.dataset.column(name)):
                hint = f"(hint: column_map={{{name}: -}} trains on the text without them)"
                raise DataError(f"{row.place}: `{name}`: cocktail trains on text only {hint}")
        return Conversation(messages, row.place, self._tools(row), self._arguments(row), prompt)

    def messages(self, row: Row, name: str) -> list[dict[str, Any]]:
        """Read the messages in field `name` of a row."""
        listed = row.fields.get(name)
        if not isinstance(listed, list) or not listed:
            raise DataError(f"{row.place}: `{name}` must be a list of messages with at least one")
        where = f"{row.place}: {name} " if name in NAMED else f"{row.place}: "
        return [self._message(each, f"{where}message {number}") for number, each in enumerate(listed)]

    def _message(self, given: Any, place: str) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise DataError(f"{place} must be an object with role and content")
        sharegpt = "from" in given and "role" not in given
        role_key = self.dataset.column("role", "from" if sharegpt else "role")
        content_key = self.dataset.column("content", "value" if sharegpt else "content")
        row = Row(given, place)
        names: dict[str, str] = {**self.keys, role_key: "role", content_key: "content"}
        message: dict[str, Any] = {}
        for key, value in given.items():
            if value is not None and key not in self.dropped:
                message[names.get(key) or key] = value
        role = message["role"] = self._role(row.text(role_key), place)
        if not message.get("tool_calls", True):
            del message["tool_calls"]  # an empty list
        if "tool_calls" in message:
            if role != "assistant":
                raise DataError(f"{place}: `tool_calls` belong to an assistant, not to role `{role}`")
            check_tool_calls(message["tool_calls"], place)
        if isinstance(message.get("content"), list):
            message["content"] = [
                _text_part(part, f"{place}: part {n}") for n, part in enumerate(message["content"])
            ]
        elif role != "assistant" or "content" in message:
            row.text(content_key)
        says = "tool_calls" in message or plain_text(message.get("content")).strip()
        if role == "assistant" and not says:
            near = [
                match
                for key in message
                for match in difflib.get_close_matches(key, SAYING, n=1, cutoff=0.5)
                if key not in SAYING
            ]
            meant = f"did you mean `{near[0]}`?" if near else "an empty answer would be trained"
            raise DataError(f"{place}: the assistant has neither content nor tool calls: {meant}")
        _check_values({key: value for key, value in message.items() if key not in ("role", "content")}, place)
        return message

    def _role(self, role: str, place: str) -> str:
        role = self.roles.get(role, role)
        if role in ROLES or role in self.template_texts:
            return role
        near = difflib.get_close_matches(role.lower(), [*ROLES, *self.roles], n=1)
        meant = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(ROLES)}"
        hint = f"(hint: column_map={{{self.roles.get(near[0], near[0]) if near else 'user'}: {role}}})"
        raise DataError(f"{place}: unknown role `{role}`: {meant} {hint}")

    def _tools(self, row: Row) -> list[dict[str, Any]] | None:
        """The tools of a row, a list or its JSON text as in TRL; None where there are none. An empty list is
        none too: Llama's template would announce tools."""
        name = self.dataset.column("tools")
        tools = row.fields.get(name)
        if isinstance(tools, str) and tools.strip():
            try:
                tools = parse_json(tools)
            except ValueError as error:
                raise DataError(f"{row.place}: `{name}` is not valid JSON: {error}") from None
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise DataError(
                f"{row.place}: `{name}` must be a list of tools, each an object, or its JSON text"
            )
        _check_values({name: tools}, row.place)
        return tools

    def _arguments(self, row: Row) -> dict[str, Any]:
        name = self.dataset.column("chat_template_kwargs")
        arguments = row.fields.get(name)
        if arguments is None:
            return {}
        if not isinstance(arguments, dict):
            raise DataError(f'{row.place}: `{name}` must be an object, such as {{"enable_thinking": false}}')
        for key in arguments:
            if key in RESERVED.split():
                raise DataError(f"{row.place}: `{name}` cannot set `{key}`")
        _check_values(arguments, row.place)
        return arguments


def messages_column(dataset: Dataset, row: Row) -> str:
    """Name of the column with a row's messages: `messages`, what column_map says, or `conversations`."""
    name = dataset.column("messages")
    mapped = name in row.fields or "messages" in dataset.column_map
    return "conversations" if not mapped and "conversations" in row.fields else name


def plain_text(content: str | list[dict[str, Any]] | None) -> str:
    """The text of a message's content, whose parts are joined as multimodal templates join them."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def check_tool_calls(calls: Any, place: str) -> None:
    """Check that each call has the name of a function, and arguments in JSON. Errors: DataError."""
    if not isinstance(calls, list):
        raise DataError(f"{place}: `tool_calls` must be a list of calls")
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            shape = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
            raise DataError(f"{place}: tool call {number} must be an object such as {shape}")
        if isinstance(arguments := function.get("arguments"), str):
            try:
                parse_json(arguments)
            except ValueError as error:
                where = f"{place}: tool call {number}"
                raise DataError(f"{where}: the arguments are not valid JSON: {error}") from None


def _text_part(part: Any, place: str) -> dict[str, Any]:
    """One part of a content that is a list: {"type": "text", "text": ...}."""
    given = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    kind = given.get("type")
    if kind is not None and kind != "text":
        raise DataError(f"{place} is `{kind}`: cocktail trains on text only")
    if kind is None or not isinstance(given.get("text"), str):
        raise DataError(f'{place} must be an object such as {{"type": "text", "text": ...}}')
    if more := sorted(given.keys() - {"type", "text"}):
        raise DataError(f"{place} has a key `{more[0]}`, which would be lost: a part has type and text")
    Row(given, place).text("text")
    return given


def _check_values(values: dict[str, Any], place: str) -> None:
    """Check that values are JSON, in valid Unicode: a template would print anything else as a placeholder."""
    for name, value in values.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(f"{place}: `{name}` holds half a character") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{place}: `{name}` is not JSON: {error}") from None
