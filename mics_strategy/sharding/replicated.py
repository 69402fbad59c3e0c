"""What about buffers?

They are small and stay whole on every rank. Training changes some of them from each rank's own data (running
statistics of BatchNorm); as in plain data parallel training rank 0's are the ones that count: the others take
them over before the model is evaluated or saved, when they have changed, instead of before every forward.
"""

from __future__ import annotations

import torch
from torch import nn

from mics_strategy.mesh import Mesh


class ReplicatedBuffers:
    """The buffers of one model.

    Args:
        model: Its buffers are moved to `device`.
        mesh: For rank 0's values.
        device: Where the model trains.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device) -> None:
        self._model = model
        self._mesh = mesh
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)
        self._may_differ = True  # before the first synchronisation, and after every training forward

    def before_forward(self) -> None:
        """Take over rank 0's buffers when the model is about to be evaluated."""
        if self._model.training:
            self._may_differ = True
        else:
            self.synchronize()

    def synchronize(self) -> None:
        """Take over rank 0's buffers if the model has been trained since the last time. Collective.

        All of them: the kernels that update running statistics do not count as writes, so nothing tells which changed.
        """
        if self._may_differ and self._mesh.control is not None:
            with torch.no_grad():
                for name, buffer in self._model.named_buffers():
                    self._mesh.control.broadcast(buffer, name)
        self._may_differ = False
