"""How every random test runs: no clock decides over an example, and no luck over a landing."""

from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does.
settings.register_profile("exploring", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in every run, until the test changes; `make test-long` looks for new ones.
settings.register_profile("repeatable", settings.get_profile("exploring"), derandomize=True)
settings.load_profile("repeatable")
