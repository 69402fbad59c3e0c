"""Files that start a recipe on a cluster: `mics launch KIND RECIPE --nodes N`.

The files are templates in `clusters/`. A template writes no bare string: every one passes a filter that quotes it for
the language in which it stands, or refuses it. Each file starts one torchrun per node, gives it the address of the
first node, continues from the newest checkpoint, and passes the signal of a time limit to the ranks. What a cluster of
the kind cannot do, or the recipe cannot do on so many ranks, is refused before a file is written.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mics_strategy.errors import MiCSError, command_error

from .batch import BatchPlan
from .config import Recipe, load_recipe
from .errors import RecipeError, require
from .files import find_recipe
from .plain_data import shown

_TEMPLATES = Path(__file__).parent / "clusters"
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,3}):(\d\d):(\d\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of cluster.

    Attributes:
        template: File in `clusters/`.
        shared: Default of `--shared`.
        container: Whether ranks run in a container.
        reads: Options that this kind reads, of those that not all do.
        has_efa: Whether nodes are connected by EFA.
        auto_resume: Whether the cluster replaces faulty nodes and starts the step again.
        has_files: Whether nodes see the files of the machine on which the command runs.
    """

    template: str
    shared: str
    container: Literal["never", "optional", "always"]
    reads: frozenset[str] = frozenset()
    has_efa: bool = False
    auto_resume: bool = False
    has_files: bool = True


