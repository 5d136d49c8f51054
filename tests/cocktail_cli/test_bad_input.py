"""Bad input ends with its exit code and one clear error: what was met, and what to do."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from in_this_process import Run
from safetensors.torch import load_file, save_file
from test_run_registry import record

from cocktail_cli.machine import save_run
from recipes.config import load_recipe
from recipes.models import prepare_base
from transport import RunKeys

ROWS = "".join(json.dumps({"text": f"row {i} of many more rows"}) + "\n" for i in range(20))
RECIPE = """version: 1
name: mine
model: {model_name_or_path: builtin:tiny-gpt-neox}
datasets: [{path: rows.jsonl}]
data: {max_length: 64}
"""
URL = str(RunKeys.generate().url("127.0.0.1", 1, "amber-otter-42"))
AGAIN = "ask the run's host for it again"


@dataclass(frozen=True)
class Bad:
    """A command with bad input, its exit code, and words of the cause and of the remedy."""

    typed: str
    exit: int
    cause: str
    remedy: str


COMMAND_LINES = [
    Bad("lauch smoke", 2, "No such command 'lauch'", "Did you mean 'launch'?"),
    Bad("recipes cpy", 2, "No such command 'cpy'", "Did you mean 'copy'?"),
    Bad("launch smoke --pers 2", 2, "no such option: --pers", "did you mean --peers?"),
    Bad("status --pees", 2, "No such option: --pees", "--peers"),
    Bad("launch smoke --peers two", 2, "'--peers': it should be a valid integer", "cocktail launch --help"),
    Bad("launch smoke --peers -1", 2, "greater than or equal to 0", "cocktail launch --help"),
    Bad("launch smoke --port 99999", 2, "'--port': it should be less than or equal to 65535", "--help"),
    Bad("launch smoke --progress fancy", 2, "'--progress': 'fancy' is not one of 'auto', 'rich'", "--help"),
    Bad("launch smoke --max-up -5mbit", 2, "'-5mbit' is not a rate", "write 20mbit, 500kbit or 2MB/s"),
    Bad("launch smoke --max-up nan", 2, "'nan' is not a rate", "write 20mbit"),
    Bad("launch smoke --max-down 0", 2, "'0' is not a rate", "write 20mbit"),
    Bad("launch smoke --vram-limit -1GiB", 2, "'-1GiB' is not a size", "write 24GiB"),
    Bad("launch smoke --device gpu", 2, "--device gpu", "expected auto, cpu, mps"),
    Bad("launch smoke --device cuda:99", 4, "--device cuda:99: this machine has", "--device auto"),
    Bad("launch smoke --vram-limit 8GiB --device cpu", 4, "cpu has no memory of its own", "leave it out"),
    Bad("launch smoke --no-train --peers 2", 2, "--peers 2 some", "give one of them"),
    Bad(
        "launch smoke --bind no-such.invalid",
        4,
        "cannot listen on no-such.invalid",
        "--bind takes an address",
    ),
    Bad("launch smoke --bind no-such.invalid --port 0", 4, "cannot listen on", "--bind takes an address"),
    Bad("launch smoke --advertise http://x", 2, "--advertise 'http://x'", "HOST or HOST:PORT"),
    Bad("launch smoke -o rows.jsonl", 4, "rows.jsonl is a file", "-o DIR"),
    Bad("launch smoke -o rows.jsonl/x", 4, "Not a directory", "choose another place: -o DIR"),
    Bad("launch ./model rows.jsonl", 2, "which data is ./model trained on?", "is it --data rows.jsonl?"),
    Bad("launch smoke learing_rate=1", 3, "learing_rate", "did you mean `training.learning_rate`?"),
    Bad("launch smoke max_steps", 3, "max_steps", "an override is written key=value"),
    Bad("launch smoke max_steps=abc", 3, "must be a whole number, not 'abc'", "recipes schema training"),
    Bad("launch smoke learning_rate=-1", 3, "must be above 0, not -1", "recipes schema training"),
    Bad("launch smoke learning_rate=nan", 3, "must be a number, not 'nan'", "recipes schema training"),
    Bad("launch smok", 3, "no recipe of this name", "did you mean `smoke`?"),
    Bad("launch mime.yaml", 3, "no such file", "did you mean mine.yaml?"),
    Bad("launch elsewhere/x.yaml", 3, "no such file", "cocktail recipes list"),
    Bad("resume amber-oter-42", 3, "no run 'amber-oter-42'", "did you mean amber-otter-42?"),
    Bad("logs nowhere", 3, "no run 'nowhere'", "cocktail runs"),
    Bad("resume folder", 3, "folder holds no run (no run.json)", "cocktail runs"),
    Bad("generate folder x", 3, "folder holds no model", "cocktail export RUN -o DIR"),
    Bad(
        "status amber-otter-42", 5, "the hub of amber-otter-42 (process 1)", "cocktail resume amber-otter-42"
    ),
    Bad("stop amber-otter-42", 5, "the hub of amber-otter-42 (process 1)", "cocktail resume amber-otter-42"),
    Bad(f"join -y {URL[:60]}", 2, "the run URL is incomplete", AGAIN),
    Bad(f"join -y {URL[:-3]}", 2, "the checksum in its token does not fit", AGAIN),
    Bad(f"join -y {URL.replace('-42', '-43')}", 2, "a character of it is wrong", AGAIN),
    Bad(f"join -y -- {URL.removeprefix('cocktail://')}", 2, "expected 'cocktail://'", AGAIN),
    Bad(f"join -y {URL.replace('cocktail', 'https', 1)}", 2, "expected 'cocktail://'", AGAIN),
    Bad(f"join -y {URL.replace(':1/', '/')}", 2, "not of the form host:port", AGAIN),
    Bad(f"status {URL[:70]}", 2, "the run URL is incomplete", AGAIN),
    Bad("join -y @nofile", 2, "no such file: nofile", "cocktail join @FILE"),
    Bad("join -y", 2, "which run? the URL is missing", "cocktail join cocktail://"),
]


@pytest.fixture(autouse=True)
def here(cocktail: Run, tmp_path: Path) -> None:
    """A folder with rows, a recipe and an empty folder; and a run whose hub was killed."""
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "folder").mkdir()
    url = str(RunKeys.generate().url("127.0.0.1", 1, "amber-otter-42"))
    save_run(record(tmp_path / "out"))
    killed = json.loads((tmp_path / "out" / "run.json").read_text())
    (tmp_path / "out" / "run.json").write_text(
        json.dumps(killed | {"url": url, "port": 1, "bind": "127.0.0.1"})
    )


@pytest.mark.parametrize("bad", COMMAND_LINES, ids=lambda bad: bad.cause)
def test_a_bad_command_line_ends_with_cause_and_remedy(cocktail: Run, bad: Bad) -> None:
    said = cocktail(*bad.typed.split())

    assert said.exit == bad.exit
    assert bad.cause in said.err
    assert bad.remedy in said.err
    assert said.err.count("error: ") == 1


FILES = {  # data: bytes of the file, cause, remedy
    "empty.jsonl": (b"", "empty.jsonl: the data set is empty", "it needs rows"),
    "blank.jsonl": (b"\n \n\n", "the data set is empty", "it needs rows"),
    "cut.jsonl": (ROWS.encode() + b'{"text": "cut\n', "cut.jsonl:21: not valid JSON", "correct this line"),
    "utf16.jsonl": (ROWS.encode("utf-16"), "utf16.jsonl:1: not UTF-8 text", "iconv -f UTF-16 -t UTF-8"),
    "latin.jsonl": ('{"text": "café"}\n'.encode("latin-1"), "not UTF-8 text", "iconv -f ENCODING -t UTF-8"),
    "empty.csv": (b"", "the data set is empty", "it needs rows"),
    "header.csv": (b"text\n", "the data set is empty", "it needs rows"),
    "empty.txt": (b"", "the data set is empty", "it needs rows"),
    "cut.parquet": (b"PAR1 and no footer", "cut.parquet: cannot be read", "download or copy it again"),
    "quote.csv": (b'text,label\na,1\n"open,1\n', "quote.csv:3: not a valid table", "quotes around fields"),
    "more.csv": (
        b'text,label\n"a\nb",1\na, b,1\n',
        "more.csv:4: fields: 3, in the header: 2",
        "quotes around",
    ),
    "fewer.tsv": (b"text\tlabel\na\t1\nb\n", "fewer.tsv:3: fields: 1, in the header: 2", "as many fields"),
    "twice.csv": (b"text,text\na,b\n", "twice.csv:1: two columns are named 'text'", "rename one"),
    "upper.csv": (b"Text,Label\na,1\n", "columns Label, Text are", "datasets.0.column_map.text=Text"),
    "semicolons.csv": (b"text;n\na, b;1\n", "fields: 2, in the header: 1", "its separator is ';'"),
    "semi.csv": (b"question;answer\na;b\n", "columns question;answer are", "its separator is ';'"),
    "pairs.jsonl": (
        b'{"question": "a", "answer": "b"}\n',
        "columns answer, question are",
        "datasets.0.column_map.prompt=question datasets.0.column_map.completion=answer",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_of_data_ends_with_cause_and_remedy(cocktail: Run, tmp_path: Path, name: str) -> None:
    content, cause, remedy = FILES[name]
    (tmp_path / name).write_bytes(content)
    said = cocktail("validate", "mine.yaml", "--data", name)

    assert (said.exit, cause in said.out, remedy in said.out) == (3, True, True), said.out


@pytest.mark.parametrize(
    ("path", "cause", "remedy"),
    [
        ("row.jsonl", "row.jsonl: no such file or folder", "did you mean rows.jsonl?"),
        ("far/away.jsonl", "no such file or folder", "check the path"),
        ("*.none", "no such file or folder", "datasets.0.data_files='*.none'"),
        ("link.jsonl", "a link to gone.jsonl, which is not there", "check the link"),
        ("folder", "folder: no data in this folder", "it may hold files of .jsonl"),
    ],
)
def test_data_that_are_not_there_end_with_cause_and_remedy(
    cocktail: Run, path: str, cause: str, remedy: str
) -> None:
    if path == "link.jsonl":
        Path(path).symlink_to("gone.jsonl")
    said = cocktail("validate", "mine.yaml", "--data", path)

    assert (said.exit, cause in said.out, remedy in said.out) == (3, True, True), said.out


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf" + ROWS.encode(), ROWS.replace("\n", "\r\n").encode()])
@pytest.mark.parametrize("recipe", [b"\xef\xbb\xbf" + RECIPE.encode(), RECIPE.replace("\n", "\r\n").encode()])
def test_byte_order_marks_and_windows_lines_are_no_errors(
    cocktail: Run, tmp_path: Path, data: bytes, recipe: bytes
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(data)
    (tmp_path / "mine.yaml").write_bytes(recipe)

    assert cocktail("validate", "mine.yaml").exit == 0


@pytest.mark.parametrize(
    ("content", "cause", "remedy"),
    [
        (b"", "the file is empty", "cocktail recipes copy smoke"),
        (b"- a\n", "a recipe is a mapping of keys to values", "cocktail recipes copy smoke"),
        (b"version: 1\n\tname: x\n", "not valid YAML", "indent with spaces"),
        (RECIPE.encode("utf-16"), "not UTF-8 text", "save the file as UTF-8"),
        (RECIPE.encode() + b"training: {learing_rate: 1}\n", "learing_rate", "did you mean `learning_rate`?"),
    ],
    ids=["empty", "list", "tab", "UTF-16", "misspelt key"],
)
def test_a_bad_recipe_ends_with_cause_and_remedy(
    cocktail: Run, tmp_path: Path, content: bytes, cause: str, remedy: str
) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    said = cocktail("validate", "bad.yaml")

    assert (said.exit, cause in said.err, remedy in said.err) == (3, True, True), said.err


IN_BIN = {"a weight is gone": "the weights lack gpt_neox.", "NaN": "_norm.bias has a number that is NaN"}
MODELS = {  # what is wrong with a model's folder: cause, remedy
    "a file": ("is a file, expected a model's folder", "the folder with config.json"),
    "a GGUF file": ("is a file, expected a model's folder", "name the model that it was made from"),
    "no config": ("no config.json", "a folder that save_pretrained wrote"),
    "a folder above": ("no config.json", "/checkpoint-10?"),
    "an adapter": ("no config.json", "merge it into its base with peft"),
    "an adapter too": ("an adapter lies beside the model", "move adapter_config.json away"),
    "no JSON": ("config.json is not valid JSON", "copy it again"),
    "unknown type": ("cannot load this config.json: The checkpoint", "model type `lama`"),
    "wrong type": ("cannot load this config.json: Validation error", "'hidden_size' expected int, got str"),
    "encoder": ("in BertLMHeadModel tokens see later ones", "a decoder, such as GPT-2"),
    "encoder and decoder": ("a t5 model cannot learn to continue text", "a decoder, such as GPT-2"),
    "no tokenizer": ("no tokenizer in this folder", "model.tokenizer_name_or_path"),
    "no weights": ("no weights", "save_pretrained writes them"),
    "GGUF": ("no weights", "name the model that it was made from"),
    "cut": ("model.safetensors has 100000 bytes", "download or copy it again"),
    "empty": ("is not a safetensors file", "download or copy it again"),
    "another size": ("embed_in.weight is (", "config.json and weights of one model"),
    "pointer": ("model.safetensors is a git-lfs pointer", "`git lfs pull` fetches it"),
    "pointer for a tokenizer": ("tokenizer.json is a git-lfs pointer", "`git lfs pull` fetches it"),
    "images": ("a mistral3 model is multimodal, which is not supported", "a model of text alone"),
    "prefix": ("the weights lack gpt_neox.embed_in.weight, and have module.embed_", "of one model"),
    "NaN": ("gpt_neox.final_layer_norm.bias has a number that is NaN", "convert the model again"),
    "infinity": ("gpt_neox.final_layer_norm.bias has a number that is NaN or inf", "convert the model again"),
    "a shard is gone": ("model-2.safetensors", "download or save them again"),
    "generation": ("generation_config.json: transformers refuses it: `max_new", "or remove the file"),
    "an index is gone": ("model-1-of-2.safetensors is one of several", "download or copy it again"),
    "a weight is gone": ("the weights lack gpt_neox.", "config.json and weights of one model"),
    "a weight is gone, a tied one twice": ("the weights lack gpt_neox.", "weights of one model"),
    **{f"{what} in a .bin": (said, "") for what, said in IN_BIN.items()},
}


@pytest.mark.parametrize("wrong", MODELS)
def test_a_model_that_cannot_be_trained_ends_with_cause_and_remedy(
    cocktail: Run, tmp_path: Path, tiny_folder: Path, wrong: str
) -> None:
    broken = spoil(shutil.copytree(tiny_folder, tmp_path / "broken"), wrong)
    said = cocktail("validate", str(broken), "--data", "rows.jsonl")

    cause, remedy = MODELS[wrong]
    told = said.out + said.err
    assert (said.exit, cause in told, remedy in told) == (3, True, True), told


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a tiny model with its tokenizer, as save_pretrained writes it."""
    smoke, folder = load_recipe("smoke"), tmp_path_factory.mktemp("model") / "base"
    return prepare_base(smoke, folder).folder


