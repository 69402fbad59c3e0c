"""Does it change a bit when streams are late? One GPU, which is rank 0 of 8 pretended ones.

``python -m tests.gpu.late_streams CASE`` trains one model in several variants, each of which delays something, and
prints the digests of the parameters as JSON. All must be equal but that of `control`, in which compute waits for no
chain. Host waits of one step, and the threads in which hooks ran, are printed beside.
"""

import hashlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_model import Block, Shape
from benchmarks.gpu_pretended import pretended_ranks
from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.engine.streams import Op, OpChain, OpStream, Streams

CYCLES = 10_000_000  # about 6 ms
SHAPE = Shape(width=256, layers=6, heads=4, feed_forward=512, vocabulary=1024, sequence=128, micro_batch=4)
TINY = Shape(width=32, layers=3, heads=2, feed_forward=64, vocabulary=64, sequence=8, micro_batch=2)
STEPS, MICRO_STEPS = 5, 2  # the last step is the one whose host waits count
BFLOAT16 = {"param_dtype": "bfloat16"}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {  # preset, ranks per node, options
    "mics": ("mics", 8, BFLOAT16),
    "two-ahead": ("mics", 8, {**BFLOAT16, "prefetch": 2}),
    "coalesced": ("mics", 8, {**BFLOAT16, "reduce_dtype": "bfloat16", "coalesce": True}),
    "int8": ("mics", 4, {**BFLOAT16, "grad_codec": "int8"}),
    "zeropp-hpz": ("zeropp-hpz", 4, BFLOAT16),
    "paro-iig": ("paro-iig", 4, BFLOAT16),
    "zero1": ("zero1", 4, BFLOAT16),
}
VARIANTS = ("as it is", "late gathers", "late sums", "late compute", "late everything", "control")


def sleep() -> None:
    """Keep the current stream busy, where there is one."""
    if torch.cuda.is_available():
        torch.cuda._sleep(CYCLES)


@contextmanager
def late(variant: str) -> Iterator[None]:
    """Delay chains of one kind; in `control`, all of them, and nobody waits for any."""
    launch, init = OpStream.launch, Streams.__init__
    kinds: dict[OpStream, str] = {}

    def initialized(streams: Streams, *arguments: Any) -> None:
        init(streams, *arguments)
        kinds.update({streams.all_gather: "gathers", streams.reduce_scatter: "sums", streams.second_hop: "sums"})

    def launched(stream: OpStream, ops: Iterable[Op], *args: Any, **options: Any) -> OpChain:
        is_late = variant in ("late everything", "control", f"late {kinds[stream]}")
        return launch(stream, [sleep, *ops, sleep] if is_late else ops, *args, **options)

    def forget(chain: OpChain) -> None:
        chain.is_done = True
        chain._keepalive.clear()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Streams, "__init__", initialized))
        stack.enter_context(mock.patch.object(OpStream, "launch", launched))
        if variant == "control":
            stack.enter_context(mock.patch.object(OpChain, "wait", forget))
        yield


def train(case: str, variant: str, device: torch.device) -> dict[str, Any]:
    """The digest of the parameters after some steps; host waits and threads of the last one."""
    preset, per_node, options = CASES[case]
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=per_node), partition_size="node", **options)
    shape, threads = SHAPE if device.type == "cuda" else TINY, set()
    torch.manual_seed(0)
    with pretended_ranks(8), late(variant), sdpa_kernel(SDPBackend.MATH):
        model = shape.model("meta")
        sharded = shard(model, config, units=[Block], device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for block in (module for module in model.modules() if isinstance(module, Block)):
            _watch(block, threads, is_late=variant in ("late compute", "late everything"))
        batches = [[shape.batch(MICRO_STEPS * s + m, device) for m in range(MICRO_STEPS)] for s in range(STEPS)]
        for step, of_step in enumerate(batches):
            with _host_waits(is_on=step == STEPS - 1) as waits:
                for micro, batch in enumerate(of_step):
                    with sharded.micro_step(micro, of=MICRO_STEPS):
                        (model(batch.inputs, batch.targets) / MICRO_STEPS).backward()
                norm = sharded.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        if variant != "control" and not norm:
            raise RuntimeError(
                "The gradients are zeros: the pretended ranks sum nothing, so no late sum would be seen."
            )
        numbers = torch.cat(
            [parameter.local.detach().flatten().float().cpu() for parameter in sharded.internals.parameters]
        )
    digest = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]
    return {"digest": digest, "finite": bool(numbers.isfinite().all()), "waits": waits, "threads": sorted(threads)}


def _watch(block: torch.nn.Module, threads: set[str], *, is_late: bool) -> None:
    def on_gradient(_: torch.Tensor) -> None:
        threads.add(threading.current_thread().name)
        if is_late:
            sleep()

    def after(_: torch.nn.Module, __: Any, out: torch.Tensor) -> None:
        out.register_hook(on_gradient)

    block.register_forward_hook(after)
    if is_late:
        block.register_forward_pre_hook(lambda *_: sleep())


@contextmanager
def _host_waits(*, is_on: bool) -> Iterator[list[str]]:
    """Places at which the host waits for the GPU."""
    found: list[str] = []
    if not (is_on and torch.cuda.is_available()):
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{each.filename}:{each.lineno}" for each in caught if "called a synchronizing" in str(each.message)]


def main(case: str, device: str = "cuda", *variants: str) -> None:
    """Print what each variant gives."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    print(json.dumps({variant: train(case, variant, torch.device(device)) for variant in variants or VARIANTS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
