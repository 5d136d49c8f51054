"""The folder tree shows the architecture: who may import what, fronts, no import cycle, names that occur
once, and what a start of the command costs.
"""

import ast
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from house import ROOMS, ROOT, files
from processor_time import half_a_second, timed

HEAVY = ("zmq", "torch", "transformers", "datasets", "peft", "trl")

# room -> packages it may import beside the standard library and itself: the table of the README
MAY_IMPORT = {
    "compress": "torch numpy lz4 compression backports triton numba llvmlite",
    "transport": "zmq msgspec",
    "recipes": "compress torch numpy transformers datasets pyarrow peft trl pydantic pydantic_core yaml "
    "safetensors huggingface_hub jinja2 psutil",
    "cocktail_cli": "compress transport recipes typer rich platformdirs torch safetensors "
    "transformers yaml pynvml psutil msgspec numpy pydantic cryptography zmq h11 websockets huggingface_hub "
    "opacus",
}

# Modules of transport that may wait, read a clock or open a socket. All others are told the time and are
# given bytes, so tests run them without waiting.
SHELLS = {
    "direct": "direct_links peer_server",
    "hub": "hub_threads server",
    "peer": "catch_up_downloads connection_manager hub_questions peer_link",
    "protocol": "keys",
    "wire": "connection_guard rate_limit zeromq_sockets",
}

# Files of tests that import modules past the front of a package that is not their own. The list only shrinks.
TESTS_PAST_A_FRONT = {
    "cocktail_cli/host/test_resume.py": "cocktail_cli.machine.run_registry cocktail_cli.ui.display",
    "cocktail_cli/volunteer/test_run_link_budget.py": "transport.transfer.bandwidth_budget",
    "end_to_end/in_process.py": "cocktail_cli.extensions.aggregators.peer cocktail_cli.volunteer.run_link",
    "end_to_end/test_damage.py": "cocktail_cli.host.snapshot_thread",
    "end_to_end/test_joining.py": "cocktail_cli.volunteer.run_link",
    "extensions/multi_gpu/test_spread_peer.py": "recipes.training.loop recipes.training.micro_batch",
    "fake_cuda/claims_codec.py": "recipes.planning.memory_plan",
    "fake_cuda/claims_memory.py": "recipes.planning.memory_plan",
    "fake_cuda/claims_ranks.py": "cocktail_cli.machine.devices",
    "fuzzing/transport_targets.py": "transport.hub.hub_threads transport.ledger.packet_log "
    "transport.peer.connection_manager transport.peer.peer_state transport.protocol.message_codec "
    "transport.wire.zeromq_sockets",
    "recipes/data/test_packing.py": "recipes.models.causal_lm",
    "recipes/planning/test_step_cost.py": "transport.scheduling.leases",
    "recipes/test_foreign_json.py": "recipes.config.document recipes.data.conversations "
    "recipes.models.trainable",
    "transport/attacks.py": "transport.wire.zeromq_sockets",
    "transport/hub/test_object_access.py": "transport.peer.connection_manager "
    "transport.transfer.object_store",
    "transport/protocol/test_foreign_values.py": "transport.peer.hub_questions",
    "transport/protocol/test_limits.py": "transport.hub.hub_state transport.membership.admission "
    "transport.transfer.upload_inbox transport.wire.connection_guard transport.wire.rate_limit",
    "extensions/reach/test_relay_server.py": "transport.wire.zeromq_sockets",
    "transport/transfer/test_chunks.py": "recipes.models.base_model",
}
RICH = ["board.py", "live_view.py"]  # modules that import rich at their top
MODULES_IN_A_PACKAGE = 14
PARAMETERS = 6
# Functions that may take more parameters: a command has one for each of its options, a kernel one for each
# of its pointers and strides.
MANY_PARAMETERS = ("cocktail_cli/commands/", "compress/numba_loops", "compress/triton_kernels")
SAME_BASENAME = {
    "__init__",
    "__main__",
    "bodies",
    "errors",
    "events",
    "command",
    "hub",
    "keys",
    "model",
    "peer",
}
# A docstring is a sentence with a verb. These words open a clause that lacks its subject.
OPENERS = re.compile(
    r"(Of|What|As|It|That|Those|Who|Whose|Where|How|Whether|Is|In|So|By|No|Nobody|Nothing)\b"
)


@cache
def modules() -> dict[str, Path]:
    """Every product module by its dotted name; a package by the name of its folder."""
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def is_package(module: str) -> bool:
    return module in modules() and modules()[module].name == "__init__.py"


