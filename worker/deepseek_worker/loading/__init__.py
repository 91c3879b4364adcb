"""Downloading a model once, verified, from a hub or an address."""
