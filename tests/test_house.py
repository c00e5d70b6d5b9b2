"""The rules of the house, checked on the syntax trees of both packages.

Every failure is a sentence to act on. Why the rules are what they are: jaxpaged/ARCHITECTURE.md.
This module imports nothing that it checks.
"""

import ast
import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP_LEVEL = {"LICENSE", "README.md", "configs", "jaxpaged", "pallas_kernels", "pyproject.toml", "scripts", "tests"}

LEAVES = {
    "config",
    "encoding",
    "errors",
    "interrupts",
    "kv_cache_spec",
    "kv_connector",
    "kv_store",
    "messages",
    "multimodal",
    "plugins",
    "pooling",
    "result",
    "sampling_params",
}
# Who may import whom. Every layer may import itself and the leaves.
LAYERS = {
    "entrypoints": {"serving", "engine", "parsing", "proto", "client"},
    "serving": {"engine", "parsing"},
    "tools": {
        "client",
        "core",
        "distributed",
        "engine",
        "entrypoints",
        "executor",
        "layers",
        "models",
        "params",
        "serving",
        "worker",
    },
    "client": {"proto"},
    "proto": set(),
    "engine": {"core", "executor"},
    "core": set(),
    "executor": {"worker", "models", "distributed"},
    "worker": {"models", "layers", "sampling", "params", "distributed"},
    "models": {"layers", "params"},
    "layers": {"params"},
    "sampling": set(),
    "params": set(),
    "distributed": {"params"},
    "parsing": set(),
    "assets": set(),
}
# The worker prepares once per step what all layers hand to a kernel; sampling searches; a plan names GPUs.
USES_KERNELS = {"layers", "sampling", "tools", "worker"}
# (file, beginning of the module): why this one import may cross the layers.
CONVERT = "jaxpaged/entrypoints/cli/convert.py"
MERGE = "jaxpaged/entrypoints/cli/merge.py"
BUILD = "jaxpaged/engine/build.py"
CROSSINGS: dict[tuple[str, str], str] = {
    (BUILD, "jaxpaged.models."): "it reads a model's config.json and puts the parts of an engine together",
    (BUILD, "jaxpaged.params."): "the same",
    (CONVERT, "jaxpaged.distributed."): "it reads and writes weights, and no engine runs",
    (CONVERT, "jaxpaged.models."): "the same",
    (CONVERT, "jaxpaged.params."): "the same",
    (MERGE, "jaxpaged.models."): "the same",
    (MERGE, "jaxpaged.params."): "the same",
    ("jaxpaged/entrypoints/cli/__init__.py", "jaxpaged.tools."): "it has the commands of the tools",
    ("jaxpaged/entrypoints/cli/models.py", "jaxpaged.params."): "it lists folders, and nothing there imports jax",
    ("jaxpaged/entrypoints/cli/supported.py", "jaxpaged.models.known"): "it lists them, and nothing there imports jax",
    ("jaxpaged/entrypoints/cli/generate.py", "jaxpaged.tools.pictures."): "--timeline draws a picture",
    ("jaxpaged/entrypoints/llm.py", "jaxpaged.tools.pictures."): "llm.timeline() and others draw themselves",
}

NO_JAX = {"client", "core", "engine", "entrypoints", "parsing", "proto", "serving"} | LEAVES
JAX_FAMILY = {"jax", "jaxlib", "flax", "optax", "orbax"}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
# Words of the house with one meaning: in whose names they may be.
WORDS = {
    "plan": r"jaxpaged/tools/(planning|pictures)/\w+\.py",
}
VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}

# The kinds of compiled programs are declared in one file; these layers choose, keep and call programs.
KINDS_DECLARED = "jaxpaged/worker/programs/declare.py"
CALLS_PROGRAMS = {"executor", "messages", "worker"}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
# path or path::function: why it is longer.
LONG: dict[str, str] = {
    "jaxpaged/proto/jaxpaged_pb2_grpc.py": "it is generated",
    "jaxpaged/proto/jaxpaged_pb2_grpc.py::add_InferenceServicer_to_server": "the same",
}

