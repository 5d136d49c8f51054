"""A real volunteer and a hub that lies about each size in turn: one sentence says whose fault it is, and the
volunteer's memory stays that of an honest join.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forked import PATIENCE, Command, Forked, needs_fork
from lying_host import offered, serving, sha256
from lying_hub import WELCOME, LyingHub, Serve, endless
from msgspec.structs import replace
from stalling_hub import Material
from waiting import until

from cocktail_cli.errors import EXIT
from recipes.models import BUILTIN_MODELS
from transport.protocol import RunKeys, messages
from transport.transfer import CHUNK, HASH_BLOCK
from transport.wire import RouterWire

pytestmark = [pytest.mark.slow, needs_fork]

LIE = 1 << 36  # bytes: 64 GB
MORE = 64 << 20  # bytes by which a volunteer may grow beyond an honest join
PAGE = os.sysconf("SC_PAGE_SIZE")
FLOODED = 3000  # messages: 190 MB of rounds, 786 MB of chunks
ROUND = messages.Round(0, 0, 100, ["ann"], 4, True)
STATUS = {
    **{"parameters": 1_012_992, "state": "running", "step": 0, "max_steps": 100, "peers": [], "others": []},
    **{"loss": None, "eval_loss": None, "tokens": 0, "tokens_per_s": 0.0, "eta_s": None, "refused": 0},
}
WEIGHTS = "model.safetensors"
ENOUGH = messages.Over("that was enough", True)


@dataclass(frozen=True)
class Honest:
    """An honest host's side of a run."""

    welcome: messages.Welcome
    serves: dict[str, Serve]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Honest:
    material = Material.prepare(tmp_path_factory.mktemp("base"))
    lease, recipe = material.corpus.pack([0, 1, 2, 3]), material.recipe
    serves: dict[str, Serve] = {"lease/": lambda _: lease}
    files = []
    for file in material.base.files:
        data = (material.base.folder / file.name).read_bytes()
        files.append(offered(file.name, data))
        serves |= serving(file.name, data)
    about = {"recipe": recipe.to_json(), "recipe_hash": recipe.recipe_hash, "base": files}
    return Honest(replace(WELCOME, **about), serves)


Says = Callable[[LyingHub], object]


@dataclass(frozen=True)
class Lie:
    """One lie of a hub that is honest else."""

    said: str  # by the volunteer, about it
    asked: str = ""  # the beginning of a name that it has asked for; "": none has to be
    says: Says = lambda hub: None  # once the volunteer is ready
    serves: Mapping[str, Serve] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)  # announced of files of the base
    files: Mapping[str, bytes] = field(default_factory=dict)  # of the base, announced as they are
    welcome: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def hub(self, honest: Honest) -> Iterator[LyingHub]:
        base = {file.name: file for file in honest.welcome.base}
        base |= {name: offered(name, data) for name, data in self.files.items()}
        for name, size in self.sizes.items():
            base[name] = messages.File(name, size, "0" * 64, sha256(zeros_hashes(size)))
        serves = dict(honest.serves)
        for name, data in self.files.items():
            serves |= serving(name, data)
        welcome, keys = replace(honest.welcome, base=[*base.values()], **self.welcome), RunKeys.generate()
        wire = RouterWire("127.0.0.1", 0, keys.pair)
        serves |= self.serves
        with LyingHub(wire, welcome, serves, {}, STATUS, lambda hub, _: self.says(hub), keys) as hub:
            yield hub


def opens(**fields: Any) -> Says:
    """Open a round."""
    return lambda hub: hub.say(replace(ROUND, **fields))


def commits(size: int, digest: str = "0" * 64) -> Says:
    """Open a round without samples, and commit it."""

    def say(hub: LyingHub) -> None:
        hub.say(replace(ROUND, samples=0))
        hub.say(messages.Committed(0, size, digest, []))

    return say


def grows(size: int) -> Serve:
    """Serve zeros, whose first chunk is honest about their size, and no other."""
    return lambda get: endless(size if get.index == 0 else LIE)(get)


def config(**fields: int) -> bytes:
    """Return the config of the builtin model with other numbers."""
    known = json.loads((BUILTIN_MODELS["builtin:tiny-gpt-neox"] / "config.json").read_text())
    return json.dumps(known | fields).encode()


def snapshot(size: int) -> dict[str, Any]:
    """Offer a snapshot of zeros."""
    offer = messages.SnapshotOffer(2, size, sha256(zeros_hashes(size)), 2**40)
    return {"round": 3, "log_bytes": 2**40, "snapshots": [offer]}


