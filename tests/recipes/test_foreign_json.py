"""JSON of others is measured before it is parsed, and whatever is wrong with it is one sentence."""

import ast
import json
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hostile_bytes import DEEP, JSON
from hypothesis import given
from hypothesis import strategies as some

from compress import PacketError
from recipes.config import Dataset, recipe_from_json
from recipes.config.document import override, parse, parse_value, read
from recipes.data import read_rows
from recipes.data.conversations import check_tool_calls
from recipes.downloads import from_pretrained_options
from recipes.errors import InputError
from recipes.foreign_json import (
    MOST_CONTAINERS,
    MOST_LEVELS,
    MOST_VALUES,
    check_json,
    check_json_file,
    parse_json,
    read_object,
)
from recipes.models import base_manifest, context_of
from recipes.models.trainable import adapter_base
from recipes.weight_files import model_config_files, open_tensors, read_header

HOSTILE = JSON | {
    "behind a text": b'{"a": "' + b'\\"[' * 9 + b'", "b": ' + b"[" * DEEP,
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a text": b'"config"',
    "null": b"null",
    "quotes": b'"\\' * 10**6,  # from each quote on, a text without an end
    "many numbers": b'{"a": [' + b"1.5," * (MOST_VALUES + 1) + b"2]}",
    "many": b'{"a": [' + b"[]," * MOST_CONTAINERS + b"[]]}",
}
JSONS = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
)


@given(JSONS, some.booleans())
def test_what_json_can_write_is_read_as_json_reads_it(value: Any, ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii)

    assert parse_json(text) == json.loads(text)
    if ascii:
        assert parse_json(text.encode()) == json.loads(text)


@given(some.text('[]{}"\\ a,:1', max_size=60))
def test_the_measure_of_a_text_that_is_json_is_that_of_its_value(text: str) -> None:
    """A bracket in a text is none, whatever is escaped there."""
    try:
        value = json.loads(text)
    except ValueError:
        return
    assert parse_json("[" * 60 + text + "]" * 60) is not None
    if depth(value) > 4:
        with pytest.raises(ValueError, match="nested deeper"):
            check_json(b"[" * 60 + text.encode() + b"]" * 60)


def depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(depth, inside), default=0)