# What pip calls a distribution, where it is not the name of the module.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "jax_triton": "jax-triton",
    "opentelemetry": "opentelemetry-sdk",
    "orbax": "orbax-checkpoint",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}


def sources(*folders: str) -> list[tuple[str, ast.Module]]:
    """(path relative to the root, syntax tree) of every Python file below `folders`."""
    return [pair for folder in folders for pair in sources_of(folder)]


@functools.cache
def sources_of(folder: str) -> list[tuple[str, ast.Module]]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def imported_modules(path: str, tree: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports anywhere, those for the type checker only left out."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = Path(path).parts[: -node.level] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def imported_files(path: str, tree: ast.AST, files: Collection[str]) -> set[str]:
    """Which of `files` a file imports anywhere: lazily and for the type checker too."""
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = Path(path).parts[: -node.level] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            if name == "jaxpaged.__version__":  # the package is there before any of its modules
                continue
            place = name.replace(".", "/")
            parent = place.rpartition("/")[0]
            options = (f"{place}.py", f"{place}/__init__.py", f"{parent}.py", f"{parent}/__init__.py")
            found.update([each for each in options if each in files][:1])
    return found - {path}


def circles(imports: Mapping[str, Collection[str]]) -> list[frozenset[str]]:
    """The strongly connected components of more than one file (Tarjan, "Depth-first search", 1972)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(file: str) -> None:
        numbers[file] = lowest[file] = len(numbers)
        stack.append(file)
        for other in imports.get(file, ()):
            if other not in numbers:
                visit(other)
            if other in stack:
                lowest[file] = min(lowest[file], lowest[other])
        if lowest[file] == numbers[file]:
            circle = frozenset(stack[stack.index(file) :])
            del stack[stack.index(file) :]
            if len(circle) > 1:
                found.append(circle)

    for file in sorted(imports):
        if file not in numbers:
            visit(file)
    return found


def circle_problems(found: Collection[frozenset[str]]) -> Iterator[str]:
    """Files that cannot be read one after the other."""
    for circle in found:
        files = ", ".join(sorted(circle))
        yield f"{files} import each other. Move what both need into one of them, or hand it in as an argument."


def layer_of(path: str) -> str:
    """`core` for jaxpaged/core/scheduler.py, `errors` for jaxpaged/errors.py, "" for the package itself."""
    part = Path(path).parts[1].removesuffix(".py")
    return "" if part in ("__init__", "__main__") else part


def layer_problems(path: str, tree: ast.AST) -> Iterator[str]:
    """Imports against the direction of the layers, or of jax where the host must do without it."""
    if path.startswith("pallas_kernels/"):
        for module in imported_modules(path, tree):
            if module.split(".")[0] == "jaxpaged":
                yield f"{path} imports {module}; kernels must be usable without jaxpaged. Pass in what they need."
        return
    layer = layer_of(path)
    if not layer:
        return
    if layer not in LAYERS and layer not in LEAVES:
        yield f"{path} is in no layer. Move it into one, or add its layer to tests/test_house.py."
        return
    for module in imported_modules(path, tree):
        package, _, rest = module.partition(".")
        if package in JAX_FAMILY and layer in NO_JAX:
            yield f"{path} imports {module}; {layer} runs on the host without jax, see ARCHITECTURE.md."
        if package == "pallas_kernels" and layer not in USES_KERNELS:
            yield f"{path} imports {module}; only {' and '.join(sorted(USES_KERNELS))} may call kernels."
        target = rest.split(".")[0]
        allowed = LAYERS.get(layer, set()) | LEAVES | {layer, "__version__"}
        crossing = any(path == crosser and module.startswith(crossed) for crosser, crossed in CROSSINGS)
        if package == "jaxpaged" and target not in allowed and not crossing:
            names = ", ".join(sorted(LAYERS.get(layer, set()))) or "nothing but the leaves"
            yield f"{path} imports {module}; {layer} may import {names}. Move the code, or pass the value in."


def early_problems(path: str, tree: ast.Module) -> Iterator[str]:
    """Imports of tools that a serving process would make too: outside of functions."""
    if not path.startswith("jaxpaged/tools/"):
        outside = [
            node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        for module in imported_modules(path, ast.Module(outside, [])):
            if module.startswith("jaxpaged.tools"):
                yield f"{path} imports {module} before it needs it. Import it in the function that measures or draws."


def protocol_problems(path: str, tree: ast.AST) -> Iterator[str]:
    """Imports of one protocol by another, or by what they share."""
    if not path.startswith(("jaxpaged/entrypoints/grpc/", "jaxpaged/serving/")):
        return
    for module in imported_modules(path, tree):
        if module.startswith(("jaxpaged.entrypoints.http", "starlette", "uvicorn")):
            yield f"{path} imports {module}; gRPC and serving know nothing of HTTP. Move what is shared to serving."
        if path.startswith("jaxpaged/serving/") and module.split(".")[0] in ("grpc", "google"):
            yield f"{path} imports {module}; serving knows no protocol. Move it to entrypoints/grpc."


def context_variable_problems(path: str, tree: ast.AST) -> Iterator[str]:
    """Arguments that nobody sees."""
    for module in imported_modules(path, tree):
        if module.split(".")[0] == "contextvars":
            yield f"{path} imports {module}; pass it as an argument, or in an object that is passed."


def unsafe_problems(path: str, tree: ast.AST) -> Iterator[str]:
    """Code that runs data as code, or state that every caller shares."""
    for module in imported_modules(path, tree):
        if module.split(".")[0] in UNSAFE_MODULES:
            yield f"{path} imports {module}; loading it can run code. Use msgspec, safetensors or JSON."
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            yield f"{path}:{node.lineno} calls {node.func.id}; parse the value instead."
        if isinstance(node, ast.Global):
            yield f"{path}:{node.lineno} changes a global; keep the state in an object and pass it."
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("JAXPAGED_"):
            yield f"{path}:{node.lineno} names {node.value}; we have options, not environment variables of our own."


def length_problems(path: str, tree: ast.Module, num_lines: int) -> Iterator[str]:
    """Files and functions with a second idea in them. Docstrings of functions do not count."""
    if num_lines > MAX_FILE_LINES and path not in LONG:
        yield f"{path} has {num_lines} lines, more than {MAX_FILE_LINES}. Find the second idea in it and move it."
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = node.body[0] if ast.get_docstring(node) is not None else None
        lines = node.end_lineno - node.lineno + 1
        lines -= docstring.end_lineno - docstring.lineno + 1 if docstring else 0
        if lines > MAX_FUNCTION_LINES and f"{path}::{node.name}" not in LONG:
            yield f"{path}:{node.lineno} {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}. Split it."


@functools.cache
def declared_distributions() -> set[str]:
    """Names of all requirements in pyproject.toml, in lower case with dashes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    requirements = [line for lines in [project["dependencies"], *extras] for line in lines]
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in requirements}


