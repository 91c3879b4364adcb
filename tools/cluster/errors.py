"""Errors that the local cluster shows to people: one class, since each is read and none is caught."""


class ClusterError(Exception):
    """Says what was tried, what was found and what to do."""
