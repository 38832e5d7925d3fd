"""A worker process as its host knows it, which loads no model: it does what the folder of its model says.

`answer.json` is the line that describes the model, unless `deadly` ends the first process that looks; `serves` is what
it does once it is to serve: `ready` (until it is ended; also without the file), `refuses`, `dies` (before it is ready),
`dies later` (once `serves` says so), `loads` (for ever).
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path


def say(line: str) -> None:
    os.write(int(os.environ["PARALLM_START_REPORTS"]), line.encode() + b"\n")


def follow(folder: Path) -> None:
    while not (folder / "serves").exists() or (folder / "serves").read_text() != "dies later":
        time.sleep(0.02)
    os._exit(9)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    settings = dict(os.environ)
    if "PARALLM_WAITS_FOR_MODEL" in settings:
        for line in sys.stdin:
            order = json.loads(line)
            settings = order.get("describe") or order["serve"]
            if "serve" in order:
                break
            if (deadly := Path(settings["PARALLM_MODEL"]) / "deadly").exists():
                deadly.unlink()
                os._exit(9)
            say((Path(settings["PARALLM_MODEL"]) / "answer.json").read_text())
        else:
            return
    folder = Path(settings["PARALLM_MODEL"])
    serves = (folder / "serves").read_text() if (folder / "serves").exists() else "ready"  # no file that hosts give
    with (folder / "starts").open("a") as starts:
        draft = settings.get("PARALLM_DRAFT_MODEL_PATH", "")
        name = settings["PARALLM_SERVED_MODEL_NAME"]
        starts.write(f"{settings['PARALLM_MEMORY_LIMIT']} {name} {os.getpid()} {draft}\n")
    say('{"progress": 0.5}')
    if serves == "loads":
        sys.stdin.read()
    if serves == "dies":
        os._exit(7)
    if serves == "refuses":
        say('{"why": "it does not fit"}')
        sys.exit(2)
    say(json.dumps({"worker": settings["PARALLM_WORKER_ID"]}))
    threading.Thread(target=follow, args=(folder,), daemon=True).start()
    sys.stdin.read()  # the host's life


if __name__ == "__main__":
    main()
