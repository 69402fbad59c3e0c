"""Which process is this, and how do the processes of a run talk?

Every rank carries different data and holds different shards, so ranks, samplers and metrics always mean the whole
world; partitions are the engine's business.
"""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from mics_strategy import ConfigError
from mics_strategy.lightning.framework import Framework

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as Base
else:
    Base = object

T = TypeVar("T")


class ProcessGroupMixin(Base):
    """The part of the strategy that starts processes and lets them communicate. Mixed into a Lightning strategy."""

    framework: ClassVar[Framework]
    _num_nodes: int
    _process_group_backend: str | None
    _start_method: str
    _timeout: timedelta

    # -- who is here ------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """True: Lightning inserts distributed samplers and synchronises metrics only for a strategy that says so."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise ConfigError(
                "The strategy has no devices yet. Pass it to a Trainer or to Fabric, or give it `parallel_devices`."
            )
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Nodes in the job; the Trainer sets it."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on each node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the loggers which rank this is."""
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
        """The launcher of processes that are started from this one."""
        return self.framework.multiprocessing_launcher

    def _check_accelerator(self) -> None:
        if not isinstance(self.accelerator, self.framework.cpu_or_cuda):
            raise ConfigError(
                f"`accelerator={type(self.accelerator).__name__}` is not supported: shards live on CUDA devices or on "
                "the CPU. Use `accelerator='cuda'` or `accelerator='cpu'`."
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.framework.reset_seed()
        self.set_world_ranks()
        device = self.root_device
        self._process_group_backend = self._process_group_backend or self.framework.default_backend(device)
        if not is_initialized():
            atexit.register(_leave_gloo)
        self.framework.init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
        )

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group; None until it is chosen by the device."""
        return self._process_group_backend

    # -- talking ----------------------------------------------------------------------------------------------

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
        """Combine a tensor over all ranks; anything else is returned as it is."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return self.framework.reduce_if_distributed(tensor, group, reduce_op=reduce_op)


def _leave_gloo() -> None:
    """End the default group's threads while the interpreter lives, as `mesh` does with its own."""
    if is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def skip_group_teardown() -> None:
    """The run has failed: the default group may wait for a rank that is gone, and ending it would wait, too."""
    atexit.unregister(_leave_gloo)


def is_initialized() -> bool:
    """Whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()
