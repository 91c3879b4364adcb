"""Every error has a fixed word that others know."""

import inspect
from typing import get_args

import pytest

from deepseek_contract.state import FailureReason
from deepseek_worker import errors

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, errors.WorkerError)
]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_the_tree_in_the_docstring_names_it(error):
    assert error.__name__ in errors.__doc__


@pytest.mark.parametrize(
    "error",
    [e for e in CLASSES if issubclass(e, errors.ModelError | errors.DeviceUnavailable)],
    ids=lambda error: error.__name__,
)
def test_the_operator_knows_every_reason_that_ends_the_process(error):
    assert error.reason in get_args(FailureReason)
