"""What imports what: cheap to import, in one direction, and nothing of this repository
besides.
"""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import determined_amp
from tests import run_here

LIBRARY = Path(determined_amp.__file__).parent
# Each may import those before it, and itself.
LAYERS = (
    "amp",
    "audit",
    "finder",
    "experiment",
    "trial",
    "runs",
    "local",
    "search",
    "check",
    "cluster",
    "report",
    "compare",
    "cli",
)
NOT_IN_THE_WHEEL = {"trials", "benchmarks", "tests", "hp_search"}
# What the extras bring.
EXTRAS = {"torchvision", "diffusers", "optuna", "sklearn", "matplotlib", "scipy"}


@cache
def imports(path):
    """Line and dotted parts of everything that a file imports, within functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            of = (node.module or "").split(".")
            found += [(node.lineno, [*of, alias.name]) for alias in node.names]
    return found


def against_the_direction(library):
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        own = inside.parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue  # they hand on all layers
        allowed = {*LAYERS[: LAYERS.index(own) + 1], "__version__"}
        for line, parts in imports(path):
            if parts[0] in NOT_IN_THE_WHEEL or (
                parts[0] == "determined_amp" and parts[1] not in allowed
            ):
                yield f"{inside}:{line} imports {'.'.join(parts)}"


def imported_modules(library):
    """By module of a library, the others of its modules that it imports anywhere."""
    paths = {
        path.relative_to(library).with_suffix("").parts: path
        for path in library.rglob("*.py")
    }
    graph = {}
    for own, path in paths.items():
        found = graph[".".join(own)] = set()
        for _, (_, *parts) in imports(path):
            for length in (len(parts), len(parts) - 1):  # a name of it, or itself
                if tuple(parts[:length]) in paths and tuple(parts[:length]) != own:
                    found.add(".".join(parts[:length]))
    return graph


def test_no_module_imports_one_that_imports_it():
    """`TopologicalSorter` raises a `CycleError`."""
    graph = imported_modules(LIBRARY)
    assert "trial.batches" in graph["trial.mixed_precision"]  # the test sees imports
    TopologicalSorter(graph).prepare()


# One after the other in one fresh interpreter: to import torch takes seconds.
HEART = ", ".join(
    ".".join(path.relative_to(LIBRARY.parent).with_suffix("").parts)
    for path in sorted((LIBRARY / "amp").rglob("[a-z]*.py"))
)
PROGRAMS = {
    "the package alone": "import determined_amp; determined_amp.__version__",
    "the finder's package": "import determined_amp.finder",
    "the heart": f"import determined_amp.amp, {HEART}",
    "mixed precision": "from determined_amp import MixedPrecision",
    "the train command": "import determined_amp.cli.train",
    "the verbs of a cluster": "import determined_amp.cluster",
    "a report of a local search": "import determined_amp.cli.report",
    "a search": "import optuna",
}


@pytest.fixture(scope="module")
def loaded():
    """By program, what it and those before it have loaded: modules of the top level,
    and rooms.
    """
    say = (
        "print(*{name.split('.')[0] for name in sys.modules}, "
        "*{'.'.join(name.split('.')[:2]) for name in sys.modules "
        "if name.startswith('determined_amp.')})"
    )
    script = "".join(f"{program}\n{say}\n" for program in PROGRAMS.values())
    run = run_here.outcome("-W", "ignore", "-c", f"import sys\n{script}", check=True)
    lines = [set(line.split()) for line in run.stdout.splitlines()]
    return dict(zip(PROGRAMS, lines, strict=True))


def test_imports_point_one_way_and_stay_within_the_library():
    assert list(against_the_direction(LIBRARY)) == []


@pytest.mark.parametrize(
    ("file", "code", "line"),
    [
        ("amp/a.py", "def f():\n    import determined_amp.local.trainer", 2),
        ("cluster.py", "from determined_amp import MixedPrecision", 1),
        ("report/a.py", "from trials.data import images", 1),
    ],
)
def test_planted_import_against_the_direction_is_found(tmp_path, file, code, line):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(code)
    (found,) = against_the_direction(tmp_path)
    assert found.startswith(f"{file}:{line} imports ")


BOTH, NOTHING = {"torch", "determined"}, set()


# What each of these programs loads, and what it does not need.
NEEDS = {
    "the package alone": (NOTHING, BOTH),
    "the finder's package": (NOTHING, BOTH),
    "mixed precision": (BOTH, EXTRAS),
    "the train command": (BOTH, EXTRAS),
    "the verbs of a cluster": (BOTH, EXTRAS),
    "a report of a local search": (BOTH, {"optuna"}),
    "a search": ({"optuna"}, NOTHING),  # the test would see it
}


@pytest.mark.parametrize("program", NEEDS)
def test_program_loads_no_more_than_it_needs(program, loaded):
    needed, not_needed = NEEDS[program]
    assert needed <= loaded[program]
    assert loaded[program] & not_needed == set()


def test_heart_needs_torch_alone(loaded):
    assert "torch" in loaded["the heart"]
    rooms = {name for name in loaded["the heart"] if name.startswith("determined")}
    finder = {"determined_amp.finder"}  # of the program before
    assert rooms - finder == {"determined_amp", "determined_amp.amp"}
    assert "determined" in loaded["mixed precision"]  # the test would see it


def test_public_names_are_few_and_those_that_a_type_checker_sees():
    checked = ast.parse((LIBRARY / "__init__.py").read_text())
    (block,) = (node for node in checked.body if isinstance(node, ast.If))
    seen = {
        alias.name for node in ast.walk(block) for alias in getattr(node, "names", ())
    }
    assert (
        seen | {"__version__"} == set(determined_amp.__all__) <= {*dir(determined_amp)}
    )
    assert all(getattr(determined_amp, name) is not None for name in seen)
    assert len(seen) <= 14
    # Importing a module `x` would set `determined_amp.x`, whatever a name says.
    assert seen.isdisjoint(path.stem for path in LIBRARY.iterdir())
    with pytest.raises(AttributeError, match="has no attribute 'MixedPrecison'"):
        determined_amp.MixedPrecison  # noqa: B018
