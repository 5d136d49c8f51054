"""Events of a short run, for tests of what shows a run."""

from cocktail_cli.ui import RunStarted, Warning
from cocktail_cli.ui.events import Eval, PeerJoined, PeerLeft, RunFinished, Step

URL = "cocktail://" + "k" * 43 + "." + "t" * 24 + "@203.0.113.7:29400/amber-otter-42"
STARTED = RunStarted("amber-otter-42", URL, "smoke", "9f2c41ab" * 8, 860_160, 80, "outputs/smoke")
FINISHED = RunFinished("amber-otter-42", "outputs/smoke", 80, 2.25, "finished")
STEP = Step(
    step=12,
    steps=80,
    round=12,
    loss=1.8421,
    peers=2,
    accepted=["a", "b"],
    up_bytes={"a": 10_000, "b": 12_000},
    down_bytes={"a": 14_000, "b": 14_000},
    ratio_up={"a": 172.0, "b": 143.4},
    ratio_fp16=137.6,
    fingerprint="00ff00ff00ff00ff",
    step_s=0.5,
    compute_s={"a": 0.2, "b": 0.2},
    wait_s={"a": 0.1, "b": 0.1},
    tokens_by_peer={"a": 300, "b": 300},
    eta_s=34.0,
)
STORY = [
    STARTED,
    PeerJoined("a", "CPU, 2 cores"),
    PeerJoined("b"),
    Eval(0, 0, 4.5),
    STEP,
    PeerLeft("b", "left"),
    Warning("careful"),
    FINISHED,
]
