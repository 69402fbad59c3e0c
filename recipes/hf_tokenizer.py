"""Tokenizer of a recipe's data in the files of transformers, with its special tokens by their roles."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from .config import Recipe
from .data.prepare import objective_of
from .data.tokenizer import special_tokens, vocabulary_size
from .errors import RecipeError

_PADDING = ("[PAD]", "<pad>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTokenizer:
    """A tokenizer of transformers and the ids that a model's configuration has.

    Attributes:
        fast: The tokenizer.
        first_id: Token before a text.
        end_id: Token after a text.
        padding_id: Token that fills up batches; in no text. -1 for causal models, which were trained without one.
    """

    fast: PreTrainedTokenizerFast
    first_id: int
    end_id: int
    padding_id: int

    def save(self, folder: Path) -> None:
        """Write the files of transformers."""
        self.fast.save_pretrained(folder)


def exported_tokenizer(tokenizer: Tokenizer, recipe: Recipe) -> ExportedTokenizer:
    """Return a tokenizer of transformers.

    A tokenizer of a masked model that adds no special tokens gets a rule that adds those of the training.

    Args:
        tokenizer: Tokenizer of the training data.
        recipe: The resolved recipe.

    Raises:
        RecipeError: A masked model has no token that can be its padding.
    """
    objective = objective_of(recipe.model.family)
    special, own = special_tokens(tokenizer, objective), Tokenizer.from_str(tokenizer.to_str())
    length = recipe.data.sequence_length
    end = tokenizer.id_to_token(special.end)
    if objective == "causal":
        fast = PreTrainedTokenizerFast(tokenizer_object=own, bos_token=end, eos_token=end, model_max_length=length)
        return ExportedTokenizer(fast=fast, first_id=special.end, end_id=special.end, padding_id=-1)
    padding_id = next((own.token_to_id(name) for name in _PADDING if own.token_to_id(name) is not None), None)
    if padding_id is None:
        raise RecipeError(
            f"The tokenizer has neither {' nor '.join(_PADDING)}, which a model of transformers needs for its padding. "
            f"Its {vocabulary_size(own)} tokens may all be text. Add one of them to its tokenizer.json."
        )
    first = tokenizer.id_to_token(special.first)
    if own.post_processor is None:
        ids = [(first, special.first), (end, special.end)]
        own.post_processor = TemplateProcessing(single=f"{first} $A {end}", special_tokens=ids)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=own,
        cls_token=first,
        sep_token=end,
        mask_token=tokenizer.id_to_token(special.mask),
        pad_token=tokenizer.id_to_token(padding_id),
        model_max_length=length,
    )
    return ExportedTokenizer(fast=fast, first_id=special.first, end_id=special.end, padding_id=padding_id)
