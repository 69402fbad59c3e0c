"""Which rules of shape does the code keep?

Every check takes sources and returns the places that break its rule, as "file:line: what". The
tables at the top are the rules; a new module or an agreed exception is a line there.
"""

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
MAX_ATTRIBUTES = 15
# Tables of fields: what a user may set, what Lightning has.
HAVE_MORE_ATTRIBUTES = ("ShardConfig", "TrainerConfig", "Framework")

# A module may import its own layer and those above it in this table. The longest prefix counts;
# "" is mics_strategy/__init__.py. `config` stands with the pure files: it holds a Topology.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "version", "recipe_names"),
    (
        *(
            "config",
            "config_checks",
            "islands",
            "topology",
            "mesh_axis",
            "scopes",
            "timeline",
            "sharding_report",
            "text_table",
            "tuning.threshold",
        ),
        *("comm.route", "comm.traffic", "comm.codecs", "comm.workspace", "comm.scratch", "comm.residuals"),
        *("engine.layout", "engine.lifecycle", "engine.plan", "engine.schedule", "engine.units", "engine.aliases"),
        *("engine.bucket_specs", "engine.memory_plan"),
        *("checkpoint.manifest", "checkpoint.reshard"),
    ),
    ("comm", "tuning.autotune"),
    ("engine",),
    ("outer",),
    ("checkpoint", "tuning", "auto_scopes"),
    ("api", "estimate", "recovery", "snapshots"),
    ("",),
    ("mixed_precision",),
    ("lightning", "accelerate", "cli", "calibrate_cli", "estimate_cli", "run", "launch_file"),
    ("autoload",),
)
PURE_LAYER = 1
# Beside the engine: what the planner may import, and who may import the planner.
PLANNER_IMPORTS_UP_TO = PURE_LAYER
CALIBRATE_IMPORTS_UP_TO = 2
PLANNER_IMPORTED_BY = ("planner", "auto_scopes", "cli", "calibrate_cli", "estimate_cli", "run")
# These folders may import the package's public names (mics_strategy itself) and their framework.
# One way to raise on all ranks together, to save sharded tensors, one meaning of mixed precision, one way to install.
ADAPTERS_MAY_IMPORT = (
    *("checkpoint.random_states", "checkpoint.whole_tensors", "comm.consensus", "mixed_precision"),
    *("snapshots.job", "snapshots.open_snapshot", "version"),
)
FRAMEWORKS = {
    "lightning": ("lightning", "pytorch_lightning", "lightning_fabric"),
    "accelerate": ("accelerate", "transformers"),
}
# Files that may name primitives of torch.distributed: patterns of paths to patterns of names.
OBJECTS = ("*_object", "*_object_list", "barrier", "monitored_barrier")
MAY_NAME_PRIMITIVES: dict[str, tuple[str, ...]] = {
    "comm/transport.py": ("*",),
    "comm/placement.py": ("all_gather", "all_reduce", "broadcast"),
    "comm/consensus.py": OBJECTS,
    "topology.py": OBJECTS,
    "checkpoint/*": OBJECTS,
    "lightning/*": OBJECTS,
    "accelerate/*": OBJECTS,
}
PRIMITIVES = (
    *("all_gather*", "all_reduce*", "all_to_all*", "reduce_scatter*", "broadcast*", "reduce"),
    *("scatter*", "gather*", "send*", "recv*", "isend", "irecv", "batch_isend_irecv", "P2POp"),
    *("barrier", "monitored_barrier", "_coalescing_manager"),
)
PRIMITIVE_MODULES = ("torch.distributed._functional_collectives", "torch.distributed.nn")
GROUP_MAKERS = ("new_group", "new_subgroups*", "split_group", "init_device_mesh")
GROUPS_MADE_IN = "comm/resources.py"
ONE_DOCSTRING = (  # in __init__.py
    *("comm", "comm.codecs", "tuning"),
    *("engine", "engine.setup", "engine.optimizer", "engine.profile", "checkpoint"),
)
VAGUE_NAMES = ("util", "utils", "helpers", "misc", "common")
# What a user may import: the promise, and all there is.
PROMISED_NAMES = {"Codec", "ShardConfig", "Sharded", "shard"}
PUBLIC_NAMES = {
    *PROMISED_NAMES,
    *("Topology", "MiCSError", "CheckpointError", "CommunicationError", "ConfigError"),
    *("LifecycleError", "NoFeasiblePlan", "ShapeError"),
    *("OpenCheckpoint", "PendingSave", "finish_saves", "load_checkpoint", "load_newest_checkpoint"),
    *("load_weights", "newest_checkpoint", "remove_checkpoint", "save_checkpoint", "Recovery", "MemorySnapshots"),
    *("check_checkpoint", "is_checkpoint", "atomic_checkpoint_folder", "finish_delayed", "StragglerWatch"),
    "restart_on_loss",
}
TOP_LEVEL = {
    *("README.md", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt", "CITATION.cff"),
    *(".ci", ".github", ".gitignore", ".gitattributes"),
    *("mics_strategy", "recipes", "tests", "docs", "benchmarks"),
}


@dataclass(frozen=True, slots=True)
class Source:
    """One parsed file.

    Attributes:
        path: Relative to the repository.
        text: The file.
        tree: Its syntax tree.
    """

    path: Path
    text: str
    tree: ast.Module

    @property
    def inner(self) -> Path:
        """The path inside the top folder: comm/route.py."""
        return self.path.relative_to(self.path.parts[0])

    @property
    def module(self) -> str:
        """The module inside the top package: comm.route, "" for its __init__.py."""
        parts = self.inner.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, node: ast.AST, what: str) -> str:
        """A violation at `node`."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"


def load(root: Path, folder: str) -> list[Source]:
    """Parse every Python file under `root/folder`; none where it does not exist."""
    sources = []
    for path in sorted((root / folder).rglob("*.py")):
        text = path.read_text()
        sources.append(Source(path.relative_to(root), text, ast.parse(text, str(path))))
    return sources


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module or name, written absolutely: torch.distributed.all_reduce."""

    target: str
    alias: str
    node: ast.AST
    in_function: bool


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a file, which nearly every check looks at."""
    return list(ast.walk(tree))


@functools.cache
def imports(source: Source) -> list[Import]:
    """All imports of a file, those inside functions included."""
    return list(_imports(source))


def _imports(source: Source) -> Iterator[Import]:
    inside = {id(n) for f in _functions(source) for n in ast.walk(f)}
    package = (source.path if source.path.name == "__init__.py" else source.path.with_suffix("")).parts[:-1]
    for node in nodes(source.tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, name.asname or name.name, node, id(node) in inside)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*parents, *filter(None, [node.module])))
            for name in node.names:
                target = f"{base}.{name.name}"
                yield Import(target, name.asname or name.name, node, id(node) in inside)


def _functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _layer(module: str) -> int | None:
    prefixes = [module[:i] for i in range(len(module), 0, -1) if module[i : i + 1] in ("", ".")]
    for prefix in prefixes or [""]:
        for index, layer in enumerate(LAYERS):
            if prefix in layer:
                return index
    return None


def check_imports(sources: Iterable[Source]) -> list[str]:
    """Imports inside mics_strategy go one way; frameworks stay in their folders."""
    sources = list(sources)
    modules = {source.module for source in sources}
    modules |= {".".join(source.inner.parts[:-1]) for source in sources}
    violations = []
    for source in sources:
        folder = source.module.split(".")[0]
        if folder != "planner" and _layer(source.module) is None:
            violations.append(source.at(source.tree, "is in no layer: add it to LAYERS"))
            continue
        for found in imports(source):
            top, _, rest = found.target.partition(".")
            if top == "mics_strategy":
                while rest not in modules and rest:  # a name, not a module
                    rest = rest.rpartition(".")[0]
                reason = _forbidden(source.module, rest, found.in_function)
                if reason:
                    violations.append(source.at(found.node, f"imports {found.target}: {reason}"))
            if top == "benchmarks":
                violations.append(source.at(found.node, f"imports {found.target}, which is not installed"))
            for owner, packages in FRAMEWORKS.items():
                if top in packages and folder not in (owner, "run"):
                    what = f"imports {found.target}, which belongs into {owner}/"
                    violations.append(source.at(found.node, what))
    return violations


def _forbidden(module: str, target: str, in_function: bool) -> str | None:
    """Why `module` may not import `target`, both inside mics_strategy; None where it may."""
    folder, target_folder = module.split(".")[0], target.split(".")[0]
    if target_folder == folder and folder in ("planner", *FRAMEWORKS):
        return None
    if target_folder == "planner":
        return None if {folder, module} & set(PLANNER_IMPORTED_BY) else "the engine does not know the planner"
    target_layer = _layer(target)
    if target_layer is None:
        return "in no layer"
    if folder == "planner":
        highest = CALIBRATE_IMPORTS_UP_TO if module == "planner.calibrate" else PLANNER_IMPORTS_UP_TO
        return "the planner imports pure files only" if target_layer > highest else None
    if folder in FRAMEWORKS:
        is_allowed = not target or target in ADAPTERS_MAY_IMPORT
        return None if is_allowed else "only public names, from mics_strategy itself"
    if module == "" and target_folder in FRAMEWORKS:
        return None if in_function else "only inside a function, so that it is loaded when used"
    own = _layer(module)
    return "against the direction of imports" if own is None or target_layer > own else None


def check_pure(sources: Iterable[Source]) -> list[str]:
    """Pure files know no process group."""
    return [
        source.at(found.node, f"a pure file imports {found.target}")
        for source in sources
        if _layer(source.module) == PURE_LAYER
        for found in imports(source)
        if found.target.startswith("torch.distributed")
    ]


def check_private_framework_names(sources: Iterable[Source]) -> list[str]:
    """The private names of a framework are imported in one file of its folder."""
    sources = list(sources)
    violations = []
    for folder, packages in FRAMEWORKS.items():
        first: Path | None = None
        for source in sources:
            if source.module.split(".")[0] != folder:
                continue
            for found in imports(source):
                names = found.target.split(".")
                if names[0] not in packages or not any(n.startswith("_") for n in names[1:]):
                    continue
                first = first or source.path
                if source.path != first:
                    what = f"imports {found.target}; private names of {folder} live in {first}"
                    violations.append(source.at(found.node, what))
    return violations


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _named_from_distributed(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Names of torch.distributed (and its submodules) that a file imports or uses."""
    aliases = set()
    for found in imports(source):
        if found.target.startswith("torch.distributed."):
            yield found.node, found.target.rpartition(".")[2]
        if found.target == "torch.distributed" or found.target.startswith("torch.distributed."):
            aliases.add(found.alias)
    for node in nodes(source.tree):
        if isinstance(node, ast.Attribute):
            base = ast.unparse(node.value)
            if base in aliases or base.startswith("torch.distributed"):
                yield node, node.attr


