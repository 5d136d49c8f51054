"""The chat template of a tokenizer: conversations to text, and which of the text the assistant wrote.

A template may ignore what it is given: tool calls, a role, a misspelt key. Each shape of message is therefore
tried once: it is rendered again with one value changed, and the text must change too.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from recipes.errors import DataError

from .conversations import MESSAGE_KEYS, Conversation, plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_MARK = re.compile(r"{%-?\s*generation\s*-?%}")
REASONING = ("reasoning_content", "reasoning", "thinking")  # transformers gives a template all three
LABELS = ("name", "tool_call_id")  # they tell which call a result belongs to; many templates go by the order
DAY = "chat_template_date"  # in tokenizer_config.json: the day that templates which write the date were given
PROBE = " qz7"  # is appended to a value, to see whether the text changes
PRINTED_PART = re.compile(r"qz7['\"]}")  # a part as Python or JSON prints it: the template knows no parts
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
        trees = [parsed(source) for source in self.source.values()]
        self.texts = frozenset(text for tree in trees for text in texts_in(tree))
        self.names = self.texts | {name for tree in trees for name in names_in(tree)}
        self.warnings: dict[str, None] = {}  # in order, each once
        self.tried: set[tuple[object, ...]] = set()  # shapes of messages that are rendered whole
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
        return self._render(conversation, conversation.messages[: conversation.prompt], opens_answer=True)

    def render_with_spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Render all messages; returns the text and the spans of what the assistant wrote. Errors: DataError.

        A template with `{% generation %}` marks gives them; TRL has such variants of many. With any other
        the conversation is rendered up to each answer and past it; that needs a template which only appends,
        and this is checked.
        """
        if GENERATION_MARK.search(self._source_for(conversation)):
            text, spans = self._run(conversation, conversation.messages, marks=True)
            return self._checked(conversation, text), spans
        text = self.render(conversation)
        return text, list(self._appended(conversation, text))

    def trains_end_of_turn(self) -> bool:
        """False where the end token of a turn is no part of what the assistant wrote, which would then never
        learn to stop. Templates that need other conversations than ours are believed."""
        turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        try:
            text, spans = self.render_with_spans(Conversation(turns, ""))
        except DataError:
            return True
        said = "".join(text[start:end] for start, end in spans).rstrip()
        ends = (*self.tokenizer.get_added_vocab(), self.special.get("eos_token") or said)
        return said.endswith(ends)

    def _appended(self, conversation: Conversation, text: str) -> Iterator[Span]:
        messages, eos = conversation.messages, self.special.get("eos_token") or "\0"
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            earlier = self._render(conversation, messages[:number]) if number else ""
            opened = self._render(conversation, messages[:number], opens_answer=True) if number else ""
            after = self._render(conversation, messages[: number + 1])
            if not text.startswith(after):
                after = after.removesuffix(eos)  # some templates end the last message, and it alone, with it
            # a prompt may open the answer with more than the finished answer has, such as empty thoughts
            start = common_length(opened, after)
            if start < len(earlier.removesuffix(eos)) or not text.startswith(after):
                raise DataError(
                    f"{conversation.place}: the tokenizer's chat template rewrites earlier messages, so the "
                    "assistant's words cannot be told apart "
                    "(hint: data.chat_template=chatml, or data.assistant_only_loss=false)"
                )
            yield start, len(after)

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
        from transformers.utils import chat_template_utils

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


def lost(key: str) -> str:
    """Say what to do about a key that the template leaves out."""
    return f"(hint: data.chat_template names a template that shows it; column_map={{{key}: -}} drops it)"


def dated(source: str, day: date) -> str:
    """Have a template write `day` where it asks for the date: a run that is resumed later must find the same
    data. `strftime_now` is a function of the renderer; a macro of that name comes before it."""
    from jinja2 import nodes

    calls = [call for call in parsed(source).find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    asked = [call.args[0] for call in calls if call.node.name == "strftime_now" and call.args]
    formats = {node.value: day.strftime(node.value) for node in asked if isinstance(node, nodes.Const)}
    return (
        f"{{% macro strftime_now(format) %}}{{{{ {json.dumps(formats)}[format] }}}}{{% endmacro %}}\n{source}"
    )


def parsed(source: str) -> Any:
    """Parse a template. Errors: DataError where it is not valid Jinja."""
    from jinja2 import TemplateError
    from transformers.utils import chat_template_utils

    untyped: Any = chat_template_utils
    try:
        return untyped._compile_jinja_template(source).environment.parse(source)
    except (TemplateError, RecursionError) as error:
        what = str(error) if isinstance(error, TemplateError) else "nested too deeply"
        raise DataError(f"the chat template is not valid Jinja: {what}") from error


def names_in(tree: Any) -> Iterator[str]:
    """Yield the variables and attributes of a template's code."""
    from jinja2 import nodes

    yield from (node.name for node in tree.find_all(nodes.Name))
    yield from (node.attr for node in tree.find_all(nodes.Getattr))


def texts_in(tree: Any) -> Iterator[str]:
    """Yield the texts of a template's code: the keys and roles that it asks for are among them."""
    from jinja2 import nodes

    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


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
