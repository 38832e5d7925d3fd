"""Addresses of this machine and of others, as a Mac lists and resolves them."""

import errno
import socket
import sys

import pytest

from shared.machine.network import addresses_in, in_order, words_of
from shared.redis.connection.faults import reason

IFCONFIG = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
	inet 127.0.0.1 netmask 0xff000000
	inet6 ::1 prefixlen 128
	inet6 fe80::1%lo0 prefixlen 64 scopeid 0x1
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	ether 5c:e9:1e:00:00:01
	inet6 fe80::1c3b:4d1:abcd:ef01%en0 prefixlen 64 secured scopeid 0xb
	inet 192.168.1.23 netmask 0xffffff00 broadcast 192.168.1.255
	inet6 2001:db8:1::23 prefixlen 64 autoconf secured
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	inet 10.0.0.2 netmask 0xfffffffc broadcast 10.0.0.3
	member: en2 flags=3<LEARNING,DISCOVER>
"""


def test_thunderbolt_addresses_are_among_the_interfaces_and_what_all_machines_have_is_not() -> None:
    assert addresses_in(IFCONFIG) == {"192.168.1.23", "2001:db8:1::23", "10.0.0.2"}
    assert addresses_in("") == set()


LINK_LOCAL = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1c3b:4d1:abcd:ef01%en0", 6379, 0, 11))
GLOBAL = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8:1::23", 6379, 0, 0))
PLAIN = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.168.1.23", 6379))


def test_an_address_of_one_interface_alone_is_tried_last_and_only_where_there_is_no_other() -> None:
    assert in_order([LINK_LOCAL, GLOBAL, PLAIN]) == [PLAIN, GLOBAL]
    assert in_order([LINK_LOCAL]) == [LINK_LOCAL]
    assert in_order([]) == []


def test_no_route_to_host_says_what_macos_may_mean_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EHOSTUNREACH, "No route to host")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Privacy & Security, Local Network" in reason(error)
    assert reason(OSError(errno.ECONNREFUSED, "refused")) == "Connection refused"
    monkeypatch.setattr(sys, "platform", "linux")
    assert words_of(error, "No route to host") == "No route to host"
