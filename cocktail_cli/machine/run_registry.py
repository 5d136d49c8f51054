"""The runs this machine knows: `run.json` in a run's output folder, and a pointer to it under COCKTAIL_HOME.

run.json holds the join token and the host's secret, so it is readable by its user alone (0600). Its last line
is a hash of the others: nothing else on the disk has the run's keys, so a damaged one must not be used.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import platformdirs

from cocktail_cli import __version__
from cocktail_cli.errors import Failure, damaged
from recipes.foreign_json import parse_json

from .network_address import joined, local_host

# stopped: by its host, before all steps were done. died: derived, never written
State = Literal["running", "paused", "finished", "stopped", "failed", "died"]

FILE = "run.json"
CHECK = "sha256"  # its key that is a hash of the others
FORMAT = 5  # of the files in a run's folder. A run in another one is exported, not resumed

# Run names are said aloud and typed. The URL's token is secret, they are not.
ADJECTIVES = (
    "amber bitter brisk calm copper dry early frosted gentle golden hazel iced light mellow misty pale"
)
NOUNS = "badger crane dormouse finch heron lynx marten newt otter owl plover raven stoat swift tern wren"


@dataclass(frozen=True)
class RunRecord:
    """The record of a run on its host's machine."""

    run: str
    url: str  # with the join token: for `status`, and to be shown again
    keys: dict[str, str]  # the fields of transport.RunKeys; keys["stop"] authenticates `cocktail stop`
    pid: int  # of the hub's process
    port: int
    bind: str  # address it listens on
    output_dir: str  # absolute
    base: str  # folder of the base model
    recipe: str
    recipe_hash: str
    started: str  # UTC
    format: int = FORMAT
    version: str = __version__  # of the cocktail that hosted it last; "": of one that did not note it
    base_sha256: str = ""  # of the base's files
    data_sha256: str = ""  # of the corpus
    asked_hash: str = ""  # of the recipe as it was given; recipe_hash: with commits in place of revisions
    state: State = "running"
    steps: int = 0
    eval_loss: float | None = None
    reach: str = ""  # what is known of the address in the URL
    planned: int = 0  # steps of the whole run
    reason: str = ""  # why it ended
    arguments: dict[str, Any] = field(default_factory=dict)  # of its launch, by which `resume` hosts it again
    licence: dict[str, Any] = field(default_factory=dict)  # the fields of recipes.downloads.Licence
    prompt: str | None = ""  # of its held-out data, to try the model with; None: it is none of language
    chats: bool | None = None  # whether it trains conversations; None: not noted

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunRecord:
        """Make a record of what a run.json says, of this format or another."""
        known = {"format": 1, "version": "", **values}
        return cls(**{one.name: known[one.name] for one in fields(cls) if one.name in known})

    @property
    def over(self) -> bool:
        """True where there is nothing to go on with: it is finished, or was stopped and has a model."""
        return self.state == "finished" or (self.state == "stopped" and self.steps > 0)

    def is_of(self, recipe_hash: str) -> bool:
        """Tell whether it was launched with the recipe of this hash."""
        return recipe_hash in (self.asked_hash, self.recipe_hash)

    def local_url(self) -> str:
        """Return the URL by which this machine reaches the hub, whatever address the others use."""
        head, at, place = self.url.rpartition("@")
        return f"{head}{at}{joined(local_host(self.bind), self.port)}/{place.partition('/')[2]}"

    def with_token(self, token: str) -> RunRecord:
        """Replace the join token in the keys and in the URL."""
        from transport import parse_url

        url = str(replace(parse_url(self.url), token=token))
        return replace(self, url=url, keys=self.keys | {"token": token})

    def hub_listens(self) -> bool:
        """Tell whether a process listens at the hub's address."""
        try:
            socket.create_connection((local_host(self.bind), self.port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def state_now(self) -> State:
        """Return the state; a run that should be going on, without a hub or its process, has died."""
        alive = self.state != "running" or self.hub_listens() or self.process_lives()
        return self.state if alive else "died"

    def process_lives(self) -> bool:
        """Tell whether the run's process lives, on Linux: it writes the model when its hub is closed."""
        if sys.platform == "linux":
            with suppress(OSError):
                return b"cocktail" in Path(f"/proc/{self.pid}/cmdline").read_bytes()
        return False

    def ended(self, state: State, steps: int, eval_loss: float | None, reason: str = "") -> RunRecord:
        return replace(self, state=state, steps=steps, eval_loss=eval_loss, reason=reason)


def home() -> Path:
    """Return COCKTAIL_HOME, or the platform's folder for application state."""
    wanted = os.environ.get("COCKTAIL_HOME")
    return Path(wanted).expanduser() if wanted else platformdirs.user_state_path("cocktail")


def check_home() -> None:
    """Raise OSError where `home` cannot be written to."""
    home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=home()):
        pass


def cache() -> Path:
    """Return the folder of fetched base models, which may be deleted at any time."""
    if alone := os.environ.get("COCKTAIL_CACHE"):
        return Path(alone).expanduser()
    wanted = os.environ.get("COCKTAIL_HOME")
    return Path(wanted).expanduser() / "cache" if wanted else platformdirs.user_cache_path("cocktail")


def hashed_files() -> Path:
    """Return the folder that remembers the hashes of long files."""
    return cache() / "hashed"


def new_name() -> str:
    """Draw a name like `amber-otter-42`, to tell a person's runs apart; it is not globally unique."""
    dice = random.SystemRandom()
    return f"{dice.choice(ADJECTIVES.split())}-{dice.choice(NOUNS.split())}-{dice.randrange(10, 100)}"


def save_run(record: RunRecord) -> None:
    """Write run.json and the pointer to it, atomically."""
    write_private(Path(record.output_dir) / FILE, text_of(asdict(record)))
    write_private(home() / "runs" / record.run, record.output_dir)


def text_of(values: dict[str, Any]) -> str:
    """Format a record, with a hash of itself."""
    text = json.dumps(values, indent=1)
    return json.dumps({**values, CHECK: hashlib.sha256(text.encode()).hexdigest()}, indent=1)


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically by one that only its user can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        temporary.touch(mode=stat.S_IRUSR | stat.S_IWUSR)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_run(run: str) -> RunRecord:
    """Read a run's record by name or output folder. Raises Failure (run_unknown), with the known names, or
    (altered) where it is damaged."""
    folder = Path(run)
    if not (folder / FILE).is_file():
        pointer = home() / "runs" / run
        named = re.fullmatch(r"[a-z0-9][a-z0-9.-]*", run) is not None and pointer.is_file()
        folder = Path(pointer.read_text(encoding="utf-8").strip()) if named else folder
    record = read_run(folder)
    if record is None:
        check_record(folder)
        raise unknown(str(folder) if folder.is_dir() else run)
    return record


def unknown(run: str) -> Failure:
    """Make the failure of a run that this machine does not know, with the nearest name that it knows."""
    if Path(run).is_dir():
        hints = ("give the output folder of a launch, or a name of: cocktail runs",)
        return Failure("run_unknown", f"{run} holds no run (no {FILE})", hints=hints)
    names = [known.run for known in known_runs()]
    near = get_close_matches(run, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "cocktail runs lists those that were launched here"
    return Failure("run_unknown", f"no run {run!r} on this machine", hints=(hint,))


def the_run_going_on() -> RunRecord:
    """Return the only run of this machine that goes on, or else the only one that has died.

    Raises Failure (usage) where there is none, or several.
    """
    unfinished = [record for record in known_runs() if record.state == "running"]
    going_on = [record for record in unfinished if record.state_now() == "running"] or unfinished
    if len(going_on) != 1:
        many = ", ".join(record.run for record in going_on) or "none"
        raise Failure("usage", f"which run? Going on here: {many}", hints=("cocktail runs lists all",))
    return going_on[0]


def read_run(folder: Path) -> RunRecord | None:
    """Read the record in an output folder; None where there is no readable one."""
    try:
        return parse_record((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def parse_record(text: str) -> RunRecord:
    """Parse a record. Raises ValueError, TypeError or AttributeError where it is none, or is damaged."""
    found = parse_json(text)
    wanted = {one.name for one in fields(RunRecord)}
    values = {key: value for key, value in found.items() if key != CHECK}
    ours = "\n" in text  # a program that has changed a value writes it in a form of its own; damage does not
    if CHECK in found and ours and text != text_of(values):
        raise ValueError(f"its {CHECK} is of other values")
    if CHECK not in found and values.keys() - wanted:  # a version that knows more keys writes a hash
        raise ValueError(f"it has no {CHECK}, and a key that nobody writes")
    return RunRecord.of(values)


def check_record(folder: Path) -> None:
    """Raise Failure (altered) where an output folder has a record that is damaged."""
    path = folder / FILE
    if not path.exists():
        return
    try:
        parse_record(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError, AttributeError) as error:
        back = "put it back from a copy: nothing else has the run's keys"
        by_hand = f'after a change by hand: remove its line "{CHECK}"'
        raise damaged(path, str(error), back, by_hand) from None


def reread_run(record: RunRecord) -> RunRecord:
    """Read the record again: another command may have changed it."""
    return read_run(Path(record.output_dir)) or record


def known_runs() -> Iterator[RunRecord]:
    """Yield all runs whose folder still exists, by name."""
    pointers = home() / "runs"
    for pointer in sorted(pointers.iterdir()) if pointers.is_dir() else []:
        if pointer.name.endswith(".tmp"):
            continue
        record = read_run(Path(pointer.read_text(encoding="utf-8").strip()))
        if record is not None and record.run == pointer.name:
            yield record
