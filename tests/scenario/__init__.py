"""One training, killed and resumed on other ranks, through every way in which users reach the engine."""