def undeclared_problems(path: str, tree: ast.AST) -> Iterator[str]:
    """Imports of packages that nobody asks pip for."""
    declared = declared_distributions()
    for module in {name.split(".")[0] for name in imported_modules(path, tree)}:
        if module in sys.stdlib_module_names or module in ("jaxpaged", "pallas_kernels"):
            continue
        distribution = DISTRIBUTIONS.get(module, module.lower().replace("_", "-"))
        if distribution not in declared:
            yield f"{path} imports {module}, but pyproject.toml does not ask for {distribution}. Add it, or do without."


def word_problems(path: str, tree: ast.AST) -> Iterator[str]:
    """Functions and classes that are called by a word which means something else elsewhere."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for word in {part.lower() for part in re.findall(r"[A-Z]?[a-z]+", node.name)} & WORDS.keys():
            if not re.fullmatch(WORDS[word], path):
                yield f"{path}:{node.lineno} {node.name}: the guides say what a {word} is. Use another word for this."


KINDS_OF_CACHES = ("jaxpaged/kv_cache_spec.py", "jaxpaged/worker/cache/")


def cache_kind_problems(path: str, tree: ast.AST) -> Iterator[str]:
    """Questions of which kind a layer's cache is, outside of the files of the kinds."""
    if path.startswith(KINDS_OF_CACHES):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.search(r"^isinstance\(.*\wSpec\b", ast.unparse(node)):
            yield f"{path}:{node.lineno} asks for the kind of a cache. Ask its spec, or `worker/cache/kinds.py`."


