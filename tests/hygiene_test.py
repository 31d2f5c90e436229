"""Rules of the repository, checked on its source: imports, docstrings, config keys, presets."""

import ast
import functools
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from aodiff.config import METHOD_DEFAULTS, base, flatten

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted((ROOT / "aodiff").rglob("*.py")) + sorted((ROOT / "pallas_kernels").rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
TEXTS = [
    path
    for path in ROOT.rglob("*")
    if path.suffix in (".py", ".md", ".sh", ".toml")
    and not any(part.startswith(".") or part in ("runs", "build") for part in path.parts[1:])
    and ROOT / "shared" not in path.parents
]

# Package -> what it must not import (architecture section 3: arrows never point up).
FORBIDDEN = {
    "pallas_kernels": ("aodiff", "flax", "ml_collections", "orbax", "optax", "grain"),
    "aodiff/core": (
        *("flax", "ml_collections", "orbax", "grain", "aodiff.nn", "aodiff.methods"),
        *("aodiff.data", "aodiff.sampling", "aodiff.steps", "aodiff.train"),
    ),
    "aodiff/nn": (
        *("ml_collections", "orbax", "optax", "grain", "aodiff.methods", "aodiff.data"),
        *("aodiff.sampling", "aodiff.steps", "aodiff.train", "aodiff.config"),
    ),
    "aodiff/sampling": (
        "ml_collections",
        "orbax",
        "aodiff.methods",
        "aodiff.train",
        "aodiff.steps",
    ),
    "aodiff/methods": (
        *("orbax", "grain", "aodiff.steps", "aodiff.state", "aodiff.train", "aodiff.checkpoint"),
        *("aodiff.evaluate", "aodiff.generate", "aodiff.main", "aodiff.tools"),
    ),
    "aodiff/data": ("aodiff.methods", "aodiff.nn", "aodiff.train", "aodiff.steps", "aodiff.tools"),
}
ONLY_IN = {  # package -> the one place that may import it
    "orbax": "aodiff/checkpoint.py",
    "tensorboardX": "aodiff/writers.py",
    "wandb": "aodiff/writers.py",
    "grain": "aodiff/data/",
    "tensorflow_datasets": "aodiff/data/",
    "torch": "aodiff/tools/",
}
NEVER = ("tensorflow", "clu", "jax.experimental.pjit", "jax.experimental.shard_map")


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: pathlib.Path) -> set[str]:
    """Modules that a file imports anywhere, `from a import b` as a and a.b."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def uses(path: pathlib.Path, module: str) -> bool:
    return any(name == module or name.startswith(module + ".") for name in imports(path))


def inside(path: pathlib.Path, place: str) -> bool:
    return str(path.relative_to(ROOT)).startswith(place)


@pytest.mark.parametrize("place", FORBIDDEN)
def test_imports_point_down(place):
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in SOURCES
        if inside(path, place + "/")
        for module in FORBIDDEN[place]
        if uses(path, module)
    ]
    assert wrong == []


def test_one_owner_per_outside_package_and_some_never():
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in SOURCES
        for module, place in (ONLY_IN | dict.fromkeys(NEVER, "nowhere")).items()
        if uses(path, module) and not inside(path, place)
    ]
    assert wrong == []


def test_the_rules_find_what_they_look_for(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def f():\n    from flax import linen\n    import orbax.checkpoint as ocp\n")
    assert uses(file, "flax") and uses(file, "orbax") and not uses(file, "fla")


def test_importing_everything_opens_no_socket_and_loads_no_tensorflow():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in SOURCES
        if path.name != "__init__.py" and path.name != "bench_torch.py"
    ]
    program = (
        "import importlib, socket, sys\n"
        "class Refused(socket.socket):\n"
        "    def connect(self, *a): raise AssertionError('a socket was connected at import')\n"
        "    def bind(self, *a): raise AssertionError('a socket was bound at import')\n"
        "socket.socket = Refused\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "bad = {'tensorflow', 'clu', 'torch'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr[-2000:]


def public(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")


def test_modules_classes_and_functions_of_more_than_a_few_lines_have_docstrings():
    missing = []
    for path in SOURCES:
        module = tree(path)
        if module.body and not ast.get_docstring(module):
            missing.append(str(path.relative_to(ROOT)))
        for node in module.body:
            # A function of a few lines whose signature says it all may go without.
            long = isinstance(node, ast.ClassDef) or (
                hasattr(node, "end_lineno") and node.end_lineno - node.lineno > 6
            )
            if public(node) and long and node.name != "main" and not ast.get_docstring(node):
                missing.append(f"{path.relative_to(ROOT)}:{node.name}")
    assert missing == []


def test_public_functions_are_annotated():
    missing = []
    for path in SOURCES:
        for node in tree(path).body:
            if public(node) and isinstance(node, ast.FunctionDef) and node.returns is None:
                missing.append(f"{path.relative_to(ROOT)}:{node.name}")
    assert missing == []


def test_no_print_outside_tools_and_commands():
    allowed = (
        *("aodiff/tools/", "aodiff/data/prepare.py", "aodiff/data/bench.py"),
        "pallas_kernels/bench/",
    )
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if not any(inside(path, place) for place in allowed)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert found == []


def test_no_module_is_over_400_lines():
    assert [
        str(p.relative_to(ROOT)) for p in SOURCES if len(p.read_text().splitlines()) > 400
    ] == []


@pytest.mark.parametrize("method", METHOD_DEFAULTS)
def test_every_config_key_is_read_somewhere(method):
    """A key counts as read where its name is an attribute or a whole-group argument."""
    attributes, groups = set(), set()
    for path in SOURCES:
        if path.name == "config.py":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute):
                attributes.add(node.attr)
            if isinstance(node, ast.keyword) and node.arg is None:  # f(**config.mesh)
                groups.add(getattr(node.value, "attr", None))
    finalize = (ROOT / "aodiff/config.py").read_text()
    dead = []
    for key in flatten(base(method)):
        group, _, name = key.rpartition(".")
        if name in attributes or group in groups or f"c.{key}" in finalize:
            continue
        dead.append(key)
    assert dead == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_presets_and_header_table_name_each_other(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = re.findall(r"^\| ([^|]+) \|", module.__doc__, re.MULTILINE)
    named = {name.strip() for row in rows for name in row.split(",")} - {"preset", "---"}
    named = {"" if name == "(none)" else name for name in named}
    assert named == set(module.PRESETS)
    for preset in module.PRESETS:
        module.get_config(preset)


def test_no_machine_paths_or_leftovers():
    paths = re.compile(r"/(?:home|root|work|Users)/\w|/tmp/\w")
    words = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (paths.search(line) or words.search(line)) and path != pathlib.Path(__file__)
    ]
    assert found == []


def test_readme_is_filled_in_and_its_files_and_modules_exist():
    text = (ROOT / "README.md").read_text()
    assert "_to fill_" not in text
    files = set(re.findall(r"\]\((?!http)([^)#]+)\)", text)) | set(
        re.findall(r"\b(?:configs|launch)/[\w/]+\.\w+", text)
    )
    modules = {m.replace(".", "/") + ".py" for m in re.findall(r"python -m (aodiff[\w.]+)", text)}
    assert [name for name in files | modules if not (ROOT / name).exists()] == []
