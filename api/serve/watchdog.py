"""Runs one server as our child and ends it when the parent is gone; started as a script by `embedded_redis.py`.

`watchdog.py COMMAND...`: the server's process id goes to stdout, then we wait for whichever comes first: the server's
end, or end-of-file on stdin, which the kernel gives us even when the parent dies by SIGKILL. Standard library only, so
that it starts in a few milliseconds.
"""

import os
import signal
import subprocess
import sys
import threading

STOP_WITHIN_S = 10.0  # the server writes its append-only file out; then it is killed


def main() -> int:
    """Run the server until it or the parent ends; the server's exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # we go last: only the server's end ends us
    lock = int(sys.argv[1])
    server = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[lock])
    sys.stdout.write(f"{server.pid}\n")
    sys.stdout.flush()
    threading.Thread(target=_stop_at_end_of_file, args=(server,), daemon=True).start()
    return server.wait()


def _stop_at_end_of_file(server: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1024):
        pass
    server.terminate()
    try:
        server.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        server.kill()


if __name__ == "__main__":
    sys.exit(main())
