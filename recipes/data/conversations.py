"""Rows to conversations, checked, otherwise unchanged; a tokenizer's chat template, which makes them text.

Messages are OpenAI's ({role, content, tool_calls, ...}) or ShareGPT's ({from, value}). A key that is null is
absent, as in transformers; the nulls inside a tool call's arguments are the user's.

The template also tells which of the text the assistant wrote; an answer that it shows in part is not trained.
It may ignore what it is given: tool calls, a role, a misspelt key. Each shape of message is therefore tried
once: it is rendered again with one value changed, and the text must change too.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

from jinja2 import TemplateError, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from recipes.config import Dataset
from recipes.errors import DataError
from recipes.foreign_json import parse_json, unique_keys

from .sources import Row

# ---- rows --------------------------------------------------------------------------------------------------

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
MESSAGE_KEYS = ("role", "content", "tool_calls", "reasoning_content", "name", "tool_call_id")
TWICE = "remove one of them, or name it in column_map={KEY: -}"
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
        listed = row.value(name)
        if not isinstance(listed, list) or not listed:
            text = ", not JSON text" if isinstance(listed, str) else ""
            raise DataError(f"{row.place}: `{name}` must be a list of messages with at least one{text}")
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
                if (ours := names.get(key) or key) in message:
                    raise DataError(f"{place}: two keys hold its `{ours}`, one is `{key}`", TWICE)
                message[ours] = value
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
        hint = f"(hint: column_map={{{self.roles.get(near[0], near[0]) if near else 'ROLE'}: {role}}})"
        raise DataError(f"{place}: unknown role `{role}`: {meant} {hint}")

    def _tools(self, row: Row) -> list[dict[str, Any]] | None:
        """The tools of a row, a list or its JSON text as in TRL; None where there are none. An empty list is
        none too: Llama's template would announce tools."""
        name = self.dataset.column("tools")
        tools = row.fields.get(name)
        if isinstance(tools, str) and tools.strip():
            try:
                tools = parse_json(tools, unique_keys)
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
                parse_json(arguments, unique_keys)
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


# ---- the chat template -------------------------------------------------------------------------------------

GENERATION_MARK = re.compile(r"{%-?\s*generation\s*-?%}")
REASONING = ("reasoning_content", "reasoning", "thinking")  # transformers gives a template all three
LABELS = ("name", "tool_call_id")  # they tell which call a result belongs to; many templates go by the order
DAY = "chat_template_date"  # in tokenizer_config.json: the day that templates which write the date were given
END_OF_TURN = "end_of_turn"  # in tokenizer_config.json, where it is not the eos token
PROBE = " qz7"  # is appended to a value, to see whether the text changes
PRINTED_PART = re.compile(r"qz7['\"]}")  # a part as Python or JSON prints it: the template knows no parts
MARK = "\ue000"  # a character of private use, in place of an answer
BRIEF: list[dict[str, Any]] = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
TEMPLATE_HINT = "(hint: data.chat_template=FILE)"
Span = tuple[int, int]  # first character, and the one after the last


@dataclass(frozen=True)
class Accepted:
    """Forms of a message that a template renders as it should; data sets have all of them."""

    text: bool = True  # content as text
    parts: bool = True  # content as a list of parts
    no_content: bool = True  # an assistant's message of tool calls alone
    objects: bool = True  # arguments of a tool call as an object
    json_texts: bool = True  # the same as JSON text


