"""Ports are chosen so that they are still free when they are used."""

import socket

import pytest

from cluster import ClusterError, ports


@pytest.fixture
def few(monkeypatch):
    """Three ports to choose from."""
    choice = ports.choose(3)
    monkeypatch.setattr(ports, "CHOICE", choice)
    return choice


def test_all_are_different():
    found = ports.choose(6)

    assert len(set(found)) == 6
    assert set(found) <= set(ports.CHOICE)


def test_one_that_was_promised_is_left_out(few):
    assert ports.choose(1, taken=few[:2]) == [few[2]]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])
def test_one_that_somebody_listens_on_is_left_out(few, address):
    with socket.create_server((address, few[0])):
        assert few[0] not in ports.choose(2)


def test_too_few_are_refused(few):
    with pytest.raises(ClusterError, match="only 2 of 3 ports"):
        ports.choose(3, taken=few[:1])
