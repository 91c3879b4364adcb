"""What ended something, in words that another process understands."""

from deepseek_worker.errors import ModelTooLarge
from deepseek_worker.progress import Failure


def test_an_error_of_our_own_keeps_its_word_and_code():
    assert Failure.of(ModelTooLarge("too large")) == Failure("ModelTooLarge", "too large", 3)


def test_any_other_error_is_internal_and_named():
    assert Failure.of(KeyError("x")) == Failure("InternalError", "KeyError: 'x'", 1)
