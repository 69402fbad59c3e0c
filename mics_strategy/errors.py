"""What can go wrong, and how does a caller tell?

Every error says what was asked, what was found and what to do. Each class is also the builtin that a
caller would expect, so ``except ValueError`` keeps working.
"""


class MiCSError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MiCSError, ValueError):
    """An option, or a combination of options with this job, cannot be honoured."""


class ShapeError(MiCSError, ValueError):
    """A buffer does not have the size that a collective or a layout needs."""


class LifecycleError(MiCSError, RuntimeError):
    """Something was done to a unit, a parameter or a gradient in a state that does not allow it."""


class CheckpointError(MiCSError, RuntimeError):
    """A checkpoint cannot be written, read or applied."""


class CommunicationError(MiCSError, RuntimeError):
    """A collective failed: a peer died, left the schedule or did not answer in time."""