def package_of(module: str) -> str:
    return module if is_package(module) else module.rpartition(".")[0]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def tree(module: str) -> ast.Module:
    return parsed(modules()[module])


@cache
def house_imports(module: str) -> tuple[tuple[str, str], ...]:
    return tuple(imports_from_house(tree(module), package_of(module)))


def imports_from_house(tree: ast.Module, package: str) -> list[tuple[str, str]]:
    """(module, name) for each name that a file of a package imports from the house, wherever the statement
    stands: in functions and under TYPE_CHECKING too. The name is "" where the module itself is imported.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name in modules()]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                if f"{base}.{alias.name}" in modules() and alias.name not in exports(base):
                    found.append((f"{base}.{alias.name}", ""))
                elif base in modules():
                    found.append((base, alias.name))
    return found


@cache
def exports(package: str) -> dict[str, str]:
    """name -> module that defines it (or is it), for the names that the front of a package hands on."""
    if not is_package(package):
        return {}
    found = {}
    for node in ast.walk(tree(package)):
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, node.module] if node.module else parts)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if base in modules():
                    found[alias.asname or alias.name] = whole if whole in modules() else base
    return found


def defined_in(module: str, name: str) -> str:
    """The module that defines a name, followed through the fronts that hand it on."""
    while is_package(module) and name in exports(module):
        module = exports(module)[name]
    return module


@cache
def graph() -> dict[str, set[str]]:
    """module -> modules it needs, fronts resolved to the modules behind them."""
    edges: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        if not is_package(module):
            edges[module] = {defined_in(base, name) for base, name in house_imports(module)} - {module}
    return edges


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def test_no_import_cycle_between_modules() -> None:
    """Imports in functions and under TYPE_CHECKING count: they hide a cycle, they do not undo it."""
    assert cycles(graph()) == []


def test_no_import_cycle_between_packages() -> None:
    """A room's own modules (errors, options) are nodes of their own, as they are no package."""

    def node(module: str) -> str:
        package = package_of(module)
        return module if package in ROOMS else package

    edges: dict[str, set[str]] = defaultdict(set)
    for module, needed in graph().items():
        edges[node(module)] |= {node(other) for other in needed} - {node(module)}

    assert cycles(edges) == []


def past_a_front() -> Iterator[str]:
    for module, path in modules().items():
        for base, name in house_imports(module):
            own = package_of(module)
            inside = package_of(base)
            if base == inside or inside == own or own.startswith(f"{inside}."):
                continue  # through a front, or the package's own module, or one that encloses it
            if inside in ROOMS or inside == "cocktail_cli.commands":
                continue  # a leaf of a room (errors, options); main.py hangs up each command by its module
            if own == inside.rpartition(".")[0] and is_package(module):
                continue  # a front may gather what its own subpackages hold
            yield f"{path.relative_to(ROOT).as_posix()}: {base}{'.' if name else ''}{name}"


def test_packages_are_imported_through_their_fronts() -> None:
    assert sorted(set(past_a_front())) == []


