"""Keeps macOS from idle sleep while a process works unattended.

caffeinate(8) holds the assertion until the process that `-w` names has ended, so nothing has to be stopped. The display
may sleep, and closing a lid still puts a laptop to sleep.
"""

import os
import subprocess
import sys

import structlog

log = structlog.get_logger()

CAFFEINATE = "/usr/bin/caffeinate"


_running: "list[subprocess.Popen[bytes]]" = []  # held, for an unwatched one would be complained of


def stay_awake(wanted: bool = True, program: str = CAFFEINATE) -> bool:
    """Start caffeinate for this process, where that is wanted and this is macOS; True if it runs."""
    if not wanted or sys.platform != "darwin":
        return False
    try:
        # It watches our pid, gets none of our descriptors, and no signal of the terminal.
        caffeinate = subprocess.Popen(
            [program, "-i", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _running.append(caffeinate)
    except OSError as error:
        log.warning("machine.may_sleep", error=str(error), hint="start it under caffeinate -i yourself")
        return False
    return True