def encoding_problems(path: str, tree: ast.AST) -> Iterator[str]:
    """Files opened as text in whatever encoding the locale has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and opens_text(node) and not {"encoding", None} & {k.arg for k in node.keywords}:
            yield f'{path}:{node.lineno} opens text in the encoding of the locale. Add encoding="utf-8".'


@functools.cache
def program_kinds() -> set[str]:
    """The names that `ProgramKind` declares."""
    tree = ast.parse((ROOT / KINDS_DECLARED).read_text(encoding="utf-8"))
    enum = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ProgramKind")
    return {node.value.value for node in enum.body if isinstance(node, ast.Assign)}


def program_kind_problems(path: str, tree: ast.AST) -> Iterator[str]:
    """Kinds of programs as bare strings, or guessed from the beginning or end of a name."""
    if path == KINDS_DECLARED or layer_of(path) not in CALLS_PROGRAMS:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in program_kinds():
            yield f"{path}:{node.lineno} has {node.value!r}; say which ProgramKind that is ({KINDS_DECLARED})."
        if isinstance(node, ast.Attribute) and re.search(r"\.kind\.(starts|ends)with$", ast.unparse(node)):
            yield f"{path}:{node.lineno} guesses a kind from its name; use the groups of {KINDS_DECLARED}."


def opens_text(call: ast.Call) -> bool:
    """`open(...)`, `x.open("r")`, `x.read_text()`, `x.write_text(...)`; a mode with a "b" is no text."""
    modes = [word.value for word in call.keywords if word.arg == "mode"]
    if isinstance(call.func, ast.Name) and call.func.id == "open":
        modes = modes or call.args[1:2] or [ast.Constant("r")]
    elif isinstance(call.func, ast.Attribute) and call.func.attr == "open":
        modes += call.args[:1]  # without a mode it may be a method of ours
    else:
        return isinstance(call.func, ast.Attribute) and call.func.attr in ("read_text", "write_text")
    words = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    return any(isinstance(word, str) and "b" not in word for word in words)


@functools.cache
def alphabet() -> set[str]:
    """The letters of `params/dims.py`."""
    tree = ast.parse((ROOT / "jaxpaged/params/dims.py").read_text(encoding="utf-8"))
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "ALPHABET")
    return set(ast.literal_eval(table))


def letter_problems(path: str, tree: ast.Module) -> Iterator[str]:
    """Arrays whose axes, the capital letters behind their names, are explained nowhere."""
    explained = re.search(r"^Letters:(.*?)(?:\n\n|\Z)", ast.get_docstring(tree) or "", re.DOTALL | re.MULTILINE)
    known = alphabet() | set(re.findall(r"\b[A-Z]\b", explained[1] if explained else ""))
    for node in ast.walk(tree):
        name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None) or ""
        axes = re.fullmatch(r"[a-z][a-z0-9_]*_([A-Z][A-Z0-9]*)", name)
        if axes and (unknown := set(re.findall("[A-Z]", axes[1])) - known):
            yield f"{path}: {name} has the axis {', '.join(unknown)}. Add a line 'Letters:' to the module's docstring."


def broken_links(path: Path) -> Iterator[str]:
    """Relative links of a Markdown file that lead nowhere, or to a heading that is not there."""
    for target, heading in re.findall(r"\]\(([^)\s#]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        other = path.parent / target if target else path
        if not other.exists():
            yield f"{path.relative_to(ROOT)} links to {target}, which does not exist."
        elif heading and other.suffix == ".md" and heading not in headings_of(other):
            yield f"{path.relative_to(ROOT)} links to {target}#{heading}, but no heading there is called so."


def headings_of(path: Path) -> set[str]:
    """Headings as links call them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def report(problems: Iterator[str]) -> None:
    found = sorted(set(problems))
    assert not found, "\n" + "\n".join(found)


