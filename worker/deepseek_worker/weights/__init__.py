"""Checkpoint formats and loading."""
