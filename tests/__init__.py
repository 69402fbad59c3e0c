"""Tests; a package, so that job functions are found by module name on every rank."""
