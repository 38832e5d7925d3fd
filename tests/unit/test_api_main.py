"""`python -m api`: what it takes, and how it says that it was set up wrongly."""

import resource
import signal
import socket

import pytest

from api.__main__ import main, take_fds
from shared.errors import SetupError
from shared.process.open_files import FILES, many_files, raise_file_limit


@pytest.mark.parametrize(
    ("arguments", "fds", "rest"),
    [
        (["--port", "1", "--fd", "7", "--host", "x"], [7], ["--port", "1", "--host", "x"]),
        (["--fd=7", "--fd", "8"], [7, 8], []),
        (["--port", "1"], [], ["--port", "1"]),
    ],
)
def test_inherited_sockets_are_taken_out_of_the_arguments(
    arguments: list[str], fds: list[int], rest: list[str]
) -> None:
    assert take_fds(arguments) == fds
    assert arguments == rest


@pytest.mark.parametrize("arguments", [["--fd"], ["--fd", "x"], ["--fd="]])
def test_a_malformed_fd_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SetupError, match="--fd"):
        take_fds(arguments)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARALLM_REDIS_URL", raising=False)
    monkeypatch.setattr("api.__main__.configure", lambda *_: None)


@pytest.mark.usefixtures("quiet")
def test_without_redis_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--redis" in capsys.readouterr().err


@pytest.mark.usefixtures("quiet")
def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--redis", "redis://127.0.0.1:1", "--port", port]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.usefixtures("quiet")
def test_a_socket_path_that_is_too_long_is_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--redis", "redis://127.0.0.1:1", "--uds", "/tmp/" + "s" * 200]) == 2
    assert "path too long" in capsys.readouterr().err


@pytest.mark.usefixtures("quiet")
def test_a_signal_before_anything_is_served_is_a_clean_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def there(url: str) -> None:
        pass

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("api.__main__.require", there)
    monkeypatch.setattr("api.__main__.follow_parent", lambda: signal.raise_signal(signal.SIGTERM))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(SystemExit) as left:
            monkeypatch.setattr("api.__main__.listen", lambda *_: [listener])
            main(["--redis", "redis://127.0.0.1:1"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.value.code == 0


@pytest.mark.usefixtures("quiet")
def test_unknown_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--redis", "redis://x", "--frobnicate", "1"])
    assert left.value.code == 2


def test_a_kernel_that_allows_fewer_files_than_it_says_gives_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS does: the hard limit is infinite, and what is above kern.maxfilesperproc is refused."""
    given = []

    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        if limits[0] > 24_576:
            raise ValueError("current limit exceeds maximum limit")
        given.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert raise_file_limit() == FILES // 4
    assert given == [(FILES // 4, resource.RLIM_INFINITY)]


def test_who_imports_mlx_lm_keeps_its_limits() -> None:
    """It does this on import: from then on no more files than that, unless root asks."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with many_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 4096))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raise_file_limit(), before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
