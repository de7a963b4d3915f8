"""Checks of one machine, each with what to do about it."""
