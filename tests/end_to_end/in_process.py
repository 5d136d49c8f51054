"""A whole run in this process: real hub, ledger, messages and models; only the sockets are queues.

with Swarm(recipe_of(folder, ...), folder) as swarm:
    swarm.start("ann", "bob")
    swarm.finish()
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from exported import export
from hub_swarm import HubSwarm
from memory_sockets import MemoryHubWire
from torch import Tensor, nn
from toy_swarm import toy_spool
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from cocktail_cli.assembly import (
    HostParts,
    PeerExtension,
    PeerParts,
    dialled,
    hub_extensions,
    model_extensions,
    recipe_type,
)
from cocktail_cli.host import CommittedModel, RunDelegate, settings_of
from cocktail_cli.volunteer.run_link import RunBounds, RunLink
from recipes.config import Model, Recipe
from recipes.data import build_corpus
from recipes.models import BUILTIN_MODELS, Base, load_model, load_tokenizer, load_trained, prepare_base
from recipes.training import Event, Peer, StepDone, build_peer, finetune
from transport import Ledger, PeerLink
from transport.direct import PeerServer, ReachablePeer, link_to
from transport.protocol import CurveKeys, LinkLost
from transport.protocol import events as hub

BUILTIN = "builtin:tiny-gpt-neox"
TOKENIZER = BUILTIN_MODELS[BUILTIN]
VOCABULARY = 2048
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
FAMILIES: dict[str, PretrainedConfig] = {
    "gpt_neox": GPTNeoXConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, **SMALL
    ),
    "gptj": GPTJConfig(n_embd=32, n_layer=2, n_head=2, rotary_dim=8, n_positions=64, vocab_size=VOCABULARY),
    "gpt2_tied": GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=VOCABULARY),
    "opt": OPTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=64,
        word_embed_proj_dim=32,
        **SMALL,
    ),
    "llama": LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, **SMALL
    ),
    "qwen3": Qwen3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        **SMALL,
    ),
}


def save_tiny(family: str, folder: Path) -> Path:
    """A folder as `save_pretrained` leaves it: a model of `family` with random weights, and a tokenizer."""
    torch.manual_seed(0)
    config = FAMILIES[family]
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)  # so that what is computed twice is the same
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(Model(model_name_or_path=BUILTIN), TOKENIZER).save_pretrained(folder)
    return folder


def rows(count: int) -> list[str]:
    """Text with something to learn in it."""
    animals, verbs = ["otter", "heron", "lynx", "newt"], ["sees", "hears", "follows", "finds"]
    return [
        f"The {animals[i % 4]} {verbs[i // 4 % 4]} the {animals[i // 16 % 4]} by the river, number {i}."
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("gpt_neox", tmp_path_factory.mktemp("neox"))


def write_rows(folder: Path, count: int) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows(count)))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path, 66)


def nobody(peer: ReachablePeer) -> PeerLink:
    """Dial a peer in memory, which none reaches but the hub."""
    raise LinkLost(f"{peer.name} is reached by the hub alone")


def recipe_of(model: Path, data: Path, **sections: dict[str, Any]) -> Recipe:
    """A small recipe; each keyword is a section, laid over these defaults."""
    defaults: dict[str, dict[str, Any]] = {
        "data": {"max_length": 64, "val_set_size": 6},
        "training": {
            "global_batch_size": 6,
            "num_train_epochs": 1,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "optim": "adamw_torch",
            "activation_checkpointing": False,
        },
        "swarm": {"step_timeout": 60.0, "peer_timeout": 60.0, "start_timeout": 60.0},
        "checkpoint": {"eval_steps": 4},
        "compression": {"auto": False},  # a busy machine is no reason for another rung
    }
    merged = {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {*defaults, *sections}}
    return recipe_type(sections).model_validate(
        {
            "version": 1,
            "name": "test",
            "model": {"model_name_or_path": str(model)},
            "datasets": [{"path": str(data)}],
            **merged,
        }
    )


@dataclass
class Member:
    """One peer: its thread, and what it did."""

    name: str
    link: RunLink
    peer: Peer
    events: list[Event] = field(default_factory=list)
    error: BaseException | None = None
    thread: threading.Thread | None = None

    @property
    def steps(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]

    @property
    def common(self) -> Tensor:
        return self.peer.worker.global_model.vector

    def leave(self) -> None:
        self.link.leaving.set()

    def join(self) -> None:
        assert self.thread is not None
        self.thread.join(120)
        assert not self.thread.is_alive(), f"{self.name} hangs"
        if self.error is not None:
            raise self.error


class Swarm:
    """A run and its peers; with a `port`, on the loopback, where aggregators reach each other.

    As a context it ends with everything closed.
    """

    def __init__(self, recipe: Recipe, folder: Path, port: int | None = None, **settings: Any) -> None:
        torch.set_num_threads(1)
        self.recipe, self.folder = recipe, folder
        self.base: Base = prepare_base(recipe, folder / "base")
        self.tokenizer = load_tokenizer(recipe.model, self.base.folder)
        self.corpus = build_corpus(recipe, self.tokenizer)
        self.work = RunDelegate(recipe, self.base, self.corpus, folder / "ledger")
        self.work.memory = None  # nobody is asked before joining, and to trace a model takes a second
        wanted = replace(settings_of(self.work, "test-run"), **{"min_peers": 1, "linger_s": 0.5} | settings)
        self.memory = HubSwarm(
            wanted,
            self.work,
            folder / "ledger",
            port,
            extend=lambda keys, ledger: hub_extensions(HostParts(recipe, keys, ledger, self.work)),
        )
        self.work.recover(self.memory.ledger)
        self.members: dict[str, Member] = {}
        self.servers: list[PeerServer] = []

    def __enter__(self) -> Swarm:
        self.memory.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.close()
        self.memory.close()
        self.work.close()

    def model(self) -> PreTrainedModel:
        return load_model(self.base.folder)

    def trained(self) -> nn.Module:
        return load_trained(self.recipe, self.base.folder)

    def start(self, *names: str, watch: Callable[[Member, Event], None] | None = None) -> list[Member]:
        """Peers by these names begin, each in a thread. `watch` is called there, after each event."""
        return [self._start(name, watch) for name in names]

    def _start(self, name: str, watch: Callable[[Member, Event], None] | None) -> Member:
        return self.go(self.prepare(name), watch)

    def prepare(self, name: str) -> Member:
        """A peer at the base weights, that is welcome and does nothing yet; where peers aggregate, it can."""
        server, identity = None, dict[str, Any]()
        if dialled(self.recipe) and self.memory.in_memory:  # it is reached, and reaches no other peer
            wire = self.memory.wire.servers[f"{name}:1"] = MemoryHubWire()
            server, identity = PeerServer(wire, self.memory.url.run), {"reachable": f"{name}:1"}
            server.start()
        elif dialled(self.recipe):
            keys = CurveKeys.generate()
            server, port = PeerServer.open(("127.0.0.1", 0), keys, self.memory.url)
            identity = {"keys": keys, "reachable": f"127.0.0.1:{port}"}
        self.servers += [server] if server is not None else []
        peer = build_peer(self.trained(), self.recipe, micro_batch=3, name=name)
        peer.trainer.extensions = model_extensions(self.recipe)
        return self.enrol(name, peer, server, **identity)

    def enrol(self, name: str, peer: Peer, server: PeerServer | None = None, **identity: Any) -> Member:
        """Make a member whose link is connected, and knows what the run's objects take at most."""
        link = self.memory.link(name, **identity)
        link.connect(30.0)
        extensions = list[PeerExtension]()
        if server is not None:
            from cocktail_cli.extensions import aggregators
            from cocktail_cli.extensions.aggregators.peer import ShardClients, ShardedPeer

            parts = PeerParts(self.recipe, link.url, "", pytest.fail, ["cpu"], link, server)
            clients = ShardClients(partial(link_to, link, identity["keys"]) if "keys" in identity else nobody)
            begin = partial(aggregators.aggregator_of, parts)
            extensions = [ShardedPeer(link, self.recipe.compression.shard_count, clients, begin)]
            link.listen({one.name: one.received for one in extensions})
        run = RunLink(link, toy_spool(self.folder), extensions)
        for one in extensions:
            one.built({}, peer)
        run.knows(RunBounds(self.recipe, self.work.parameters, None))
        self.members[name] = Member(name, run, peer)
        return self.members[name]

    def go(self, member: Member, watch: Callable[[Member, Event], None] | None = None) -> Member:
        """Let it take part, in a thread."""

        def take_part() -> None:
            try:
                for event in finetune(member.link, member.peer, member.link.link.welcome.round):
                    member.events.append(event)
                    if watch:
                        watch(member, event)
            except BaseException as error:  # told by join(), in the test's own thread
                member.error = error

        member.thread = threading.Thread(target=take_part, name=member.name, daemon=True)
        member.thread.start()
        return member

    def wait(self) -> list[hub.Event]:
        return self.memory.wait(120)

    def finish(self) -> list[hub.Event]:
        """Wait for the end of the run and of every peer; the hub's events."""
        events = self.wait()
        for member in self.members.values():
            member.join()
        return events

    def all(self, kind: type) -> list[Any]:
        return [event for event in self.memory.events if isinstance(event, kind)]

    def audit(self) -> None:
        """Every packet is there, and every sample was counted exactly once. Raises LedgerError otherwise. The
        weights that the host writes are those of x'."""
        with Ledger(self.folder / "ledger", write=False) as ledger:
            ledger.verify(complete=True)
        committed = CommittedModel(self.recipe, self.base.folder, self.folder)
        with TemporaryDirectory() as folder, committed.fold() as found:
            written = found.write(Path(folder))
        assert written == committed.load().global_model.fingerprint

    def folded(self) -> Tensor:
        """x' as whoever only reads the ledger has it."""
        return CommittedModel(self.recipe, self.base.folder, self.folder).load().global_model.vector

    def export(self, folder: Path) -> Path:
        x = CommittedModel(self.recipe, self.base.folder, self.folder).load()
        return export(folder, self.base.folder, x.global_model.vector, x.layout, self.tokenizer)
