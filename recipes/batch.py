"""Numbers of samples that each rank reads between two optimizer steps.

The global batch is what the learning rate was chosen for, so it is what a recipe states; accumulation
follows:

    accumulation = global_size / (micro_size * ranks)
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .errors import RecipeError

if TYPE_CHECKING:
    from .config import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The arithmetic of one optimizer step.

    Args:
        global_size: sequences in one optimizer step, over all ranks.
        micro_size: sequences that a rank holds in one forward and backward.
        world_size: ranks, each of which reads different sequences.
        sequence_length: tokens in a sequence; 1 for images.

    Raises:
        RecipeError: the global batch is not a whole number of rounds of micro-batches.
    """

    global_size: int
    micro_size: int
    world_size: int
    sequence_length: int

    def __post_init__(self) -> None:
        """Refuse a global batch that the ranks cannot share evenly."""
        if self.global_size % self.round_size:
            below = max(1, self.global_size // self.round_size) * self.round_size
            raise RecipeError(
                f"`batch.global_size={self.global_size}` cannot be shared evenly: {self.world_size} ranks "
                f"times `batch.micro_size={self.micro_size}` read {self.round_size} sequences at a time. "
                f"Use `--batch.global_size={below}` or another multiple of {self.round_size}, "
                "or smaller micro-batches."
            )

    @property
    def round_size(self) -> int:
        """Sequences that all ranks together read in one micro-step."""
        return self.micro_size * self.world_size

    @property
    def accumulation(self) -> int:
        """Micro-steps in one optimizer step."""
        return self.global_size // self.round_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, over all ranks."""
        return self.global_size * self.sequence_length

    @property
    def unit(self) -> Literal["tok", "images"]:
        """Name of what rates count; a sequence of text has two tokens or more."""
        return "tok" if self.sequence_length > 1 else "images"

    def __str__(self) -> str:
        """Show the arithmetic beside its result."""
        shared = f"{self.micro_size} micro batch x {self.accumulation} accumulation x {self.world_size} ranks"
        if self.unit == "images":
            return f"{shared} = {self.global_size:,} images per optimizer step"
        return (
            f"{shared} = {self.global_size} sequences x {self.sequence_length} tokens "
            f"= {self.tokens_per_step:,} tokens per optimizer step"
        )


def batch_plan(recipe: "Recipe", world_size: int) -> BatchPlan:
    """Return the batch of a recipe on so many ranks.

    Raises:
        RecipeError: The ranks cannot share the batch.
    """
    return BatchPlan(
        global_size=recipe.global_batch,
        micro_size=recipe.batch.micro_size,
        world_size=world_size,
        sequence_length=1 if recipe.model.reads_images else recipe.data.sequence_length,
    )
