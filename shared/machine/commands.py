"""Output of the small programs that come with macOS, such as pmset."""

import subprocess

WAIT_S = 5.0


def output_of(*command: str) -> str:
    """Standard output of a program; "" if it is missing, fails, or hangs.

    The path is absolute and no descriptors are closed, so Python uses posix_spawn: a fork would copy the page tables
    of a process that holds a model.
    """
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT_S, close_fds=False, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout
