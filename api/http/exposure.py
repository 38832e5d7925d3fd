"""Where the server may stand: without any key it listens on this machine only, unless `--insecure` is said.

Apart from the guards, because `mlx_parallm_serve` asks it before it starts an api, and needs no FastAPI for that.
"""

import ipaddress

from api.http.api_keys import KeyRing
from shared.errors import SetupError
from shared.process.settings import ApiSettings


def check_exposure(settings: ApiSettings) -> None:
    """SetupError when anybody on the network could ask."""
    if settings.uds or settings.insecure or _is_loopback(settings.host) or KeyRing.of(settings):
        return
    raise SetupError(
        f"--host {settings.host} without an API key lets anybody who reaches this machine in: set --api-key or "
        "--api-key-file (mlx_parallm key new makes a key), or say --insecure"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
