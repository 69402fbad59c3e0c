"""Prediction of the last backward before an optimizer step.

The loop may declare that backward.
In that backward the second hop of a unit starts right behind its first hop. A loop that declares nothing is predicted:
if its last two steps used n backwards each, of the same units on all ranks, the n-th backward since then counts as the
last one.

A wrong prediction changes no sum. If another backward follows, finished means become sums again, and its gradients get
a second hop of their own. If fewer follow, gradients are finished in the step, as without a prediction.

All ranks predict the same, also where nodes then run other numbers of backwards (see `second_hops`). Where gradients
are not sharded, ranks may skip backwards, and nothing is predicted.

Pure.
"""

from __future__ import annotations


class AccumulationBoundary:
    """Whether a backward is the last one before the optimizer step.

    Args:
        predicts: Whether to predict where nothing is declared.

    Attributes:
        declared: Declaration of the loop; None for none.
        is_last: Whether the present backward counts as the last one.
        number: Number of the present or last backward, from 1, since the last step or since gradients were cleared.
    """

    def __init__(self, *, predicts: bool) -> None:
        self.declared: bool | None = None
        self.is_last = False
        self._predicts = predicts
        self.number = 0
        self._lengths: tuple[int, int] = (0, 0)  # backwards of the last two steps; 0 where ranks differ

    def begin_backward(self, number: int) -> None:
        """A backward begins.

        Args:
            number: Number of this backward, from 1, since the last step or since gradients were cleared.
        """
        self.number = number
        self.is_last = self._is_predicted() if self.declared is None else self.declared

    def _is_predicted(self) -> bool:
        before, last = self._lengths
        return self._predicts and before == last == self.number

    def end_step(self, *, is_equal_on_all_ranks: bool) -> None:
        """An optimizer has used the gradients.

        Args:
            is_equal_on_all_ranks: Whether all ranks have run as many backwards, of the same units.
        """
        if self.number:
            self._lengths = (self._lengths[1], self.number if is_equal_on_all_ranks else 0)
        self.number = 0
        self.is_last = False
