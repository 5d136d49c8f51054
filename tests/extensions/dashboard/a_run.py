"""A run's folder as a launch leaves it, in milliseconds: a ledger, a diary, run.json and a recipe."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cocktail_cli.extensions.dashboard.run_history import RunFolderReader
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import RunRecord, save_run
from cocktail_cli.ui import Event, RunStarted, events
from recipes.config import load_recipe
from transport import RunKeys
from transport.ledger import Counted, EvaluationRow, Ledger, RoundRow

BEGAN = datetime(2026, 11, 20, 14, 0, 0, tzinfo=UTC).timestamp()
PORT = 1  # where no hub listens, on any machine
PARAMETERS = 1_000_000


@dataclass
class ARun:
    """Tells a run as its launch would. Round r is committed 10 s after round r-1."""

    folder: Path
    record: RunRecord
    ledger: Ledger
    steps: int = 20
    rounds: int = 0

    def at(self, seconds: float) -> datetime:
        return datetime.fromtimestamp(BEGAN + seconds, UTC)

    def reader(self) -> RunFolderReader:
        """Read the run's folder, as if its hub were running."""
        return RunFolderReader(self.record, lambda _: True)

    def tell(self, event: Event, seconds: float) -> None:
        with (self.folder / in_folder.EVENTS).open("a") as file:
            file.write(events.as_json(event, self.at(seconds)) + "\n")

    def start(self, round: int = 0, seconds: float = 0.0) -> None:
        versions = {"cocktail-sgd": "0.1.0"}
        place = f"{self.record.url.partition('.')[0]}.***@127.0.0.1:{PORT}/{self.record.run}"
        started = RunStarted(
            self.record.run,
            place,
            "smoke",
            "abc",
            PARAMETERS,
            self.steps,
            "out",
            round=round,
            versions=versions,
        )
        self.tell(started, seconds)

    def join(self, peer: str, seconds: float, hardware: str = "RTX 3090") -> None:
        self.tell(events.PeerJoined(peer, hardware), seconds)

    def leave(self, peer: str, seconds: float, reason: str = "left: Ctrl-C") -> None:
        self.tell(events.PeerLeft(peer, reason), seconds)

    def commit(
        self,
        *members: str,
        late: tuple[str, ...] = (),
        loss: float | None = 4.0,
        told: bool = True,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """The next round: 4 samples of each packet that came in time. `told`: the diary has it too."""
        r, now = self.rounds, BEGAN + 10.0 * (self.rounds + 1)
        accepted = tuple(peer for peer in members if peer not in late)
        row = RoundRow(r, r + 1, now - 9.0, now, 255, members, accepted, loss, 100)
        many = len(members)
        counted = tuple(
            Counted(r, peer, f"session-{peer}", ((4 * (many * r + i), 4 * (many * r + i + 1)),))
            for i, peer in enumerate(accepted)
        )
        self.ledger.commit(row, b"packet", counted)
        self.rounds += 1
        if told:
            each = dict.fromkeys(members, 1.0)
            step = events.Step(
                step=r + 1,
                steps=self.steps,
                round=r,
                loss=loss,
                peers=many,
                accepted=list(accepted),
                up_bytes=dict.fromkeys(members, 20_000),
                down_bytes=dict.fromkeys(members, 30_000),
                compute_s=dict.fromkeys(members, 3.0),
                ratio_fp16=4 * PARAMETERS / 50_000,
                wait_s=each,
                lr=1e-3 * (r + 1) / self.steps,
                grad_norm=0.5,
                extra=dict(extra),
            )
            self.tell(step, 10.0 * (r + 1))

    def evaluate(self, loss: float) -> None:
        self.ledger.evaluated(EvaluationRow(self.rounds, self.rounds, loss, 100, False))

    def finish(self, seconds: float) -> None:
        save_run(self.record.ended("finished", self.rounds, None))
        self.tell(
            events.RunFinished(self.record.run, "out", self.rounds, None, "every sample was counted"), seconds
        )


@contextmanager
def a_run(folder: Path, name: str = "amber-otter-42", overrides: Sequence[str] = ()) -> Iterator[ARun]:
    """One that has just begun."""
    keys, recipe = RunKeys.generate(), load_recipe("smoke", ["data.max_length=64", *overrides])
    folder.mkdir(parents=True)
    (folder / in_folder.RESOLVED).write_text(recipe.to_json())
    record = RunRecord(
        run=name,
        url=str(keys.url("127.0.0.1", PORT, name)),
        keys=asdict(keys),
        pid=1,
        port=PORT,
        bind="127.0.0.1",
        output_dir=str(folder),
        base=str(folder / "base"),
        recipe="smoke",
        recipe_hash=recipe.recipe_hash,
        started="2026-11-20T14:00:00Z",
        base_sha256="ba5e" * 16,
        data_sha256="da7a" * 16,
    )
    save_run(record)
    with Ledger(folder / in_folder.LEDGER, run=record.run, samples=10_000) as ledger:
        run = ARun(folder, record, ledger)
        run.start()
        yield run
