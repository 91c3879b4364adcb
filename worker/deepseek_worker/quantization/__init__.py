"""Weights of 8 and 4 bits: how files store them, and how they are kept and multiplied."""