# ---- the rules hold --------------------------------------------------------------------------------


def test_layers_import_downwards_only_and_the_host_side_never_imports_jax():
    report(p for path, tree in sources("jaxpaged", "pallas_kernels") for p in layer_problems(path, tree))


def test_no_files_import_each_other():
    trees = dict(sources("jaxpaged", "pallas_kernels"))
    imports = {path: imported_files(path, tree, trees.keys()) for path, tree in trees.items()}
    report(circle_problems(circles(imports)))


def test_tools_are_imported_where_they_are_used_only():
    report(p for path, tree in sources("jaxpaged", "pallas_kernels") for p in early_problems(path, tree))


def test_protocols_share_serving_and_know_nothing_of_each_other():
    report(p for path, tree in sources("jaxpaged") for p in protocol_problems(path, tree))


def test_no_argument_travels_in_a_context_variable():
    report(p for path, tree in sources("jaxpaged") for p in context_variable_problems(path, tree))


def test_nothing_loads_pickles_evaluates_text_or_keeps_global_state():
    report(p for path, tree in sources("jaxpaged", "pallas_kernels") for p in unsafe_problems(path, tree))


def test_files_and_functions_hold_one_idea_each():
    counted = (
        (path, tree, len((ROOT / path).read_text(encoding="utf-8").splitlines())) for path, tree in sources("jaxpaged")
    )
    report(p for path, tree, lines in counted for p in length_problems(path, tree, lines))


def test_every_imported_package_is_declared():
    report(p for path, tree in sources("jaxpaged", "pallas_kernels") for p in undeclared_problems(path, tree))


def test_text_is_read_and_written_in_one_encoding_wherever_it_runs():
    report(p for path, tree in sources("jaxpaged", "pallas_kernels", "scripts") for p in encoding_problems(path, tree))


def test_every_module_says_what_lives_in_it():
    empty = (
        f"{path} has no docstring. Say what lives here, and what this module does not know."
        for path, tree in sources("jaxpaged", "pallas_kernels", "scripts")
        if tree.body and ast.get_docstring(tree) is None
    )
    report(empty)


def test_every_letter_of_an_axis_is_explained():
    report(p for path, tree in sources("jaxpaged") for p in letter_problems(path, tree))


def test_no_module_has_a_name_that_says_nothing():
    vague = (
        f"{path} has a name that says nothing. Name it after what it holds."
        for path, _ in sources("jaxpaged", "pallas_kernels", "tests", "scripts")
        if Path(path).name in VAGUE_NAMES
    )
    report(vague)


def test_words_with_a_meaning_have_no_other_one():
    report(p for path, tree in sources("jaxpaged") for p in word_problems(path, tree))


def test_only_the_kinds_of_caches_know_which_of_them_a_spec_is():
    report(p for path, tree in sources("jaxpaged") for p in cache_kind_problems(path, tree))


def test_kinds_of_programs_are_declared_on_one_page():
    report(p for path, tree in sources("jaxpaged") for p in program_kind_problems(path, tree))


def test_nothing_is_left_to_do_in_comments():
    marker = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b")
    left = (
        f"{path}:{number} leaves something to do. Do it, or open an issue."
        for path, _ in sources("jaxpaged", "pallas_kernels")
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if marker.search(line)
    )
    report(left)