_SLURM = frozenset({"venv", "container", "partition", "time", "port"})
_REMOTE: dict[str, Any] = {"has_files": False}
KINDS: dict[str, Kind] = {
    "torchrun": Kind(
        template="torchrun.sh.j2", shared="/shared/mics", container="never", reads=frozenset({"venv", "port"})
    ),
    "slurm": Kind(template="slurm.sbatch.j2", shared="/shared/mics", container="optional", reads=_SLURM),
    "parallelcluster": Kind(
        template="slurm.sbatch.j2", shared="/fsx/mics", container="optional", reads=_SLURM, has_efa=True
    ),
    "parallelcluster-config": Kind(
        template="parallelcluster.yaml.j2",
        shared="/fsx/mics",
        container="never",
        reads=frozenset({"partition", "instance_type"}),
    ),
    "hyperpod": Kind(
        template="slurm.sbatch.j2",
        shared="/fsx/mics",
        container="optional",
        reads=_SLURM,
        has_efa=True,
        auto_resume=True,
    ),
    "sagemaker": Kind(
        template="sagemaker.py.j2",
        shared="/opt/ml/input/data/shared",
        container="always",
        reads=frozenset({"container", "instance_type", "time"}),
        has_efa=True,
        **_REMOTE,
    ),
    "skypilot": Kind(
        template="skypilot.yaml.j2",
        shared="/mnt/shared",
        container="optional",
        reads=frozenset({"container", "accelerator", "port"}),
        **_REMOTE,
    ),
    "trainjob": Kind(
        template="trainjob.yaml.j2",
        shared="/mnt/shared",
        container="always",
        reads=frozenset({"container", "efa"}),
        **_REMOTE,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Facts of one job for the templates.

    Attributes:
        name: Name of small letters, digits and hyphens, at most 40 characters, which begins with a letter.
        title: Recipe and cluster, for a comment.
        nodes: Nodes.
        gpus_per_node: Ranks of a node.
        arguments: Arguments of the program.
        seconds: Time limit.
        shared: Folder that all nodes share, for checkpoints and tokens.
        uses_efa: Whether the variables of EFA are set.
    """

    name: str
    title: str
    nodes: int
    gpus_per_node: int
    arguments: Sequence[str]
    seconds: int
    shared: str
    uses_efa: bool

    @property
    def shared_root(self) -> str:
        """First folder of the path of `shared`, where the file system is mounted."""
        return str(PurePosixPath(*PurePosixPath(self.shared).parts[:2]))


class _Quoted(str):
    """Text that a filter has quoted for the language in which it stands."""


def _filter(quote: Callable[[str], str]) -> Callable[[object], _Quoted]:
    """Return a filter of the templates that refuses what a line of some language cannot hold."""

    def quoted(value: object) -> _Quoted:
        text = str(value)
        if not text.isprintable() or "\\" in text or '"""' in text:
            raise RecipeError(
                f"{shown(text)} cannot be written into the file. Use text without line breaks, backslashes and triple "
                "quotes."
            )
        return _Quoted(quote(text))

    return quoted


def _pragma(text: str) -> str:
    """Return a value of a line that SLURM splits into options: a word."""
    if not re.fullmatch(r"[\w.,:@%+-]+", text):
        raise RecipeError(f"{shown(text)} cannot be written into a line of #SBATCH. Use one word without quotes.")
    return text


_FILTERS = {"sh": shlex.quote, "yaml": json.dumps, "py": repr, "comment": str, "pragma": _pragma}


def _only_quoted(value: object) -> object:
    if isinstance(value, str) and not isinstance(value, _Quoted):
        raise TypeError(f"A template writes {value!r} without a filter. Use one of {', '.join(_FILTERS)}.")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file to standard output, or to `--out`; return the exit code.

    Args:
        arguments: KIND, RECIPE, options, and options of the recipe; default: those of the process.
    """
    options, overrides = parser().parse_known_args(arguments)
    try:
        text = render(options, overrides)
        if options.out is None:
            print(text, end="")
        else:
            options.out.write_text(text)
    except (MiCSError, OSError) as error:
        print(command_error("launch", error), file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command's options; those of the recipe are left over."""
    parser = argparse.ArgumentParser(
        prog="mics launch",
        description="Prints the file that starts a recipe on a cluster. Options with a dot are the recipe's.",
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=KINDS, help="kind of cluster")
    parser.add_argument("recipe", help="name or file of a recipe")
    parser.add_argument("--ci", action="store_true", help="the recipe's small version")
    parser.add_argument("--nodes", type=int, help="nodes; default: the recipe's")
    parser.add_argument("--gpus-per-node", type=int, help="ranks of a node; default: the recipe's")
    parser.add_argument("--shared", help="absolute path of a folder that all nodes share, for checkpoints and tokens")
    parser.add_argument("--venv", help="virtual environment with this package, at the same path on all nodes")
    parser.add_argument("--container", help="image with this package and its extra `recipes`")
    parser.add_argument("--time", help="time limit, HH:MM:SS or D-HH:MM:SS; default: 24:00:00")
    parser.add_argument("--partition", help="SLURM's partition")
    parser.add_argument("--instance-type", help="AWS instance; default: p5.48xlarge")
    parser.add_argument("--accelerator", help="SkyPilot's name of the GPU; default: H100")
    parser.add_argument("--efa", type=int, help="EFA devices of a Kubernetes node (p4d: 4, p5: 32); default: 0")
    parser.add_argument("--port", type=int, help="port of the rendezvous; default: 29500")
    parser.add_argument("--max-restarts", type=int, default=3, help="restarts of the ranks by torchrun; default: 3")
    parser.add_argument("--grace-s", type=int, default=300, help="seconds for a last checkpoint; default: 300")
    parser.add_argument("--module", default="mics_strategy.recipes.pretrain", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="file; default: standard output")
    return parser


def render(options: argparse.Namespace, overrides: Sequence[str]) -> str:
    """Return the text of the file.

    Args:
        options: Parsed options of the command.
        overrides: Options of the recipe.

    Raises:
        MiCSError: The cluster or the recipe cannot do what the options ask for.
    """
    kind = KINDS[options.kind]
    _check_options(options, kind, overrides)
    for name, value in {"time": "24:00:00", "instance_type": "p5.48xlarge", "accelerator": "H100"}.items():
        setattr(options, name, getattr(options, name) or value)
    options.port, options.efa = options.port or 29500, options.efa or 0
    job = _job(options, kind, overrides)
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, finalize=_only_quoted, autoescape=False
    )
    environment.filters.update({name: _filter(quote) for name, quote in _FILTERS.items()})
    return environment.get_template(kind.template).render(job=job, options=options, kind=kind) + "\n"


def _check_options(options: argparse.Namespace, kind: Kind, overrides: Sequence[str]) -> None:
    every = set().union(*(each.reads for each in KINDS.values()))
    for name in sorted(every - kind.reads):
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            readers = ", ".join(other for other, each in KINDS.items() if name in each.reads)
            raise RecipeError(f"`--{flag}` has no effect on `{options.kind}`. It is read by {readers}. Remove it.")
    if kind.container == "always" and not options.container:
        raise RecipeError(
            f"`{options.kind}` starts containers, but no image was given. Add `--container=IMAGE`, with this package "
            "and its extra `recipes` installed in it."
        )
    if options.container and options.venv:
        raise RecipeError("`--container` and `--venv` were given. Ranks run in one of them: remove the other.")
    for text in overrides:
        name = text.partition("=")[0]
        if not re.fullmatch(r"--[a-z_]+(\.[a-z_]+)+", name) or "=" not in text:
            raise RecipeError(
                f"`{text}` is no option. Use `--help`, or `--block.field=value` for a field of the recipe."
            )
        if name in ("--trainer.num_nodes", "--trainer.devices"):
            raise RecipeError(f"`{text}` was given. Use `--nodes` and `--gpus-per-node`, which the file needs as well.")
    for name in ("nodes", "gpus_per_node", "grace_s", "port"):
        value = getattr(options, name)
        require(value is None or value >= 1, name.replace("_", "-"), value, "at least 1")
    require(options.max_restarts >= 0, "max-restarts", options.max_restarts, "at least 0")
    require(options.efa is None or options.efa >= 0, "efa", options.efa, "at least 0")
    shared = options.shared or kind.shared
    is_path = PurePosixPath(shared).is_absolute() and not {*shared} & {*":,"}  # both separate mounts
    require(is_path, "shared", shared, "an absolute path without colons and commas")
    expanded = [word for word in (shared, *overrides) if "$" in word] if options.kind == "trainjob" else []
    if expanded:
        raise RecipeError(f"{shown(expanded[0])} has a `$`, which Kubernetes expands in commands. Remove it.")


def _job(options: argparse.Namespace, kind: Kind, overrides: Sequence[str]) -> Job:
    file = find_recipe(options.recipe)
    if Path(options.recipe).is_file() and not kind.has_files:
        raise RecipeError(
            f"`{options.recipe}` is a file of this machine, which nodes of `{options.kind}` do not see. Use the name "
            "of a recipe of the project, with options of the form `--block.field=value`."
        )
    given = [f"--config={file}", *(["--ci"] if options.ci else []), *overrides]
    recipe = load_recipe(given, has_cuda=True)
    nodes, ranks = _size(options, recipe)
    plan = BatchPlan(  # refuses what the ranks cannot share
        global_size=recipe.batch.global_size,
        micro_size=recipe.batch.micro_size,
        world_size=nodes * ranks,
        sequence_length=1 if recipe.model.reads_images else recipe.data.sequence_length,
    )
    if recipe.trainer.checkpoint_every_steps == "never":
        note = "it writes no checkpoints, so a restarted job begins again; set --trainer.checkpoint_every_steps"
        print(f"mics launch: note on {recipe.name}: {note}", file=sys.stderr)
    shared = kind.shared if options.shared is None or options.kind == "sagemaker" else options.shared.rstrip("/")
    placed = {
        "trainer.num_nodes": nodes,
        "trainer.devices": ranks,
        "trainer.resume": "auto",
        "trainer.output_dir": f"{shared}/runs/{recipe.name}",
        "data.cache_dir": f"{shared}/tokens",
    }
    name = options.recipe if not Path(options.recipe).is_file() else str(file.resolve())
    defaults = [f"--{field}={value}" for field, value in placed.items()]
    words = [name, *(["--ci"] if options.ci else []), *defaults, *overrides]
    return Job(
        name=_job_name(recipe.name),
        title=f"{recipe.name} on {nodes} x {ranks} ranks: {plan}",
        nodes=nodes,
        gpus_per_node=ranks,
        arguments=words,
        seconds=_seconds(options.time),
        shared=shared,
        uses_efa=kind.has_efa or options.efa > 0,
    )


def _job_name(name: str) -> str:
    """Return a name for SLURM, Kubernetes and AWS."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (words if words[0].isalpha() else f"mics-{words}")[:40].strip("-")


def _size(options: argparse.Namespace, recipe: Recipe) -> tuple[int, int]:
    """Return nodes, and ranks of a node."""
    devices = recipe.trainer.devices
    ranks = recipe.cluster.ranks_per_node if devices == "auto" else devices
    return options.nodes or recipe.trainer.num_nodes, options.gpus_per_node or ranks


def _seconds(time: str) -> int:
    """Return a time limit in seconds."""
    match = _TIME.fullmatch(time)
    require(match is not None, "time", time, "HH:MM:SS or D-HH:MM:SS")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


if __name__ == "__main__":
    sys.exit(main())