class ChatTemplate:
    """The template that renders a tokenizer's conversations for training.

    Args:
        marked: the assistant's words will be asked for: TRL's variant of the template is used, if there is
            one, which marks them.

    Errors: DataError where the template is not valid Jinja.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marked: bool) -> None:
        self.tokenizer = tokenizer
        own = tokenizer.chat_template
        self.source: dict[str, str] = own if isinstance(own, dict) else {"default": str(own)}
        if "default" not in self.source:
            names = ", ".join(sorted(self.source))
            raise DataError(f"the tokenizer has no chat template `default`, only {names} {TEMPLATE_HINT}")
        if marked and (variant := training_template(tokenizer)) is not None:
            self.source = {"default": variant}
        self.special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        found = [node for source in self.source.values() for node in parsed(source).find_all(nodes.Node)]
        # texts of its code, the keys and roles that it asks for among them; then its variables and attributes
        self.texts = frozenset(
            n.value for n in found if isinstance(n, nodes.Const) and isinstance(n.value, str)
        )
        self.names = {*self.texts, *(node.name for node in found if isinstance(node, nodes.Name))}
        self.names |= {node.attr for node in found if isinstance(node, nodes.Getattr)}
        self.warnings: dict[str, None] = {}  # in order, each once
        self.tried: set[tuple[object, ...]] = set()  # shapes of messages that are rendered whole
        self.beside: dict[tuple[bool, str], str] = {}  # by tools and arguments
        if "strftime_now" in self.names:
            day = tokenizer.init_kwargs.setdefault(DAY, date.today().isoformat())
            self.source = {
                kind: dated(source, date.fromisoformat(day)) for kind, source in self.source.items()
            }
        self.takes = Accepted()
        self.takes = self._accepted()

    def render(self, conversation: Conversation) -> str:
        """Render all messages. Errors: DataError where the template refuses them, or leaves something out."""
        return self._checked(conversation, self._render(conversation, conversation.messages))

    def render_prompt(self, conversation: Conversation) -> str:
        """Render the messages of the prompt, and what begins the assistant's answer. Errors: DataError."""
        messages = conversation.messages[: conversation.prompt]
        opened = self._render(conversation, messages, opens_answer=True)
        asks = opened != self._render(conversation, messages)
        return opened if asks else self._before(conversation, conversation.prompt)

    def render_answers(self, conversation: Conversation, first: int = 0) -> list[tuple[str, list[Span]]]:
        """Render a conversation for training: texts, and the spans of what the assistant wrote in each.

        A template with `{% generation %}` marks gives the spans of one text; TRL has such variants of many.
        With any other the conversation is rendered up to each answer and past it. An answer begins where it
        differs from others in its place. One that is rewritten once another question follows, as Qwen3's
        template leaves out its thoughts, gets a text of its own, which it ends.

        Args:
            first: message before which no answer is looked for.

        Errors: DataError where the template refuses messages, leaves something out, or changes so much that
        an answer cannot be told apart.
        """
        messages, eos = conversation.messages, self.special.get("eos_token") or "\0"
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if GENERATION_MARK.search(self._source_for(conversation)):
            text, spans = self._run(conversation, messages, marks=True)
            return [(self._checked(conversation, text), self._whole(conversation, answers, text, spans))]
        texts = [(self.render(conversation), dict[int, Span]())]
        for number in (n for n in reversed(answers) if n >= first):
            after = self._render(conversation, messages[: number + 1])
            ends = after, after.removesuffix(eos)  # with which some templates end the last message alone
            start = self._start(conversation, number, after)
            fits = ((told, len(end)) for text, told in texts for end in ends if text.startswith(end))
            told, end = next(fits, (None, len(after)))
            if told is None:
                self.warnings["answers that the chat template rewrites are samples of their own"] = None
                apart = replace(conversation, messages=messages[: number + 1])
                texts.append((self.render(apart), told := {}))
            told[number] = start, end
        found = [
            (text, self._whole(conversation, sorted(told), text, sorted(told.values())))
            for text, told in texts
        ]
        return [one for one in found if one[1]] or found[:1]

    def _whole(
        self, conversation: Conversation, answers: list[int], text: str, spans: list[Span]
    ) -> list[Span]:
        """Return the spans of answers that are shown whole. Others are context: templates leave out thoughts
        once another question follows."""
        if len(answers) != len(spans):  # marks of a template may be around several
            return spans
        begins, said = [0, *(end for _, end in spans)], [conversation.messages[number] for number in answers]
        whole = [is_whole(m, text[at:end]) for m, at, (_, end) in zip(said, begins, spans, strict=False)]
        if not all(whole):
            self.warnings["answers whose thoughts the chat template leaves out are not trained"] = None
        return [span for span, kept in zip(spans, whole, strict=True) if kept]

    def end_of_turn(self) -> str:
        """Return the token that ends what the assistant wrote; empty where none is trained, so that a model
        never learns to stop."""
        ends, said = {*self.tokenizer.get_added_vocab(), self.special.get("eos_token", "")}, ""
        for talk in (BRIEF, BRIEF[:2]):  # templates may rewrite an answer once another question follows
            with suppress(DataError):
                text, spans = self.render_answers(Conversation(talk, ""))[0]
                said = said or "".join(text[start:end] for start, end in spans).rstrip()
        return max((end for end in ends if said.endswith(end)), key=len, default="")

    def _start(self, conversation: Conversation, number: int, after: str) -> int:
        """Return where the words of an answer begin in `after`, which ends with it. Errors: DataError."""
        first = self._before(conversation, number)
        least = len(first.removesuffix(self._beside(conversation)))
        start = common_length(first, after)
        earlier = self._render(conversation, conversation.messages[:number]) if number else first[:least]
        eos = self.special.get("eos_token") or "\0"
        if start < len(earlier.removesuffix(eos).rstrip(" ")):
            raise DataError(
                f"{conversation.place}: the tokenizer's chat template rewrites earlier messages, so the "
                "assistant's words cannot be told apart "
                "(hint: data.chat_template=chatml, or data.assistant_only_loss=false)"
            )
        return min(start, least)

    def _before(self, conversation: Conversation, number: int) -> str:
        """Render what comes before the words of an answer: it is rendered with a mark in place of all that it
        says. Templates that put a system prompt first, or a name, do so here too."""
        answer = {k: v for k, v in conversation.messages[number].items() if k not in (*SAYING, *REASONING)}
        said = [*conversation.messages[:number], answer | {"content": MARK}]
        text, shown, _ = self._render(conversation, said).rpartition(MARK)
        if not shown:
            raise DataError(f"{conversation.place}: the chat template shows no text of message {number}")
        return text.rstrip(" ")

    def _beside(self, conversation: Conversation) -> str:
        """Return what the template puts between its question for an answer and the words: empty thoughts."""
        kind = bool(conversation.tools), repr(conversation.arguments)
        if kind not in self.beside:
            asked, self.beside[kind] = replace(conversation, messages=BRIEF), ""
            with suppress(DataError):
                plain, opened = (self._render(asked, BRIEF[:1], opens) for opens in (False, True))
                before = self._before(asked, 1)
                if opened != plain and before.startswith(opened):
                    self.beside[kind] = before.removeprefix(opened)
        return self.beside[kind]

    def _source_for(self, conversation: Conversation) -> str:
        """The template; of several, `tool_use` for a conversation with tools, as transformers chooses."""
        return self.source.get("tool_use" if conversation.tools else "default") or self.source["default"]

    def _render(
        self, conversation: Conversation, messages: list[dict[str, Any]], opens_answer: bool = False
    ) -> str:
        return self._run(conversation, messages, opens_answer)[0]

    def _run(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        opens_answer: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[Span]]:
        """Render some messages of a conversation. Errors: DataError for whatever the template raises."""
        untyped: Any = chat_template_utils.render_jinja_template
        try:
            texts, spans = untyped(
                conversations=[[self._adapted(message) for message in messages]],
                tools=conversation.tools,
                chat_template=self._source_for(conversation),
                add_generation_prompt=opens_answer,
                return_assistant_tokens_mask=marks,
                **(self.special | conversation.arguments),
            )
        except Exception as error:  # any kind: a template is a program of somebody else
            place = conversation.place
            raise DataError(f"{place}: the chat template refuses this conversation: {error}") from error
        return texts[0], [(start, end) for start, end in spans[0]] if marks else []

    # ---- what templates differ in ------------------------------------------------------------------------

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as this template takes it: content as text or in parts, arguments of a call as an
        object or as JSON text. Transformers asks for text and objects; data sets have both."""
        content, takes = message.get("content"), self.takes
        if isinstance(content, list) and not takes.parts:
            message = message | {"content": plain_text(content)}
        elif isinstance(content, str) and not takes.text:
            message = message | {"content": [{"type": "text", "text": content}]}
        elif content is None and not takes.no_content:
            message = message | {"content": ""}
        if "tool_calls" in message and not (takes.objects and takes.json_texts):
            message = message | {"tool_calls": [self._adapted_call(call) for call in message["tool_calls"]]}
        return message

    def _adapted_call(self, call: dict[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return call | {"function": self._adapted_call(call["function"])}
        arguments = call.get("arguments")
        if isinstance(arguments, str) and not self.takes.json_texts:
            return call | {"arguments": json.loads(arguments)}
        if isinstance(arguments, dict) and not self.takes.objects:
            return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
        return call

    def _accepted(self) -> Accepted:
        """Try messages of our own, to learn what the template accepts."""
        user, value = {"role": "user", "content": PROBE}, '{"qz7": 1}'

        def called(arguments: object, **content: str) -> str | None:
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            return self._tried([user, {"role": "assistant", **content, "tool_calls": [call]}])

        text = self._tried([user]) or ""
        parts = self._tried([{"role": "user", "content": [{"type": "text", "text": PROBE}]}]) or ""
        shows_parts = PROBE.strip() in parts and not PRINTED_PART.search(parts)
        objects = called(json.loads(value), content="") is not None
        json_texts = value in (called(value, content="") or "")
        return Accepted(
            text=PROBE.strip() in text or not shows_parts,
            parts=shows_parts and (parts == text or PROBE.strip() not in text),
            no_content=called(json.loads(value) if objects else value) is not None,
            objects=objects or not json_texts,
            json_texts=json_texts or not objects,
        )

    def _tried(self, messages: list[dict[str, Any]]) -> str | None:
        """Render messages of our own; None where the template refuses them."""
        try:
            return self._render(Conversation(messages, ""), messages)
        except DataError:
            return None

    # ---- nothing is left out -----------------------------------------------------------------------------

    def _checked(self, conversation: Conversation, text: str) -> str:
        """Return `text`. Errors: DataError where the template left something of the conversation out."""
        place, messages = conversation.place, conversation.messages
        for name in [name for name in conversation.arguments if name not in self.names]:
            near = difflib.get_close_matches(name, sorted(self.names), n=1)
            meant = f"did you mean `{near[0]}`?" if near else "chat_template_kwargs would be lost"
            raise DataError(f"{place}: the chat template has no variable `{name}`: {meant}")
        if conversation.tools and ("tools",) not in self.tried:
            if self._render(Conversation(messages, place, None, conversation.arguments), messages) == text:
                raise DataError(f"{place}: the chat template leaves out `tools` {lost('tools')}")
            self.tried.add(("tools",))
        last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for number, message in enumerate(messages):
            shape = (message["role"], frozenset(message), number > last)
            if shape in self.tried:
                continue
            for key in message:
                if (
                    key != "role"
                    and message[key] not in ("", [], {})
                    and not self._shows(conversation, number, key, text)
                ):
                    self._left_out(message, key, f"{place}: message {number}")
            self.tried.add(shape)
        for number, message in enumerate(messages):
            if number > last and message["role"] == "assistant" and not is_whole(message, text):
                said = "the chat template shows only a part of what the assistant says"
                thoughts = f"such as an answer without its thoughts {TEMPLATE_HINT}"
                raise DataError(f"{place}: message {number}: {said}, {thoughts}")
        return text

    def _shows(self, conversation: Conversation, number: int, key: str, text: str) -> bool:
        """True where the text depends on the value of `key` in a message."""
        message = copy.deepcopy(conversation.messages[number])
        value = message[key]
        if isinstance(value, str):
            message[key] = value + PROBE
        elif key == "content":
            value[-1]["text"] += PROBE
        elif key == "tool_calls":
            value[0].get("function", value[0])["name"] += PROBE
        else:
            del message[key]
        changed = [*conversation.messages[:number], message, *conversation.messages[number + 1 :]]
        try:
            return self._render(conversation, changed) != text
        except DataError:
            return True  # it was read, and refused

    def _left_out(self, message: dict[str, Any], key: str, place: str) -> None:
        """Warn of a value that is not rendered. Errors: DataError where it would be lost by that."""
        role = message["role"]
        if key in LABELS:
            self.warnings[f"the chat template does not show `{key}` of role {role}"] = None
        elif key in REASONING and not self.names.isdisjoint(REASONING):
            self.warnings["the chat template shows no reasoning of turns before the last"] = None
        elif key == "content" and "tool_calls" not in message:
            raise DataError(f"{place}: the chat template leaves out messages of role `{role}`")
        elif key in ("content", "tool_calls"):
            raise DataError(f"{place}: the chat template leaves out `{key}` of role {role} {lost(key)}")
        else:
            near = [] if key in REASONING else difflib.get_close_matches(key, MESSAGE_KEYS, n=1)
            meant = f": did you mean `{near[0]}`?" if near else ""
            raise DataError(
                f"{place}: the chat template leaves out `{key}` of role {role}{meant} {lost(key)}"
            )


def is_whole(message: dict[str, Any], shown: str) -> bool:
    """True where `shown` has all that an assistant's message says, white space aside."""
    content, dense = plain_text(message.get("content")), "".join(shown.split())
    said = [content, *(text for key in REASONING if isinstance(text := message.get(key), str))]
    return all("".join(text.split()) in dense for text in said)


