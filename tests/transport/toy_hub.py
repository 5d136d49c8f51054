"""A toy run's hub as a process of its own, to be killed: toy_hub.py FOLDER PORT KEYS SAMPLES

Prints the port, then the number of each round once it is announced. No torch: it starts in 0.3 s.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for who starts it elsewhere than in the repository

from toy_swarm import ToyWork, toy_settings

from transport import Hub, Ledger, RunKeys
from transport.protocol import RoundCommitted


def main(folder: str, port: str, keys: str, samples: str) -> None:
    settings = toy_settings(
        samples=int(samples), min_peers=2, eval=True, eval_every=10, ping_s=0.1, grace_s=1.0, recover_s=10.0,
        start_timeout=60.0,
    )  # fmt: skip
    with Ledger(Path(folder), run=settings.run, samples=settings.samples) as ledger:
        work = ToyWork([packet for _, packet in ledger.packets()])
        hub = Hub(("127.0.0.1", int(port)), RunKeys(**json.loads(keys)), ledger, settings, work)
        hub.start()
        print(hub.port, flush=True)
        for event in hub.events():
            if isinstance(event, RoundCommitted):
                print(event.round, flush=True)
        hub.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
