"""The ring that a process joins: by its Redis (`--redis`), or by an api of it that is asked (`--connect-to`)."""

from pydantic import SecretStr

from shared.process.process_settings import JoinSettings


async def ring_url(settings: JoinSettings) -> str:
    """The Redis of the ring that the settings name, "" when they name none; SetupError when they name it twice."""
    JoinSettings.check(settings)
    if settings.redis or not settings.connect_to:
        return settings.redis
    from shared.process.ring_query import find_redis  # and httpx: most processes are told their Redis

    key, password = settings.connect_key.get_secret_value(), settings.redis_password.get_secret_value()
    return await find_redis(settings.connect_to, api_key=key, password=password)


async def join(settings: JoinSettings) -> None:
    """Find the ring and put its address into `settings.redis`; the settings that were needed for it are cleared."""
    settings.redis = await ring_url(settings)
    settings.connect_to, settings.connect_key, settings.redis_password = "", SecretStr(""), SecretStr("")
