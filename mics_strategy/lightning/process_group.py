"""Processes of a Lightning job: ranks, launchers and communication.

Every rank has its own data and its own shards, so ranks, samplers and metrics always refer to the whole world;
partitions are internal to the engine.

A launcher returns trained weights from spawned or forked processes. Lightning collects the module's state dict on every
rank and returns rank 0's to the parent. For a sharded module that would be one shard, so full tensors are collected
instead.
"""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from mics_strategy import ConfigError
from mics_strategy.lightning.framework import TrainerFramework, load_framework

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as Base
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as LauncherBase

    from mics_strategy.lightning.framework import Framework
else:
    Base = LauncherBase = object

T = TypeVar("T")


class ProcessGroupMixin(Base):
    """Start and communication of processes. Mixed into a Lightning strategy."""

    framework: ClassVar[Framework]
    _num_nodes: int
    _process_group_backend: str | None
    _start_method: str
    _timeout: timedelta

    # -- ranks ---------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """True; otherwise Lightning adds no distributed sampler and syncs no metrics."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise ConfigError(
                "The strategy has no devices yet. Pass it to a Trainer or to Fabric, or pass `parallel_devices` to it."
            )
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the job, set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of ranks per node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Set the rank in the cluster environment and in the loggers."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for function in self.framework.rank_zero_only:
            function.rank = self.global_rank

    # -- starting ---------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        self._check_accelerator()
        if self._start_method == "popen":
            launcher = self.framework.subprocess_launcher
            self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = self._multiprocessing_launcher()(self, start_method=self._start_method)

    def _multiprocessing_launcher(self) -> type[Any]:
        """Return the class of the launcher that starts processes from this one."""
        return self.framework.multiprocessing_launcher

    def _check_accelerator(self) -> None:
        if not isinstance(self.accelerator, self.framework.cpu_or_cuda):
            raise ConfigError(
                f"`accelerator={type(self.accelerator).__name__}` is not supported: shards are stored on CUDA devices "
                "or on the CPU. Use `accelerator='cuda'` or `accelerator='cpu'`."
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.framework.reset_seed()
        self.set_world_ranks()
        device = self.root_device
        self._process_group_backend = self._process_group_backend or self.framework.default_backend(device)
        if not is_initialized():
            atexit.register(_destroy_gloo_group, os.getpid())
        self.framework.init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
        )

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group; None until it is chosen by device."""
        return self._process_group_backend

    # -- communication ----------------------------------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        if not is_initialized():
            return
        dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks; any other value is returned unchanged."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return self.framework.reduce_if_distributed(tensor, group, reduce_op=reduce_op)


def _destroy_gloo_group(process_id: int) -> None:
    """End the threads of a gloo default group before the interpreter exits.

    Args:
        process_id: Process that has the threads. A forked child has none of them.
    """
    if process_id == os.getpid() and is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def skip_group_teardown() -> None:
    """Do not destroy the default group at exit, which may block after a failed run.

    The group may be waiting for a rank that is gone.
    """
    atexit.unregister(_destroy_gloo_group)


def is_initialized() -> bool:
    """Whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


class FullWeightsMixin(LauncherBase):
    """Collection of results in the child processes. Mixed into Lightning's launcher."""

    @override
    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        state_dict = trainer.strategy.lightning_module_state_dict()  # collective
        if trainer.strategy.local_rank != 0:
            return None
        callback = trainer.checkpoint_callback
        weights_path = None
        if trainer.state.fn == trainer.strategy.framework.fitting:
            weights_path = os.path.join(tempfile.mkdtemp(), "weights.ckpt")
            trainer.strategy.checkpoint_io.save_checkpoint(state_dict, weights_path)
        return trainer.strategy.framework.worker_output(
            getattr(callback, "best_model_path", None),
            weights_path,
            trainer.state,
            results,
            self.get_extra_results(trainer),
        )


_CLASS_NAMES = {
    "WholeWeightsLauncher": "lightning.pytorch",
    "PytorchLightningWholeWeightsLauncher": "pytorch_lightning",
}


@functools.cache
def full_weights_launcher(framework: TrainerFramework) -> type[Any]:
    """Return the launcher class of one namespace."""
    name = next(name for name, owner in _CLASS_NAMES.items() if owner == framework.name)
    return type(name, (FullWeightsMixin, framework.multiprocessing_launcher), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name in _CLASS_NAMES:  # a spawned process looks the class up here
        return full_weights_launcher(load_framework(_CLASS_NAMES[name]))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
