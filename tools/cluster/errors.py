"""The error that the local cluster shows to people: one class, since none is caught for itself."""


class ClusterError(Exception):
    """Says what was tried, what was found and what to do."""
