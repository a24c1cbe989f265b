"""The project keeps its promises: light imports, arrows down, documented names."""

import ast
from graphlib import TopologicalSorter
import importlib.metadata
import inspect
import json
from pathlib import Path
import re
import subprocess
import sys
import tomllib

import jax
import numpy as np
import optax
import pytest

import gradacc_jax
from tests.lenient import lenient

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gradacc_jax"
README = ROOT / "README.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# The house, from the roof down. A room imports from its own row and from lower ones;
# `__init__` is the face, which the command sees as every user does.
ROWS = (
    {"__main__"},
    {"cli"},
    {"__init__"},
    {"planning"},
    {"flax"},  # puts training's step and the accumulator into Flax's classes
    {"training"},
    {"stepping", "fitting"},
    {"averaging", "contrastive", "equivalence", "monitoring", "statistics"},
    {"accumulation", "microbatching"},
    {"auxiliary"},
    {"window"},
    {"policies"},
    {"references", "splitting", "reduction", "checkpointing"},
    {"precision", "losses", "arguments"},
)
# Rooms whose reports plot, or that are the command.
TOOLED = {"cli", "checkpointing", "planning"}
LEVEL = {room: -i for i, row in enumerate(ROWS) for room in row}


def rooms():
    """The package's modules, each with the room it is in."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path


def imports(path):
    """What a module imports, at its top or in a function, by its full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write the import with its full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_rooms(path):
    for name in imports(path):
        first, *rest = name.split(".")
        if first == "gradacc_jax":
            there = rest and ((PACKAGE / rest[0]).is_dir() or rest[0] in LEVEL)
            yield rest[0] if there else "__init__"


def files_of_the_tree():
    """What is committed, as far as it is text; what the tools write is left out."""
    written = {"__pycache__", "_build", "jupyter_execute", ".ipynb_checkpoints"}
    folders = [".ci", "benchmarks", "docs", "gradacc_jax", "notebooks", "tests"]
    paths = [p for p in ROOT.iterdir() if p.is_file() and p.suffix != ".lock"]
    paths += [p for folder in folders for p in (ROOT / folder).rglob("*")]
    for path in paths:
        parts = path.relative_to(ROOT).parts
        copied = parts[:2] == ("docs", "notebooks")
        if path.is_file() and not copied and not written & {*parts}:
            yield path


# --- the package ---------------------------------------------------------------------


def test_importing_the_package_loads_no_flax_no_plots_and_no_command():
    heavy = ["flax", "matplotlib", "rich", "orbax", "chex", "gradacc_jax.cli"]
    code = f"""
import sys
import gradacc_jax
print([name for name in {heavy} if name in sys.modules])
"""
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.strip() == "[]"


def test_importing_the_package_starts_no_backend_and_sets_no_configuration():
    code = """
import jax
before = dict(jax.config.values)
import gradacc_jax
changed = {k for k, v in jax.config.values.items() if before.get(k) != v}
assert not changed, changed
jax.config.update("jax_num_cpu_devices", 2)  # raises once a backend runs
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("room", sorted({room for room, _ in rooms()}))
def test_arrows_between_rooms_point_down(room):
    assert room in LEVEL, f"{room} has no row in this file; give it one"
    for path in [path for name, path in rooms() if name == room]:
        for other in imported_rooms(path):
            assert LEVEL[room] >= LEVEL[other], f"{path.name} imports {other}"


def test_no_rooms_import_each_other_in_a_circle():
    arrows = {}
    for room, path in rooms():
        arrows.setdefault(room, set()).update({*imported_rooms(path)} - {room})
    TopologicalSorter(arrows).prepare()  # raises CycleError, which names the circle


# --- the public API ------------------------------------------------------------------

NAMES = sorted(gradacc_jax.__all__)


def public(name):
    return getattr(gradacc_jax, name)


def test_all_names_what_there_is_once_and_in_order():
    assert list(gradacc_jax.__all__) == NAMES
    assert len(set(NAMES)) == len(NAMES)
    assert [name for name in NAMES if not hasattr(gradacc_jax, name)] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented_with_an_example_that_runs(name):
    documentation = inspect.getdoc(public(name)) or ""
    assert documentation, f"gradacc_jax.{name} has no docstring"
    if inspect.isfunction(public(name)):
        assert ">>> " in documentation, f"gradacc_jax.{name} has no doctest"


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_stands_on_the_api_page(name):
    page = (ROOT / "docs" / "api.md").read_text()
    assert re.search(rf"(^|[ .]){name}$", page, re.MULTILINE), name


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


# --- the distribution ----------------------------------------------------------------


def test_the_version_is_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{gradacc_jax.__version__}]" in changelog


def test_the_version_agrees_with_the_metadata():
    try:
        installed = importlib.metadata.version("gradacc-jax")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gradacc-jax is run from its checkout and not installed")
    assert installed == gradacc_jax.__version__


def test_the_accelerator_extras_are_extras_of_jax():
    offered = importlib.metadata.metadata("jax").get_all("Provides-Extra")
    for extra in ("cuda", "tpu"):
        assert PROJECT["optional-dependencies"][extra] == [f"jax[{extra}]"]
        assert extra in offered


def test_the_package_needs_at_run_time_what_it_imports_and_no_more():
    needed = {re.match(r"[a-z-]+", line)[0] for line in PROJECT["dependencies"]}
    tools = {"matplotlib", "orbax", "rich"}  # the extra `cli`; reports plot with it
    for room, path in rooms():
        foreign = {name.split(".")[0] for name in imports(path)}
        foreign -= {*sys.stdlib_module_names, "gradacc_jax"}
        allowed = needed | tools if room in TOOLED else needed
        assert foreign <= allowed, f"{path.name} imports {foreign - allowed}"


def test_nothing_names_a_path_of_one_machine():
    places = ["home", "root", "tmp", "opt", "work", "mnt", "Users"]
    of_a_machine = re.compile(r"(?<![\w.$}])/(" + "|".join(places) + r")/\w")
    for path in files_of_the_tree():
        text = path.read_text(errors="ignore")
        assert str(ROOT) not in text, path
        found = of_a_machine.search(text)
        assert found is None, f"{path}: {found[0]}"


# --- README, docs, notebooks ---------------------------------------------------------


def code_blocks(path, language):
    """A page's fenced blocks of one language, each at its own line of the page."""
    text = path.read_text()
    fences = re.compile(rf"^```{re.escape(language)}\n(.*?)^```", re.M | re.S)
    return [
        "\n" * text.count("\n", 0, found.start(1)) + found[1]
        for found in fences.finditer(text)
    ]


