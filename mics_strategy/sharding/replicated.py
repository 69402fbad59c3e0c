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
        self._versions = self._current_versions()

    def _current_versions(self) -> dict[str, int]:
        return {name: buffer._version for name, buffer in self._model.named_buffers()}

    def before_forward(self) -> None:
        """Take over rank 0's buffers when the model is about to be evaluated."""
        if not self._model.training:
            self.synchronize()

    def synchronize(self) -> None:
        """Take over rank 0's values of the buffers that have changed since the last time. Collective."""
        now = self._current_versions()
        changed = [name for name, version in now.items() if self._versions.get(name) != version]
        if not changed:
            return
        if self._mesh.control is not None:
            buffers = dict(self._model.named_buffers())
            with torch.no_grad():
                for name in changed:
                    self._mesh.control.broadcast(buffers[name], name)
        self._versions = self._current_versions()
