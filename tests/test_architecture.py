"""The architecture holds: direction of imports, no cycles, light readers, sizes, the README's tree, public names."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "anisoscope"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own layer and from layers to its left.
LAYERS = [
    ("errors", "estimate", "meanwhile"),
    ("axes", "rows", "runs"),
    ("kernels", "stats", "text", "views"),
    ("distributed", "measures", "models"),
    ("capture", "schedule", "slices", "tangent", "train"),
    ("engines", "sampling", "theory"),
    ("monitoring", "profiling"),
    ("monitor", "sweep"),
    ("watching",),
    ("commands", "demo"),
    ("cli",),
    ("__init__",),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

PUBLIC = [
    "regularizers",
    "TangentAnalysis",
    "load_recipe",
    "run_study",
    "fit_proxy",
    "energy_test",
    "energy_share",
    "wall_share",
    "until",
    "log_spaced",
    "every",
    "either",
    "by_tokens",
    "Monitor",
    "write_report",
    "load_corpus",
    "profile",
    "open_runs",
    "RunWriter",
    "RunReader",
    "export",
    "ProfileOptions",
    "record",
    "discover",
    "Site",
    "load_model",
    "AnisoscopeError",
    "BinMoments",
    "Estimate",
    "Moments",
    "Needs",
    "Reservoir",
    "Sketch",
    "Workspace",
    "__version__",
    "curvature",
    "effective_rank",
    "effective_rank_lambda",
    "gride",
    "isoscore",
    "isoscore_star",
    "linearity",
    "local_isotropy",
    "local_pca_dimension",
    "local_tangents",
    "mean_cosine",
    "measure",
    "measure_names",
    "merge_across_ranks",
    "mle",
    "nearest_neighbors",
    "participation_ratio",
    "partition_isotropy",
    "register",
    "spectral_ratio",
    "spectral_ratio_l1",
    "stable_rank",
    "turning_angle",
    "two_nn",
    "unregister",
]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, inside functions too."""
    known = {module_name(file) for file in FILES}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "anisoscope":
            base = node.module.removeprefix("anisoscope").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if inner in known else base or "__init__")
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("anisoscope").lstrip(".") or "__init__"
                for alias in node.names
                if alias.name.split(".")[0] == "anisoscope"
            }
    return found - {module_name(path)}


GRAPH = {module_name(path): imports(path) for path in FILES}


def test_every_module_has_a_layer():
    assert {name.split(".")[0] for name in GRAPH} == set(RANK)


@pytest.mark.parametrize("module", sorted(set(GRAPH) - {"__init__"}))
def test_imports_point_one_way(module):
    own = RANK[module.split(".")[0]]
    for target in GRAPH[module]:
        # The root only holds lazy names and the version; the command line reads both.
        if target == "__init__":
            assert module == "cli", f"{module} imports from the package root"
        else:
            assert RANK[target.split(".")[0]] <= own, f"{module} imports {target}, which lies to its right"


def test_no_cycles():
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for target in GRAPH[module] - {"__init__"}:
                visit(target, (*trail, module))
            done.add(module)

    for module in GRAPH:
        if module != "__init__":
            visit(module, ())


def fresh(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def test_runs_and_views_need_no_torch():
    code = (
        "import sys, pkgutil, importlib, anisoscope.runs, anisoscope.views\n"
        "for package in (anisoscope.runs, anisoscope.views):\n"
        "    for info in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(info.name)\n"
        "print('torch' in sys.modules, 'scipy' in sys.modules)"
    )
    assert fresh(code) == "False False"


def test_import_is_light():
    assert fresh("import sys, anisoscope; print('torch' in sys.modules)") == "False"


def test_only_distributed_touches_torch_distributed():
    users = {module_name(path) for path in FILES if "torch.distributed" in path.read_text()}
    assert users <= {"distributed"}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_sizes(path):
    text = path.read_text()
    assert text.count("\n") <= 420, f"{path.name} is longer than a reader can hold"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.body[0].lineno + 1
            assert lines <= 65, f"{path.name}:{node.lineno} {node.name} has {lines} lines of body"


def test_public_names_are_frozen():
    import anisoscope

    assert sorted(anisoscope.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(anisoscope, name) is not None


def test_types_and_runtime_name_the_same():
    """The block for type checkers repeats the table of lazy names; they must not drift apart."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {(alias.asname, node.module) for node in block.body for alias in node.names}
    import anisoscope

    modules = {(name, home.rpartition(".")[0]) for name, home in anisoscope._MODULES.items()}
    assert typed == set(anisoscope._HOME_OF.items()) | modules


def test_unknown_attribute_suggests():
    import anisoscope

    with pytest.raises(AttributeError, match="did you mean 'two_nn'"):
        _ = anisoscope.twonn


def test_readme_tree_is_the_disk():
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if tracked.returncode:
        pytest.skip("not a git checkout: the tree on disk cannot be told from build products")
    on_disk = {line for line in tracked.stdout.splitlines() if (ROOT / line).is_file()}
    tree = re.search(r"<!-- tree -->\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert tree, "README.md lost its tree"
    listed, folders = set(), {}
    for line in tree.group(1).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        if name.endswith("/"):
            folders[depth] = name
        else:
            listed.add("".join(folders[level] for level in range(depth)) + name)
        assert len(line.split(None, 1)) == 2, f"{name} has no word on what it is"
    assert listed == on_disk


def test_documents_name_no_absolute_path():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"(?<![\w.])/(home|root|work|Users|tmp)/", path.read_text()), path.name


def test_every_measure_and_error_is_documented():
    import anisoscope
    from anisoscope import errors

    cards = (ROOT / "docs" / "measures.md").read_text()
    for name in (*anisoscope.measure_names(), "linearity"):
        assert re.search(rf"^#+ .*`{name}`", cards, re.MULTILINE), f"docs/measures.md has no card for {name}"
    pages = (ROOT / "docs" / "errors.md").read_text()
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.AnisoscopeError):
            assert name in pages, f"docs/errors.md says nothing of {name}"
