"""Errors in a recipe that its user can repair."""

from mics_strategy.errors import MiCSError


class RecipeError(MiCSError, ValueError):
    """A recipe asks for what cannot be done; the message says what was asked, found, and what to do."""


def require(is_met: bool, name: str, value: object, rule: str) -> None:
    """Refuse a value of a recipe.

    Args:
        is_met: Whether the value can be used.
        name: Dotted name of the field.
        value: Value that was given.
        rule: Condition on the value, after "it must be".

    Raises:
        RecipeError: `is_met` is false.
    """
    if not is_met:
        text = value if str(value).isprintable() else repr(value)
        raise RecipeError(f"`{name}={text}` cannot be used: it must be {rule}. Change it in the YAML or with --{name}.")
