"""The compile lane sees what it claims to see."""

import pytest


def test_the_launch_is_compiled_as_it_would_run(compile_sm90, spec):
    aligned = compile_sm90("norm.kernel:rms_norm", spec((64, 4096)), spec((4096,)), None, 1e-6)
    odd = compile_sm90(
        "norm.kernel:rms_norm", spec((64, 4096), strides=(4099, 1)), spec((4096,)), None, 1e-6
    )

    assert aligned[0].kernel == "norm_kernel"
    assert aligned[0].wide_loads > odd[0].wide_loads


def test_a_kernel_that_does_not_compile_is_reported(compile_sm90, spec):
    with pytest.raises(AssertionError, match="no_such_launcher"):
        compile_sm90("norm.kernel:no_such_launcher", spec((4, 4)))


def test_every_launch_is_reported(compile_sm90, spec):
    nothing = compile_sm90("norm.kernel:rms_norm", spec((0, 64)), spec((64,)), None, 1e-6)

    assert nothing == []
