"""What can go wrong in a recipe that its user can repair?"""

from mics_strategy.errors import MiCSError


class RecipeError(MiCSError, ValueError):
    """A recipe asks for what cannot be done; the message says what was asked, found, and what to do."""