PAGES = sorted(
    path
    for path in (ROOT / "docs").glob("*.md")
    if code_blocks(path, "{code-cell} python")
)


def run_blocks(path, blocks):
    names = {"__name__": path.stem}
    for block in blocks:
        exec(compile(block, path, "exec"), names)
    return names


@pytest.mark.optax_promotes
def test_the_examples_of_the_readme_run():
    first, *others = code_blocks(README, "python")
    names = run_blocks(README, [first])
    # The example learns what it sets out to learn.
    np.testing.assert_allclose(names["params"], [1.0, -2.0, 3.0], atol=1e-3)
    run_blocks(README, [first, *others])


@pytest.mark.newest  # with the other JAX they run where the documentation is built
@pytest.mark.optax_promotes
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_cells_of_a_page_run(page):
    run_blocks(page, code_blocks(page, "{code-cell} python"))


def test_the_first_example_of_the_readme_is_ten_lines_of_code_and_no_more():
    lines = code_blocks(README, "python")[0].splitlines()
    assert len([line for line in lines if line.strip()]) <= 15


def test_the_two_commands_of_the_readme_are_those_that_ci_runs():
    blocks = [block.strip() for block in code_blocks(README, "bash")]
    job, tests = [block for block in blocks if block.startswith("python3 -m venv")]
    assert job.endswith("gradacc train")
    assert "pytest" in tests
    script = (ROOT / ".ci" / "run").read_text()
    assert f'"{job}"' in script
    assert f'"{tests}"' in script


@pytest.mark.parametrize("folder", ["docs", "notebooks"])
def test_notebooks_are_kept_without_outputs(folder):
    paths = [p for p in files_of_the_tree() if p.suffix == ".ipynb"]
    for path in [p for p in paths if p.is_relative_to(ROOT / folder)]:
        cells = json.loads(path.read_text())["cells"]
        for cell in [cell for cell in cells if cell["cell_type"] == "code"]:
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


def test_a_notebook_ends_in_an_assertion_and_a_plot():
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
        assert any("assert " in source for source in code[-3:]), path
        assert any("plt." in source for source in code[-3:]), path


# --- what the tests themselves run under ---------------------------------------------


def test_tests_see_eight_devices():
    assert jax.device_count() == 8


def test_a_silent_promotion_is_an_error():
    with pytest.raises(ValueError, match="promot"):
        jax.numpy.ones(2, "int32") + jax.numpy.ones(2, "float32")
    with pytest.raises(ValueError, match="rank_promotion"):
        jax.numpy.ones((2, 2)) + jax.numpy.ones(2)


def test_an_optimizer_of_optax_runs_leniently():
    opt = lenient(optax.adam(1.0))
    params = jax.numpy.ones(2)
    updates, _ = opt.update(params, opt.init(params), params)
    assert updates.dtype == params.dtype


@pytest.mark.optax_promotes
def test_a_test_that_is_marked_may_promote():
    total = jax.numpy.ones(2, "int32") + jax.numpy.ones(2, "float32")
    assert total.dtype == "float32"