def test_the_levels_that_are_allowed_are_read_and_one_more_is_not() -> None:
    parse_json("[" * MOST_LEVELS + "]" * MOST_LEVELS)
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        parse_json("[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1))


def test_infinity_and_long_integers_of_real_configs_are_read() -> None:
    """`time_step_limit` of Mamba, `model_max_length` of half of all tokenizers."""
    told = parse_json(
        '{"time_step_limit": [0.0, Infinity], "model_max_length": 1000000000000000019884624838656}'
    )

    assert told == {"time_step_limit": [0.0, float("inf")], "model_max_length": 10**30 + 19884624838656}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_one_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(ValueError, match=r".") as told:
        check_json_file(path)
    with pytest.raises(InputError, match=r"config\.json"):
        read_object(path)

    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 100


def of_config(read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    def reading(folder: Path, text: bytes) -> object:
        (folder / "config.json").write_bytes(text)
        return read(folder)

    return reading


def of_header(folder: Path, text: bytes) -> object:
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("rb") as file:
        return read_header(file, "model.safetensors")


def of_index(folder: Path, text: bytes) -> object:
    (folder / "model.safetensors.index.json").write_bytes(text)
    with ExitStack() as files:
        return open_tensors(folder, files)


def of_adapter(folder: Path, text: bytes) -> object:
    (folder / "adapter_config.json").write_bytes(text)
    return adapter_base(folder)


def of_generation(folder: Path, text: bytes) -> object:
    (folder / "config.json").write_bytes(b"{}")
    (folder / "generation_config.json").write_bytes(text)
    return model_config_files(folder)


def of_base(folder: Path, text: bytes) -> object:
    (folder / "tokenizer.json").write_bytes(text)
    return base_manifest(folder)


def of_rows(folder: Path, text: bytes) -> object:
    (folder / "rows.jsonl").write_bytes(text + b"\n")
    return list(read_rows(Dataset(path=str(folder / "rows.jsonl"))))


def of_options(folder: Path, text: bytes) -> object:
    """A tokenizer's config is transformers' to report."""
    (folder / "tokenizer_config.json").write_bytes(text)
    return from_pretrained_options(folder, code=True)


def of_calls(folder: Path, text: bytes) -> object:
    call = {"function": {"name": "f", "arguments": text.decode(errors="surrogateescape")}}
    return check_tool_calls([call], "row 1")


def of_recipe(folder: Path, text: bytes) -> object:
    (folder / "my.yaml").write_bytes(text)
    return parse(read(folder / "my.yaml"), "my.yaml")


READERS: dict[str, Callable[[Path, bytes], object]] = {
    "context": of_config(context_of),
    "config": of_config(model_config_files),
    "generation config": of_generation,
    "options": of_options,
    "header": of_header,
    "index": of_index,
    "adapter": of_adapter,
    "base": of_base,
    "row": of_rows,
    "tool call": of_calls,
    "recipe of a run": lambda _, text: recipe_from_json(text.decode(errors="surrogateescape")),
    "recipe": of_recipe,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_every_reader_of_foreign_json_tells_whose_fault_it_is(reader: str, name: str, tmp_path: Path) -> None:
    """Never a RecursionError, a MemoryError, or an error of the interpreter's limits."""
    taken = reader in ("options", "tool call") or (reader, name) == ("row", "empty")
    try:
        READERS[reader](tmp_path, HOSTILE[name])
    except (InputError, PacketError) as error:
        told = str(error)
    else:
        told = ""

    assert taken or told, "it has to be an object"
    assert "set_int_max_str_digits" not in told


ENDLESS = {
    "decimal": "1" * 10**5,
    "hexadecimal": "0x" + "f" * 10**5,
    "octal": "0" + "7" * 10**5,
    "binary": "0b" + "1" * 10**5,
    "base 60": "1" + ":1" * 10**5,
    "base 60, a fraction": "1" + ":1" * 10**4 + ".5",
    "a tag": "!!timestamp x",
    "another tag": "!!bool x",
    "an empty integer": '!!int ""',
    "a tag of one's own": "!secret x",
    "a tagged list": "!!set [a]",
    "lists": "[" * DEEP,
    "mappings": "{a: " * DEEP,
    "blocks": "- " * DEEP + "x",
    "an alias": "[&a x, *a]",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_yaml_that_no_recipe_has_is_refused_before_it_is_built(name: str) -> None:
    with pytest.raises(InputError):
        parse(f"version: {ENDLESS[name]}\n", "my.yaml")
    with pytest.raises(ValueError, match=r"."):
        parse_value(ENDLESS[name])
    (problem,) = override(parse("version: 1\n", "my.yaml"), [f"learning_rate={ENDLESS[name]}"])
    assert problem.file == "override"


def test_numbers_and_hashes_that_recipes_do_have_are_read() -> None:
    told = parse_value('{a: 1e-4, b: 0x1f, c: "' + "f" * 128 + '", d: -12.5}')

    assert told == {"a": "1e-4", "b": 31, "c": "f" * 128, "d": -12.5}


def test_a_header_counts_its_bytes_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with path.open("rb") as file, pytest.raises(InputError, match="not a safetensors file"):
        read_header(file, "model.safetensors")


# ---- nobody can forget it ----------------------------------------------------------------------------------

ROOMS = ("cocktail_cli", "recipes", "transport")
READERS_OF_TEXT = {"loads", "load", "safe_load", "decode", "Decoder", "compose", "model_validate_json"}
LIBRARIES = ("json", "yaml", "msgspec.json", "msgspec.msgpack", "Recipe")
# Modules that read without a measure, and what they read.
UNMEASURED = {
    "recipes/foreign_json.py": "measured just before",
    "recipes/config/document.py": "YAML, whose events are checked first",
    "recipes/config/loader.py": "pydantic, which stops at 200 levels with an error of its own",
    "recipes/data/conversations.py": "arguments that `check_tool_calls` has parsed",
    "recipes/data/corpus.py": "the host's own file",
    "recipes/algorithm/aggregator.py": "the host's own file",
    "recipes/file_hashes.py": "this machine's own file",
    "recipes/models/fused_kernels.py": "a config that this process has written",
    "recipes/training/peer_checkpoint.py": "the peer's own file",
    "transport/protocol/message_codec.py": "messages, typed; others measured just after",
    "transport/protocol/sample_ranges.py": "the hub's own ledger, typed",
    "transport/ledger/run_ledger.py": "the hub's own ledger",
    "transport/ledger/book_opening.py": "the hub's own ledger",
    "transport/ledger/books.py": "the hub's own ledger",
    "cocktail_cli/host/run_folder.py": "the host's own file",
    "cocktail_cli/installation.py": "pip's own file",
    "cocktail_cli/machine/local_files.py": "this machine's own file",
    "cocktail_cli/ui/metrics_lines.py": "this machine's own file",
    "cocktail_cli/commands/status.py": "the last line of this machine's own file",
    "cocktail_cli/host/local_peers.py": "output of our own process",
}
OF_EXTENSIONS = {
    "cocktail_cli/extensions/stages/lines/line_probe.py": "messages, typed",
    "cocktail_cli/extensions/stages/lines/stage_line.py": "messages, typed",
    "cocktail_cli/extensions/multi_gpu/gpu_process.py": "a pipe of our own process",
    "cocktail_cli/extensions/multi_gpu/gpu_processes.py": "a pipe of our own process",
    "cocktail_cli/extensions/dashboard/__init__.py": "output of our own process",
    "cocktail_cli/extensions/dashboard/report_page.py": "YAML that this program has written just now",
    "cocktail_cli/extensions/proofs/signed_documents.py": "NotGenuine for all of it",
    "cocktail_cli/extensions/standby/standby_session.py": "this machine's own file",
    "cocktail_cli/extensions/privacy/budget.py": "this machine's own file",
    "cocktail_cli/extensions/privacy/hub.py": "the hub's own ledger",
    "cocktail_cli/extensions/standby/hub.py": "the hub's own ledger",
    "cocktail_cli/extensions/standby/follower.py": "the standby's own file",
    "cocktail_cli/extensions/standby/ledger_copy.py": "rows that become LedgerError, whatever is wrong",
}


def reads_text(path: Path) -> bool:
    calls = (
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    )
    names = {ast.unparse(call.func).split("[")[0] for call in calls}
    return any(
        name.rpartition(".")[0] in LIBRARIES and name.rpartition(".")[2] in READERS_OF_TEXT for name in names
    )


def test_what_others_have_written_is_read_by_what_measures_it() -> None:
    root = Path(__file__).resolve().parents[2]
    found = {
        path.relative_to(root).as_posix()
        for room in ROOMS
        for path in (root / room).rglob("*.py")
        if reads_text(path)
    }
    of_extensions = {path for path in found if "extensions/" in path}

    assert found - of_extensions == UNMEASURED.keys()
    assert of_extensions <= OF_EXTENSIONS.keys()
