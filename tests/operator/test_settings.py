"""Settings from the environment."""

import pytest

from deepseek_operator.errors import SettingsError
from deepseek_operator.settings import PREFIX, Settings, settings_from, variable_name


def test_without_variables_the_defaults_hold() -> None:
    assert settings_from({"PATH": "/bin"}) == Settings()


def test_values_are_parsed() -> None:
    settings = settings_from(
        {
            f"{PREFIX}HTTP_PORT": "9090",
            f"{PREFIX}RESYNC_SECONDS": "1.5",
            f"{PREFIX}WATCH_NAMESPACES": "red, blue",
            f"{PREFIX}PROMETHEUS_NAMESPACES": "",
            f"{PREFIX}VOLUME_GROUP": "",
        }
    )

    assert settings.http_port == 9090
    assert settings.resync_seconds == 1.5
    assert settings.watch_namespaces == ("red", "blue")
    assert settings.prometheus_namespaces == ()
    assert settings.volume_group is None
    assert not settings.is_cluster_wide


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("HTTP_PORT", "http", "HTTP_PORT='http'"),
        ("HTTP_PORT", "0", "greater than or equal to 1"),
        ("LOG_LEVEL", "loud", "'debug', 'info', 'warning' or 'error'"),
        ("HTTP_PRT", "80", f"Unknown settings {PREFIX}HTTP_PRT"),
        ("NAMESPACE", "Upper", "NAMESPACE='Upper'"),
        ("LEASE_DURATION_SECONDS", "1", "greater than or equal to 3"),
        ("WATCH_NAMESPACES", "ok,Not_Ok", "WATCH_NAMESPACES"),
        ("WORKER_STATE_URL", "http://{ip}:{prt}/state", "WORKER_STATE_URL"),
        ("WORKER_STATE_URL", "{ip}", "WORKER_STATE_URL"),
        ("PROBE_SECONDS", "0", "greater than 0"),
    ],
)
def test_what_is_wrong_is_named(variable: str, text: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_from({PREFIX + variable: text})

    assert words in str(caught.value)


def test_variables_that_kubernetes_makes_for_a_service_are_no_settings() -> None:
    injected = {
        "DEEPSEEK_OPERATOR_SERVICE_HOST": "10.0.0.1",
        "DEEPSEEK_OPERATOR_PORT": "tcp://10.0.0.1:8080",
    }

    assert settings_from(injected) == Settings()


def test_each_process_has_its_own_identity_unless_told() -> None:
    assert Settings().holder
    assert Settings(identity="me").holder == "me"


def test_every_field_says_what_it_is() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert variable_name(name).startswith(PREFIX)