def check_primitives(sources: Iterable[Source]) -> list[str]:
    """Collectives are called in one file and groups made in one file."""
    violations = []
    for source in sources:
        path = str(source.inner)
        allowed = [n for pattern, ns in MAY_NAME_PRIMITIVES.items() if fnmatch(path, pattern) for n in ns]
        for node, name in _named_from_distributed(source):
            if _matches(name, PRIMITIVES) and not _matches(name, allowed):
                violations.append(source.at(node, f"names torch.distributed.{name}"))
            if _matches(name, GROUP_MAKERS) and path != GROUPS_MADE_IN:
                violations.append(source.at(node, f"makes groups with {name}, not in {GROUPS_MADE_IN}"))
        for found in imports(source):
            if found.target.startswith(PRIMITIVE_MODULES) and "*" not in allowed:
                violations.append(source.at(found.node, f"imports {found.target}"))
    return violations


def check_sizes(sources: Iterable[Source]) -> list[str]:
    """Files, functions and parameter lists are short."""
    violations = []
    for source in sources:
        num_lines = len(source.text.splitlines())
        if num_lines > MAX_FILE_LINES:
            violations.append(source.at(source.tree, f"{num_lines} lines, at most {MAX_FILE_LINES}"))
        for function in _functions(source):
            num_lines = (function.end_lineno or 0) - function.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                what = f"{function.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"
                violations.append(source.at(function, what))
            num = _num_parameters(function)
            if num > MAX_PARAMETERS:
                what = f"{function.name} has {num} parameters, at most {MAX_PARAMETERS}: use a dataclass"
                violations.append(source.at(function, what))
        for cls in (node for node in nodes(source.tree) if isinstance(node, ast.ClassDef)):
            num = len(_attributes(cls))
            if num > MAX_ATTRIBUTES and cls.name not in HAVE_MORE_ATTRIBUTES:
                what = f"{cls.name} has {num} attributes, at most {MAX_ATTRIBUTES}: cut it where it does two things"
                violations.append(source.at(cls, what))
    return violations


