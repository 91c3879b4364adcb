"""How every random test runs: no clock decides over an example."""

from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