def spoil(folder: Path, wrong: str) -> Path:
    """Break the model's folder in the way that `wrong` says."""
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    kinds = {"images": "mistral3", "encoder": "bert", "encoder and decoder": "t5", "unknown type": "lama"}
    if wrong in ("a file", "a GGUF file"):
        return weights if wrong == "a file" else weights.rename(folder / "model.gguf")
    if wrong == "a folder above":
        return shutil.copytree(folder, folder.with_name("above") / "checkpoint-10").parent
    if wrong.startswith("an adapter"):
        (folder / "adapter_config.json").write_text("{}")
    if wrong == "generation":
        (folder / "generation_config.json").write_text('{"max_new_tokens": 0}')
    if "twice" in wrong:
        config["tie_word_embeddings"] = True
    if wrong in kinds:
        config = {"model_type": kinds[wrong], "vocab_size": config["vocab_size"]}
    elif wrong == "wrong type":
        config["hidden_size"] = str(config["hidden_size"])
    elif wrong == "another size":
        config["hidden_size"] *= 2
    (folder / "config.json").write_text("{" if wrong == "no JSON" else json.dumps(config))
    if wrong in ("no config", "an adapter"):
        (folder / "config.json").unlink()
    elif wrong == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif wrong in ("no weights", "GGUF"):
        weights.rename(folder / ("model.gguf" if wrong == "GGUF" else "weights.pt"))
    elif wrong in ("cut", "empty"):
        weights.write_bytes(weights.read_bytes()[: 100_000 if wrong == "cut" else 0])
    elif wrong.startswith("pointer"):
        (weights if wrong == "pointer" else folder / "tokenizer.json").write_text(pointer)
    elif wrong == "an index is gone":
        weights.rename(folder / "model-1-of-2.safetensors")
    elif wrong.startswith(("a weight is gone", "prefix", "NaN", "infinity", "a shard is gone")):
        tensors = load_file(weights)
        if wrong.startswith("a weight is gone"):
            tensors.pop(next(name for name in tensors if "dense" in name))
        elif wrong == "prefix":
            tensors = {f"module.{name.removeprefix('gpt_neox.')}": one for name, one in tensors.items()}
        elif wrong.startswith(("NaN", "infinity")):
            tensors["gpt_neox.final_layer_norm.bias"][-1] = float("-inf" if wrong == "infinity" else "nan")
        save_file(tensors, weights, metadata={"format": "pt"})
        if wrong.endswith(".bin"):
            weights.unlink()
            torch.save(tensors, folder / "pytorch_model.bin")
        if wrong == "a shard is gone":
            places = dict.fromkeys(tensors, "model-1.safetensors") | {
                next(iter(tensors)): "model-2.safetensors"
            }
            weights.rename(folder / "model-1.safetensors")
            index = {"metadata": {}, "weight_map": places}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
