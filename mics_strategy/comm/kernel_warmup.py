"""Compilation of the codecs' kernels before the first step.

Triton compiles a kernel at its first launch, once for each combination of dtypes, constants and alignments: 0.3 to 0.9
CPU s each. Around 20 of them would be compiled in the first step, some of them in the thread of the backward. So every
quantized collective that is announced runs once on small tensors, over transports that send nothing. It runs the code
of a step, so it launches what a step does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from mics_strategy.comm.codecs.quantizer import kernels_for
from mics_strategy.comm.residuals import residual_numel
from mics_strategy.comm.route import ALL_GATHER, REDUCE_SCATTER, Route
from mics_strategy.comm.stages import Stages
from mics_strategy.comm.transport import BackendTransport, Transport
from mics_strategy.comm.work import Launch
from mics_strategy.comm.workspace import Workspace

_PERIOD_BLOCKS = 16  # Triton asks of an integer whether it is 1, and whether 16 divides it


class KernelWarmup:
    """Launches the kernels of one communicator's collectives, each combination once.

    It does nothing on a CPU, without a codec, and for codecs without kernels.

    Args:
        route: Stages, with their codecs.
        transports: Transports of the stages, slowest links first.
        device: Device of the tensors.
    """

    def __init__(self, route: Route, transports: Sequence[Transport], device: torch.device) -> None:
        self._route = route
        self._transports = [_NullTransport(transport) for transport in transports]
        self._device = device
        self._announced: set[tuple[str, int, torch.dtype, torch.dtype]] = set()

    def announce(self, collective: str, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Note a collective whose kernels `launch` shall launch.

        Rows of n values and of as many up to a multiple of 16 blocks have the same kernels, so the tensors are small.
        Not covered are tables of more than 2**31 values or bytes, which have kernels of their own.

        Args:
            collective: ALL_GATHER, REDUCE_SCATTER or ALL_REDUCE.
            numel: Elements of each rank's shard, padding included.
            wire: Dtype of unquantized payloads.
            dtype: Dtype of the result.
        """
        codec = self._route.stages[0].codec
        if codec is not None:
            period = _PERIOD_BLOCKS * codec.block_size
            numel = numel if numel < 2 * period else period + numel % period
            self._announced.add((collective, numel, wire, dtype))

    def launch(self) -> None:
        """Launch the kernels of what was announced.

        Cost:
            Memory, until it returns: at most 32 blocks for each rank of the route, a few times.
        """
        codec = self._route.stages[0].codec
        if codec is not None and kernels_for(codec, self._device) is not None:
            for announced in self._announced:
                self._launch(*announced)
        self._announced.clear()

    def _launch(self, collective: str, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        route, device = self._route, self._device
        stages = Stages(route, self._transports, _FreshMemory(device), device)
        full = torch.zeros(route.size * numel, dtype=wire, device=device)
        shard = torch.zeros(numel, dtype=dtype, device=device)
        if collective == ALL_GATHER:
            runs = [stages.all_gather(full, shard, 0)]
        else:
            residual_size = residual_numel(route, collective, full.numel())
            residual = torch.zeros(residual_size, device=device) if route.has_feedback else None
            if collective == REDUCE_SCATTER:
                runs = [stages.reduce_scatter(shard, full, adds, residual, 0) for adds in (False, True)]
            else:
                runs = [stages.all_reduce(full.to(dtype), wire, residual, 0)]
        for run in runs:
            for _ in run:
                pass


class _FreshMemory(Workspace):
    """Scratch memory that nothing has reserved, and random generators that no step uses."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @override
    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)


class _NullTransport(BackendTransport):
    """The place of a rank in a group, without messages: what would be received is undefined."""

    def __init__(self, transport: Transport) -> None:
        self.size = transport.size
        self.index = transport.index
        self.sums_natively = transport.sums_natively
        self.fingerprint = transport.fingerprint

    @override
    def all_gather(self, table: torch.Tensor, shard: torch.Tensor, tag: int) -> Launch:
        return Launch(lambda: None)

    @override
    def exchange(self, received: torch.Tensor, sent: torch.Tensor, tag: int) -> Launch:
        return Launch(lambda: None)

    @override
    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> None: ...

    @override
    def all_reduce(self, tensor: torch.Tensor) -> None: ...