def past_a_front_in_tests() -> dict[str, str]:
    """Find the modules that each file of tests imports past the front of a package that is not its own."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in files("tests", ".py"):
        own = ".".join(path.relative_to(ROOT / "tests").parent.parts)
        own = f"cocktail_cli.{own}" if own.startswith("extensions") else own
        for base, _ in imports_from_house(parsed(path), own):
            inside = package_of(base)
            if base == inside or inside in ROOMS or f"{own}.".startswith(f"{inside}."):
                continue  # through a front, or a leaf of a room, or a module of the package that is tested
            if own.startswith("cocktail_cli.extensions.") and inside.startswith(f"{own}."):
                continue  # of a package of the extension that is tested
            if not (inside.startswith("cocktail_cli.commands") or base.endswith(".command")):  # as main.py
                found[path.relative_to(ROOT / "tests").as_posix()].add(base)
    return {file: " ".join(sorted(found[file])) for file in sorted(found)}


def test_tests_import_through_fronts_but_for_modules_of_the_package_that_they_test() -> None:
    """The list of exceptions only shrinks. A constant of another package is patched by its dotted name."""
    there = {
        file: " ".join(name for name in found.split() if name in modules())
        for file, found in TESTS_PAST_A_FRONT.items()
        if (ROOT / "tests" / file).exists()
    }
    assert past_a_front_in_tests() == there


def test_a_folder_has_at_most_fourteen_modules() -> None:
    places = [*modules().values(), *(ROOT / "scripts").rglob("*.py")]
    counted = Counter(path.parent.relative_to(ROOT).as_posix() for path in places if path.stem != "__init__")

    assert {folder: n for folder, n in counted.items() if n > MODULES_IN_A_PACKAGE} == {}


def test_a_basename_occurs_once() -> None:
    counted = Counter(path.stem for path in modules().values() if path.stem not in SAME_BASENAME)

    assert [name for name, n in counted.items() if n > 1] == []


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return len(given) - bool(given and given[0].arg in ("self", "cls"))


def test_a_function_takes_at_most_six_parameters() -> None:
    found = [
        f"{path.relative_to(ROOT).as_posix()}: {function.name} takes {parameters(function)}"
        for module, path in modules().items()
        for function in functions(module)
        if parameters(function) > PARAMETERS
        and not path.name.endswith("command.py")
        and not path.relative_to(ROOT).as_posix().startswith(MANY_PARAMETERS)
    ]

    assert found == []


def test_a_docstring_opens_with_its_verb_or_its_subject() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"
        for module, path in modules().items()
        for node in ast.walk(tree(module))
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and OPENERS.match(text)
    ]

    assert found == []


def test_every_package_says_what_it_is_for() -> None:
    assert [m for m in modules() if is_package(m) and not ast.get_docstring(tree(m))] == []


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def at_the_top(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that importing a file imports: outside functions and `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imported(node)
        waiting += ast.iter_child_nodes(node)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_allows(room: str) -> None:
    allowed = set(MAY_IMPORT[room].split()) | {room} | set(sys.stdlib_module_names)

    strangers = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in files(room, ".py")
        for module in imported(parsed(path))
        if module.split(".")[0] not in allowed
    ]

    assert strangers == []


def test_no_file_of_the_command_imports_torch_at_its_top() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in files("cocktail_cli", ".py")
        for module in at_the_top(parsed(path))
        if module.split(".")[0] in (*HEAVY, "rich")
        and path.name not in RICH  # imported where a board is shown
        and "extensions" not in path.parts  # imported by runs that use them
    ]

    assert found == []


def test_a_run_of_one_hub_that_is_dialled_directly_loads_no_tls() -> None:
    """A run loads the extensions that it uses."""
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for room in ROOMS
        for path in files(room, ".py")
        if "extensions" not in path.parts
        for module in at_the_top(parsed(path))
        if module.startswith(("websockets", "h11", "ssl"))
    ]

    assert found == []


def test_rich_is_imported_by_the_board_and_for_the_widths_of_tables() -> None:
    users = [path.name for path in files("cocktail_cli", ".py") if "rich" in tops(path)]

    assert {*users} - {*RICH} == {"output.py"}


def tops(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported(parsed(path))}


def test_click_is_never_imported_because_typer_brings_its_own() -> None:
    assert [path for room in ROOMS for path in files(room, ".py") if "click" in tops(path)] == []


def test_sockets_and_clocks_of_transport_stay_in_its_shells() -> None:
    shells = {f"transport.{package}.{name}" for package, names in SHELLS.items() for name in names.split()}
    world = {"zmq", "socket", "time", "threading", "asyncio", "selectors"}
    found = {name for name in modules() if name.startswith("transport.") and tops(modules()[name]) & world}

    assert found == shells


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_importing_the_command_leaves_torch_and_rich_alone() -> None:
    done = run(
        "-c",
        "import sys, cocktail_cli.main; print(sorted(set(sys.modules) & set(sys.argv[1:])))",
        *HEAVY,
        "rich",
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_help_answers_in_half_a_second() -> None:
    seconds, said = timed("-m", "cocktail_cli", "--help")

    assert "launch" in said
    assert seconds < half_a_second()


def test_scripts_can_be_run() -> None:
    if os.name == "nt":
        pytest.skip("Windows has no executable bit")
    for name in ("scripts/demo", "scripts/chaos", "scripts/test", "scripts/check", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name


def test_every_script_is_named_in_their_readme() -> None:
    text = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    said = re.findall(r"`([\w*]+(?:\.py)?)`", text)
    files = [file.name for file in (ROOT / "scripts").iterdir() if file.is_file() and file.suffix != ".md"]

    assert [name for name in files if name != "env" and not any(fnmatch(name, one) for one in said)] == []
