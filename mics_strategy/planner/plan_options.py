"""Options of `mics plan` and `mics simulate`: model, cluster, batch, dtypes.

Values are parsed here, so that every wrong one ends with one sentence: what was asked, what was found, what to do.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.errors import ConfigError, nearest
from mics_strategy.planner.calibration import calibration_warnings
from mics_strategy.planner.cluster import Cluster, is_cluster_file
from mics_strategy.planner.model import ModelDescription
from mics_strategy.planner.model_sources import ModelSource
from mics_strategy.planner.quantities import Quantity, parse_quantity
from mics_strategy.planner.recompute import parse_recompute
from mics_strategy.planner.workload import DTYPES, Workload

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_ROUNDED_BY = 0.1  # share by which a rounded number of tokens may change
_EXAMPLES = {"--seq-len": "2048", "--global-batch-tokens": "4M, which is 4,194,304 where the ranks divide that"}
_MODEL_HELP = "name in the catalog, of a recipe or of transformers, config.json or its folder, module:factory"


def add_workload_options(parser: ArgumentParser) -> None:
    """Add the options of the model, the cluster and the batch."""
    parser.add_argument("--model", required=True, help=_MODEL_HELP)
    parser.add_argument("--cluster", required=True, help="name in the catalog, or a TOML, JSON or YAML file")
    parser.add_argument("--nodes", default=None, help="number of nodes; default: that of the cluster's file")
    parser.add_argument("--seq-len", default=None, help="tokens of a sample; default: a recipe's; not for images")
    parser.add_argument("--global-batch", default=None, help="samples of one optimizer step on all ranks")
    parser.add_argument(
        "--global-batch-tokens",
        default=None,
        help="the same in tokens; 512k is 524,288 where the ranks divide it, or else rounded to what they divide",
    )
    parser.add_argument("--micro-batch", default="auto", help="samples of one forward on a rank; default: auto")
    parser.add_argument("--recompute", default="auto", help="recompute layers: yes, no, auto, attention, 1/2")
    parser.add_argument("--param-dtype", default="bfloat16", help="dtype of gathered parameters; default: bfloat16")
    parser.add_argument("--reduce-dtype", default="float32", help="dtype of gradients on the wire; default: float32")
    parser.add_argument("--master-dtype", default="float32", help="dtype that the optimizer updates; default: float32")
    parser.add_argument(
        "--state-bytes", default="8", help="bytes of optimizer state per element; default: 8, Adam in fp32"
    )
    parser.add_argument(
        "--best-kernels",
        action="store_true",
        help="time compute by the device's best kernels; default: as fast as published trainings on it",
    )
    parser.add_argument(
        "--communicator-memory",
        default=None,
        help="memory of one communicator of NCCL; default: that of the cluster's file, or 600 MB, which is assumed",
    )
    parser.add_argument("--json", action="store_true", help="print an object of JSON instead of text")


def cluster_of(options: Namespace) -> Cluster:
    """The cluster of the options.

    Reasons to trust a calibration less go to stderr.

    Raises:
        ConfigError: It does not exist, is stated wrongly, or its number of nodes is missing.
    """
    cluster = _named_cluster(options)
    if options.communicator_memory is not None:
        num_bytes = round(parse_quantity(options.communicator_memory, Quantity.BYTES, "`--communicator-memory`"))
        device = dataclasses.replace(cluster.device, communicator_bytes=num_bytes)
        cluster = dataclasses.replace(cluster, device=device)
    return cluster.with_best_kernels() if options.best_kernels else cluster


def _named_cluster(options: Namespace) -> Cluster:
    nodes = None if options.nodes is None else count("--nodes", options.nodes)
    if is_cluster_file(options.cluster):
        cluster = Cluster.load(options.cluster)
        cluster = cluster if nodes is None else cluster.with_nodes(nodes)
        for warning in calibration_warnings(cluster, datetime.date.today(), torch.__version__):
            print(f"mics: {warning}", file=sys.stderr)
        return cluster
    if nodes is None:
        Cluster.preset(options.cluster)  # an unknown name is the first thing to say
        raise ConfigError(
            f"`--nodes` is missing: `--cluster {options.cluster}` is a product, of which any number of nodes can be "
            "used. Add for example `--nodes 16`."
        )
    return Cluster.preset(options.cluster, nodes=nodes)


def workload_of(options: Namespace, world_size: int) -> Workload:
    """The training of the options.

    Args:
        options: Parsed options.
        world_size: Ranks of the cluster, to which a rounded batch is rounded.

    Raises:
        ConfigError: An option is missing, wrong, or contradicts another.
    """
    for name in ("param_dtype", "reduce_dtype", "master_dtype"):
        choice(f"--{name.replace('_', '-')}", getattr(options, name), DTYPES)
    if (options.global_batch is None) == (options.global_batch_tokens is None):
        found = "neither was given" if options.global_batch is None else "both were given"
        raise ConfigError(
            f"`--global-batch` and `--global-batch-tokens` are the same number in samples and in tokens, and {found}. "
            "Give one of them."
        )
    seq_len = 0 if options.seq_len is None else count("--seq-len", options.seq_len)
    model = ModelSource(text=options.model, seq_len=seq_len, dtype=DTYPES[options.param_dtype]).describe()
    if not model.trained_share:
        raise ConfigError(f"No parameter of `--model {options.model}` requires a gradient. Leave some to be trained.")
    if options.global_batch is not None:
        global_batch = count("--global-batch", options.global_batch)
    else:
        global_batch = _samples(options.global_batch_tokens, model, world_size)
    return Workload(
        model=model,
        global_batch=global_batch,
        micro_batch="auto" if options.micro_batch == "auto" else count("--micro-batch", options.micro_batch),
        recompute=parse_recompute(options.recompute),
        master_dtype=options.master_dtype,
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
        optimizer_state_bytes=count("--state-bytes", options.state_bytes, least=0),
    )


def _samples(text: str, model: ModelDescription, world_size: int) -> int:
    """Samples of a step from its tokens.

    A prefix is binary where the ranks can then share the tokens exactly, so that 512k is 524,288. Another number with a
    prefix counts as rounded: the nearest multiple of the ranks is taken.
    """
    tokens, per_sample = count("--global-batch-tokens", text), model.tokens_per_sample
    if per_sample == 1:
        raise ConfigError(
            f"`--global-batch-tokens {text}`: the samples of {model.name} are no sequences of tokens. Use "
            "`--global-batch` with their number."
        )
    share = world_size * per_sample
    prefix = text[-1].lower() if text[-1].isalpha() else ""
    binary = round(tokens / _FACTORS[prefix] * _BINARY[prefix])
    if binary % share == 0:
        return binary // per_sample
    nearest_tokens = max(1, round(tokens / share)) * share
    if nearest_tokens == tokens or (not text.isdigit() and abs(nearest_tokens - tokens) <= _ROUNDED_BY * tokens):
        return nearest_tokens // per_sample
    lower = max(1, tokens // share) * share
    raise ConfigError(
        f"`--global-batch-tokens {text}` cannot be divided into equal samples of {per_sample} tokens for {world_size} "
        f"ranks. Use {lower} or {lower + share}, or fewer nodes."
    )


def count(option: str, text: str, *, least: int = 1) -> int:
    """A number of 1 or more, or of `least`, perhaps with a prefix: 1024, 4M.

    Raises:
        ConfigError: The text is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
    number = float(match[1]) * _FACTORS[match[2].lower()] if match else -1.0
    if number < least or number != int(number):
        example = _EXAMPLES.get(option, "16")
        raise ConfigError(f"`{option} {text}` is not a whole number of {least} or more. Use for example {example}.")
    return int(number)


def choice(option: str, text: str, known: Iterable[str]) -> str:
    """One of the known words.

    Raises:
        ConfigError: It is another word; the nearest ones are named.
    """
    words = [*known]
    if text not in words:
        raise ConfigError(f"`{option} {text}` is not known.{nearest(text, words)}")
    return text


def codec_pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Pairs of codecs of parameters and gradients, that of no codecs first.

    Raises:
        ConfigError: The word is not known.
    """
    choice("--codecs", text, ("lossless", *Codec.NAMES, "all"))
    names = {"lossless": (), "all": Codec.NAMES}.get(text, (text,))
    gradients = ("none", *names)
    parameters = ("none", *(name for name in ("int8",) if names))  # fewer bits of parameters change what is learned
    return tuple((weight, grad) for weight in parameters for grad in gradients)