def _attributes(cls: ast.ClassDef) -> set[str]:
    """Names that the class declares, or that its methods assign to self."""
    declared = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    stored = (node for node in ast.walk(cls) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return declared | {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def check_cycles(sources: Iterable[Source]) -> list[str]:
    """Imports form no cycle, not even through those for annotations. Those inside functions do not count."""
    sources = list(sources)
    edges = _imported(sources)
    return [
        source.at(source.tree, f"imports itself in a cycle: {' > '.join(cycle)}")
        for name, source in _by_name(sources).items()
        if (cycle := _path(edges, name, name))
    ]


def _path(edges: Mapping[str, Set[str]], start: str, end: str) -> list[str]:
    """A shortest path of at least one edge; empty if there is none."""
    paths, seen = [[start]], set()
    for path in paths:
        for other in sorted(edges[path[-1]] - seen):
            if other == end:
                return [*path, other]
            seen.add(other)
            paths.append([*path, other])
    return []


def _by_name(sources: Iterable[Source]) -> dict[str, Source]:
    return {source.path.parts[0] + f".{source.module}".rstrip("."): source for source in sources}


def _imported(sources: Iterable[Source]) -> dict[str, set[str]]:
    """The modules that each module imports directly at its top level."""
    modules = _by_name(sources)
    edges = {}
    for name, source in modules.items():
        found = [each for each in imports(source) if not each.in_function]
        targets = {each.target if each.target in modules else each.target.rpartition(".")[0] for each in found}
        edges[name] = (targets & modules.keys()) - {name}
    return edges


def _num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Named parameters without self and cls; none for what a framework or a type checker dictates.

    A kernel (``triton.jit``) takes pointers, numbers and constants one by one.
    """
    decorators = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in function.decorator_list}
    if decorators & {"override", "overload", "jit"}:
        return 0
    args = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(args) - (1 if args and args[0].arg in ("self", "cls") else 0)


def check_asserts(sources: Iterable[Source]) -> list[str]:
    """No assert, which python -O removes."""
    return [
        source.at(node, "assert: raise an error that says what to do")
        for source in sources
        for node in nodes(source.tree)
        if isinstance(node, ast.Assert)
    ]


def check_names(sources: Iterable[Source]) -> list[str]:
    """Modules answer a question; inner __init__.py files hold one docstring."""
    violations = []
    for source in sources:
        vague = [part for part in source.inner.with_suffix("").parts if part in VAGUE_NAMES]
        if vague:
            violations.append(source.at(source.tree, f"{vague[0]!r} says nothing: name the question"))
        if not ast.get_docstring(source.tree):
            violations.append(source.at(source.tree, "no docstring"))
        if source.module in ONE_DOCSTRING and len(source.tree.body) > 1:
            violations.append(source.at(source.tree.body[1], "more than a docstring"))
    return violations


def check_public_names(sources: Iterable[Source]) -> list[str]:
    """`mics_strategy.__all__` is a plain list: what is promised, and nothing that is not agreed."""
    for source in sources:
        if source.module == "":
            return [source.at(source.tree, what) for what in _wrong_names(source.tree)]
    return []


def _wrong_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = set(ast.literal_eval(node.value))
            yield from (f"{name!r} is promised" for name in sorted(PROMISED_NAMES - names))
            yield from (f"{name!r} is not in PUBLIC_NAMES" for name in sorted(names - PUBLIC_NAMES))
            return
    yield "no __all__"


def check_top_level(entries: Iterable[str]) -> list[str]:
    """The repository has few entries."""
    return sorted(set(entries) - TOP_LEVEL)