def zeros_hashes(size: int) -> bytes:
    return hashlib.sha256(bytes(HASH_BLOCK)).digest() * -(-size // HASH_BLOCK)


def behind(rounds: int, log_bytes: int) -> dict[str, Any]:
    """Say that so many rounds are to be caught up with."""
    return {"round": rounds, "log_bytes": log_bytes}


LONG, ENDLESS = "is announced with 68,719,476,736 bytes", endless(LIE)
LOADED, EVALUATES = f"base/{WEIGHTS}", opens(samples=0, eval_parts=1)
PACKED = b"CKT1\2\0"  # the beginning of samples
NESTED = (3 << 20).to_bytes(8, "little") + b"[" * (4 << 20)  # weights with such a header
FOUR, TEN = 4 << 20, 10_000 << 20
LIES = {
    "a lease of 64 GB": Lie(f"lease/0 {LONG}; it has 314", "lease/0", opens(), {"lease/": ENDLESS}),
    "a lease a byte too long": Lie(
        "315 bytes; it has 314 at most", "lease/0", opens(), {"lease/": endless(315)}
    ),
    "a lease of 4 billion samples": Lie(
        "4,294,967,295 samples in 106 bytes", "lease/0", opens(), {"lease/": lambda _: PACKED + b"\xff" * 100}
    ),
    "a billion samples": Lie("by the recipe a round has 8 at most", says=opens(samples=10**9)),
    "a billionth rung": Lie("is on rung 1000000000", says=opens(rung=10**9)),
    "a packet of 64 GB": Lie(f"packet/0 {LONG}", "packet/0", commits(20_000), {"packet/": ENDLESS}),
    "a commit of 64 GB": Lie(f"packet/0 {LONG}", "", commits(LIE), {"packet/": ENDLESS}),
    "a packet of zeros": Lie(
        "an aggregate cannot be used", "packet/0", commits(20_000, ""), {"packet/": endless(20_000)}
    ),
    "packets of 64 GB": Lie(
        f"packets/0-1 {LONG}", "packets/0-3", serves={"packets/": ENDLESS}, welcome=behind(3, 60_000)
    ),
    "a log of a terabyte": Lie(
        f"packets/0-1 {LONG}", "packets/0-1", serves={"packets/": ENDLESS}, welcome=behind(3, 2**40)
    ),
    "a log of 64 GB in a billion rounds": Lie(
        LONG, "packets/0-", serves={"packets/": ENDLESS}, welcome=behind(10**9, 2**36)
    ),
    "samples to evaluate of 64 GB": Lie(f"eval {LONG}", "eval", EVALUATES, {"eval": ENDLESS}),
    "4 billion samples to evaluate": Lie(
        "4,294,967,295 samples", "eval", EVALUATES, {"eval": lambda _: PACKED + b"\xff" * HASH_BLOCK}
    ),
    "hashes of 64 GB": Lie(
        f"hashes/{LOADED} {LONG}", f"hashes/{LOADED}", serves={f"hashes/{LOADED}": ENDLESS}
    ),
    "weights of 64 GB": Lie(f"{LOADED} {LONG}", LOADED, serves={LOADED: ENDLESS}),
    "weights that grow": Lie(f"{LOADED} {LONG}", LOADED, serves={LOADED: grows(4_055_008)}),
    "weights of a terabyte": Lie("weights of 1099.5 GB as a model of 1,012,992", sizes={WEIGHTS: 2**40 - 1}),
    "weights of 10 GB": Lie(
        "weights of 10.5 GB as a model of 1,012,992 parameters",
        LOADED,
        serves={LOADED: endless(TEN), f"hashes/{LOADED}": lambda _: zeros_hashes(TEN)},
        sizes={WEIGHTS: TEN},
    ),
    "a header of weights of 3 MB": Lie("a header of 3145728 bytes", LOADED, files={WEIGHTS: NESTED}),
    "a config of 1 GB": Lie(
        "config.json of 1.1 GB; one of this kind has 1.0 MB", sizes={"config.json": 1 << 30}
    ),
    "a chat template of 2 GB": Lie("has 4.2 MB at most", sizes={"chat_template.jinja": 2 << 30}),
    "an index of 100 MB": Lie("has 2.1 MB at most", sizes={f"{WEIGHTS}.index.json": 100 << 20}),
    "a million layers": Lie(
        "has 1,000,000 layers", "base/config", files={"config.json": config(num_hidden_layers=10**6)}
    ),
    "a model larger than its weights": Lie(
        "parameters of weights that have", "base/config", files={"config.json": config(vocab_size=10**8)}
    ),
    "hashes of a snapshot of 64 GB": Lie(
        f"hashes/snapshot/2/{WEIGHTS} {LONG}",
        "hashes/snapshot",
        serves={"hashes/snapshot": ENDLESS},
        welcome=snapshot(FOUR),
    ),
    "a snapshot of 64 GB": Lie(
        f"snapshot/2/{WEIGHTS} {LONG}",
        "snapshot/2",
        serves={"snapshot/": ENDLESS, "hashes/snapshot": lambda _: zeros_hashes(FOUR)},
        welcome=snapshot(FOUR),
    ),
    "a snapshot of 10 GB": Lie(
        "1,012,992 parameters are trained",
        "snapshot/2",
        serves={"snapshot/": endless(TEN), "hashes/snapshot": lambda _: zeros_hashes(TEN)},
        welcome=snapshot(TEN),
    ),
}


class Watched:
    """A volunteer, and the most memory that it has had."""

    def __init__(self, forked: Forked, folder: Path, hub: LyingHub) -> None:
        self.command: Command = forked.join(folder / "ann", hub.url, home=folder / "home")
        self.peak = 0  # bytes
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            while self.command.status is None:
                pages = Path(f"/proc/{self.command.pid}/statm").read_text().split()[1]
                self.peak = max(self.peak, int(pages) * PAGE)
                time.sleep(0.01)
        except (OSError, IndexError):  # it has ended
            return

    def end(self) -> dict[str, Any]:
        """Wait for its end, and return the last that it has told."""
        self.command.wait()
        self._thread.join()
        return self.command.told[-1]


@pytest.fixture(scope="module")
def usual(forked: Forked, honest: Honest, tmp_path_factory: pytest.TempPathFactory) -> int:
    """The memory of a volunteer in an honest round, in bytes."""
    with Lie("", says=opens()).hub(honest) as hub:
        volunteer = Watched(forked, tmp_path_factory.mktemp("honest"), hub)
        until(lambda: hub.heard[messages.Put] > 0 or volunteer.command.poll() is not None, PATIENCE)
        hub.floods = lambda hub: hub.say(ENOUGH)
        volunteer.end()
    assert volunteer.command.status == 0, volunteer.command.told
    assert hub.asked["lease/0"]
    return volunteer.peak


@pytest.mark.parametrize("name", LIES)
def test_a_volunteer_says_whose_fault_it_is_and_takes_no_more_memory(
    forked: Forked, honest: Honest, usual: int, tmp_path: Path, name: str
) -> None:
    lie = LIES[name]
    with lie.hub(honest) as hub:
        volunteer = Watched(forked, tmp_path, hub)
        told = volunteer.end()

    assert hub.heard[messages.AskStatus], "it has looked at the run"
    assert lie.said in told.get("error", {}).get("message", ""), told
    assert volunteer.command.status == EXIT["rejected"]
    assert "Traceback" not in volunteer.command.said
    assert any(asked.startswith(lie.asked) for asked in hub.asked) or not lie.asked
    assert volunteer.peak < usual + MORE
    honest_bytes = sum(file.size for file in honest.welcome.base)
    kept = sum(path.stat().st_size for path in (tmp_path / "home").rglob("*") if path.is_file())
    assert kept < 2 * honest_bytes, "nothing is left on the disk but what is right"


CROWDED = replace(ROUND, samples=0, members=[f"{n:x}" for n in range(4000)])
FLOODS: dict[str, Callable[[LyingHub], bool]] = {
    "rounds": lambda hub: hub.say(replace(CROWDED, round=1 + hub.flooded % 900)),
    "chunks that nobody has asked for": lambda hub: hub.say(
        messages.Data("lease/7", 0, CHUNK), bytes(CHUNK), hub.bulk
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_volunteer_that_is_flooded_keeps_its_memory(
    forked: Forked, honest: Honest, usual: int, tmp_path: Path, name: str
) -> None:
    with Lie("", says=opens(samples=0)).hub(honest) as hub:
        volunteer = Watched(forked, tmp_path, hub)
        # it works on round 0: had it not taken it yet, it would take one whose packets nobody has
        until(lambda: hub.heard[messages.Report] > 0, PATIENCE)
        hub.floods = FLOODS[name]
        until(lambda: hub.flooded >= FLOODED or volunteer.command.poll() is not None, PATIENCE)
        hub.floods = lambda hub: hub.say(ENOUGH)
        told = volunteer.end()

    assert volunteer.command.status == 0, told
    assert told["reason"] == ENOUGH.reason
    assert volunteer.peak < usual + MORE
