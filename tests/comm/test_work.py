"""What does the work of a collective say when it fails?"""

import pytest
import torch

from mics_strategy.comm.work import Work
from mics_strategy.errors import CommunicationError


class Failing:
    """A transport's work whose wait ends with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), torch.AcceleratorError("device-side assert triggered")]
)
def test_an_error_of_the_device_is_not_blamed_on_ranks(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        Work("All-gather", [Failing(error)]).wait()
    assert caught.value is error


def test_another_failure_of_the_transport_is() -> None:
    with pytest.raises(CommunicationError, match=r"All-gather failed: connection closed\. A rank died"):
        Work("All-gather", [Failing(RuntimeError("connection closed"))]).wait()
