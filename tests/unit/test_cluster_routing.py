"""Which slot of a cluster a command goes to, and that keys which belong together share one."""

import pytest

from shared.redis import keys
from shared.redis.connection import routing
from shared.redis.connection.address import ClusterAddress, is_cluster, is_sentinel


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("HGETALL", "k"), "k"),
        ((b"get", b"k"), b"k"),
        (("EVALSHA", "sha", 2, "k", "l", "argument"), "k"),
        (("XREAD", "COUNT", 1, "BLOCK", 10, b"STREAMS", "k", "l", "0", "$"), "k"),
        (("XREADGROUP", "GROUP", "g", "c", "STREAMS", "k", ">"), "k"),
        (("XINFO GROUPS", "k"), "k"),
        (("XGROUP", "CREATE", "k", "g", "0"), "k"),
        (("PUBLISH", "k", "message"), "k"),
    ],
)
def test_a_command_goes_to_its_first_key(command: routing.Command, key: object) -> None:
    assert routing.keys_of(command)[0] == key


@pytest.mark.parametrize("command", [("TIME",), ("PING",), ("SCRIPT LOAD", "return 1"), ("EVALSHA", "sha", 0, "x")])
def test_a_command_without_a_key_goes_with_its_neighbours(command: routing.Command) -> None:
    a, b = routing.slot_of("a"), routing.slot_of("b")
    assert routing.slots_of([command, ("GET", "a"), command, ("GET", "b"), command]) == [a, a, a, b, b]
    assert routing.slots_of([command]) == [0]


def test_what_is_published_on_a_sharded_channel_stays_in_its_shard() -> None:
    assert routing.sent(("PUBLISH", keys.frame_channel("a0"), b"frame"))[0] == "SPUBLISH"
    assert routing.slot_of(keys.frame_channel("a0")) == routing.slot_of(keys.frames("a0"))
    for channel in (keys.adapter_channel(), keys.alert_channel(), keys.control_channel("w0"), "{}", "}{"):
        assert routing.sent(("PUBLISH", channel, b""))[0] == "PUBLISH"


def test_a_command_on_keys_of_several_slots_is_split_and_its_answers_are_joined() -> None:
    parts = routing.by_slot(("MGET", "a", "b", "c{a}", "a"))
    a, b = routing.slot_of("a"), routing.slot_of("b")
    assert parts == {a: ("MGET", "a", "c{a}", "a"), b: ("MGET", "b")}
    assert routing.joined(("MGET", "a", "b", "c{a}", "a"), {a: [1, 3, 1], b: [2]}) == [1, 2, 3, 1]
    assert routing.joined(("DEL", "a", "b"), {a: 1, b: 0}) == 1
    read = routing.by_slot(("XREAD", "BLOCK", 5, b"STREAMS", "a", "b", "c{a}", "1", "2", "3"))
    assert read == {
        a: ("XREAD", "BLOCK", 5, b"STREAMS", "a", "c{a}", "1", "3"),
        b: ("XREAD", "BLOCK", 5, b"STREAMS", "b", "2"),
    }


def test_servers_are_asked_in_the_order_in_which_a_pipeline_names_them() -> None:
    assert list(routing.groups(["y", "x", "y", "z"], [0, 1, 2, 3]).items()) == [("y", [0, 2]), ("x", [1]), ("z", [3])]


def test_a_url_names_some_servers_of_a_cluster() -> None:
    address = ClusterAddress.parse("redis+cluster://me:p%40ss@h1:7000,[::1],h3:7002?socket_timeout=3")
    assert address.members == (("h1", 7000), ("::1", 6379), ("h3", 7002))
    assert address.data_url == "redis://me:p%40ss@cluster/0?socket_timeout=3"
    assert ClusterAddress.parse("rediss+cluster://h").tls and not address.tls
    assert is_cluster("redis+cluster://h") and not is_cluster("redis://h") and not is_sentinel("redis+cluster://h")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+cluster://h/1", "one database"),
        ("redis+cluster://", "no HOST:PORT of a server of the cluster"),
        ("redis+cluster://h:0", "no HOST:PORT"),
        ("redis+cluster://h,,i", "no HOST:PORT"),
    ],
)
def test_a_url_that_names_no_cluster_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ClusterAddress.parse(url)


@pytest.mark.parametrize(
    ("command", "waits_s"),
    [
        (("XREAD", "COUNT", 1, "BLOCK", 1500, "STREAMS", "a", "0"), 1.5),
        (("XREAD", b"BLOCK", b"1000", b"STREAMS", "a", "0"), 1.0),
        (("XREAD", "STREAMS", "BLOCK", "0"), 0.0),
        (("GET", "BLOCK"), 0.0),
    ],
)
def test_a_read_that_waits_at_its_server_says_for_how_long(command: routing.Command, waits_s: float) -> None:
    assert routing.waits_s(command) == waits_s
