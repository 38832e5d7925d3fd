"""macOS's Local Network privacy, in words: it shows as "No route to host" where there is a route."""

import errno
import sys

HINT = (
    "macOS refuses programs it has not been allowed to reach the local network: allow this one (or the terminal that "
    "starts it) in System Settings, Privacy & Security, Local Network; for launchd, take the LaunchDaemons of "
    "deploy/launchd"
)


def words_of(error: OSError, text: str) -> str:
    """The text of an error, with what to do where macOS's privacy may be its cause."""
    return f"{text} ({HINT})" if sys.platform == "darwin" and error.errno == errno.EHOSTUNREACH else text