def test_the_top_level_shows_exactly_what_it_should():
    shown = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.name != "__pycache__"}
    assert shown - TOP_LEVEL == set(), "Move these below one of the known folders."
    assert TOP_LEVEL - shown == set(), "These belong at the top level and are missing."


def test_links_between_documents_lead_somewhere():
    documents = [ROOT / "README.md", *ROOT.glob("jaxpaged/**/*.md"), *ROOT.glob("pallas_kernels/**/*.md")]
    documents += [*ROOT.glob("configs/**/*.md"), *ROOT.glob("tests/*.md")]
    report(p for path in documents for p in broken_links(path))


def test_the_architecture_page_stays_a_page():
    lines = (ROOT / "jaxpaged/ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150, "Shorten jaxpaged/ARCHITECTURE.md: what is in the code need not be said twice."


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["chat", "--help"],
        ["bench", "serve", "--help"],
        ["serve", "--help"],
        ["serve", "--help=all"],
        ["plan", "--help"],
        ["kv", "export", "--help"],
    ],
)
def test_the_command_answers_for_help_without_heavy_imports(arguments):
    program = f"""
import json, sys
from jaxpaged.entrypoints.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code, end.code
print("\\n" + json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout.splitlines()[-1])
    if arguments[0] in ("generate", "chat", "serve", "kv"):
        assert not [name for name in names if name.startswith("jaxpaged.tools")], "this command needs no tools"
    heavy = {name.split(".")[0] for name in names} & (
        JAX_FAMILY | {"fastapi", "huggingface_hub", "numpy", "tokenizers", "transformers", "yaml"}
    )
    assert not heavy, f"import {', '.join(sorted(heavy))} where it is used, not at the top of a module"


# ---- the rules bite --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jaxpaged/core/x.py", "import jax"),
        ("jaxpaged/core/x.py", "def f():\n    from jax import numpy"),
        ("jaxpaged/core/x.py", "from jaxpaged.engine import core"),
        ("jaxpaged/core/x.py", "from ..worker import step"),
        ("jaxpaged/engine/x.py", "def f():\n    from jaxpaged.tools import bench"),
        ("jaxpaged/models/x.py", "from jaxpaged import worker"),
        ("jaxpaged/models/x.py", "import pallas_kernels"),
        ("jaxpaged/errors.py", "import jaxpaged.core.scheduler"),
        ("jaxpaged/elsewhere/x.py", "import os"),
        ("pallas_kernels/op/x.py", "from jaxpaged.params import dims"),
    ],
)
def test_an_import_against_the_layers_is_found(path, source):
    assert list(layer_problems(path, ast.parse(source)))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jaxpaged/core/x.py", "from jaxpaged.core import y\nfrom jaxpaged.errors import ConfigError"),
        ("jaxpaged/core/x.py", "if TYPE_CHECKING:\n    from jaxpaged.engine import core"),
        ("jaxpaged/layers/x.py", "import jax\nimport pallas_kernels"),
        ("jaxpaged/entrypoints/cli/x.py", "from jaxpaged import __version__"),
        ("pallas_kernels/op/x.py", "import jax"),
    ],
)
def test_an_import_along_the_layers_is_fine(path, source):
    assert not list(layer_problems(path, ast.parse(source)))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jaxpaged/entrypoints/grpc/x.py", "from jaxpaged.entrypoints.http.errors import HttpError"),
        ("jaxpaged/serving/x.py", "from starlette.requests import Request"),
        ("jaxpaged/serving/x.py", "import grpc"),
    ],
)
def test_a_protocol_in_anothers_place_is_found(path, source):
    assert list(protocol_problems(path, ast.parse(source)))
    assert not list(protocol_problems("jaxpaged/entrypoints/http/x.py", ast.parse(source)))


def test_a_context_variable_is_found():
    assert list(context_variable_problems("jaxpaged/x.py", ast.parse("from contextvars import ContextVar")))


@pytest.mark.parametrize(
    "source", ["import pickle", "eval('1')", "def f():\n    global x", "os.environ['JAXPAGED_FAST']"]
)
def test_unsafe_code_is_found(source):
    assert list(unsafe_problems("jaxpaged/x.py", ast.parse(source)))


def test_a_long_function_is_found_but_its_docstring_does_not_count():
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert list(length_problems("x.py", ast.parse("def f():\n" + body), 1))
    documented = 'def f():\n    """' + "words\n" * 100 + '"""\n' + "    x = 1\n" * 10
    assert not list(length_problems("x.py", ast.parse(documented), 1))


def test_a_circle_is_found():
    early, late, typed = "import p.b", "def f():\n    from p import c", "if TYPE_CHECKING:\n    from p.a import A"
    sources = {"p/a.py": early, "p/b.py": late, "p/c.py": typed, "p/d.py": "from . import a"}
    imports = {path: imported_files(path, ast.parse(text), sources.keys()) for path, text in sources.items()}
    (circle,) = circles(imports)
    assert circle == {"p/a.py", "p/b.py", "p/c.py"}
    assert list(circle_problems([circle])) and not list(circle_problems([]))


def test_a_tool_that_is_imported_early_is_found():
    early, late = "from jaxpaged.tools import bench", "def f():\n    from jaxpaged.tools import bench"
    assert list(early_problems("jaxpaged/entrypoints/x.py", ast.parse(early)))
    assert not list(early_problems("jaxpaged/entrypoints/x.py", ast.parse(late)))


def test_another_meaning_of_a_word_is_found():
    tree = ast.parse("class StepPlan: ...\n\n\ndef explanation(): ...")
    assert len(list(word_problems("jaxpaged/core/rank.py", tree))) == 1
    assert not list(word_problems("jaxpaged/tools/planning/plan.py", tree))


def test_a_question_for_the_kind_of_a_cache_is_found():
    tree = ast.parse("x = isinstance(spec, AttentionSpec | LatentSpec)\ny = isinstance(leaf, Spec)")
    assert len(list(cache_kind_problems("jaxpaged/core/x.py", tree))) == 1
    assert not list(cache_kind_problems("jaxpaged/worker/cache/latent.py", tree))


def test_a_kind_of_program_that_is_a_bare_string_is_found():
    for source in ('key = ProgramKey("decode_full", 8)', 'draws = key.kind.startswith("sam")'):
        assert list(program_kind_problems("jaxpaged/worker/x.py", ast.parse(source))), source
    assert not list(program_kind_problems("jaxpaged/worker/x.py", ast.parse("ProgramKey(ProgramKind.POOL, 8)")))


def test_an_undeclared_package_is_found():
    assert list(undeclared_problems("x.py", ast.parse("import torch")))


def test_a_letter_that_nobody_explains_is_found():
    assert list(letter_problems("x.py", ast.parse("x_TP = y_TP")))
    assert not list(letter_problems("x.py", ast.parse('"""Words.\n\nLetters: P\npages.\n"""\nx_TP = y_TP[a_R1]')))


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        "open(path, 'w')",
        "open(path, mode='a')",
        "path.open('r')",
        "path.read_text()",
        "path.write_text(text, errors='replace')",
    ],
)
def test_text_in_the_encoding_of_the_locale_is_found(source):
    assert list(encoding_problems("x.py", ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'rb')",
        "open(path, encoding='utf-8')",
        "path.open('wb')",
        "link.open()",
        "os.open(path, 0)",
        "path.read_text('utf-8', **more)",
        "path.read_text(encoding='ascii')",
        "path.read_bytes()",
    ],
)
def test_bytes_and_text_of_a_named_encoding_are_fine(source):
    assert not list(encoding_problems("x.py", ast.parse(source)))