def lost(key: str) -> str:
    """Say what to do about a key that the template leaves out."""
    return f"(hint: data.chat_template names a template that shows it; column_map={{{key}: -}} drops it)"


def dated(source: str, day: date) -> str:
    """Have a template write `day` where it asks for the date: a run that is resumed later must find the same
    data. `strftime_now` is a function of the renderer; a macro of that name comes before it."""
    calls = [call for call in parsed(source).find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    asked = [call.args[0] for call in calls if call.node.name == "strftime_now" and call.args]
    formats = {node.value: day.strftime(node.value) for node in asked if isinstance(node, nodes.Const)}
    return (
        f"{{% macro strftime_now(format) %}}{{{{ {json.dumps(formats)}[format] }}}}{{% endmacro %}}\n{source}"
    )


def parsed(source: str) -> Any:
    """Parse a template. Errors: DataError where it is not valid Jinja."""
    untyped: Any = chat_template_utils
    try:
        return untyped._compile_jinja_template(source).environment.parse(source)
    except (TemplateError, RecursionError) as error:
        what = str(error) if isinstance(error, TemplateError) else "nested too deeply"
        raise DataError(f"the chat template is not valid Jinja: {what}") from error


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """TRL's variant of the tokenizer's template, with marks around the assistant's words; None where the
    template has marks, or TRL does not know it. Used here only: the exported tokenizer keeps its own."""
    template: Any = tokenizer.chat_template
    if GENERATION_MARK.search(template["default"] if isinstance(template, dict) else template):
        return None
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(tokenizer)
    except Exception:  # an unknown template, or one that refuses TRL's trials: answers are found by rendering
        return None


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
