"""`python -m worker.jobs`: the job runner."""


def main() -> None:
    """Parse the settings and run until a signal; 2 when the settings are wrong."""
    # Imports stand here because every process of the reward pool imports this module, and needs none of them.
    import asyncio
    import sys

    from shared import logs
    from shared.errors import SetupError
    from shared.lifeline import follow_parent
    from shared.settings import RunnerSettings, load
    from worker.jobs.runner import run

    try:
        settings = load(RunnerSettings)
        if not settings.redis:
            raise SetupError("the job runner needs --redis URL (or PARALLM_REDIS_URL)")
    except SetupError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise SystemExit(2) from None
    logs.configure(settings.log_level, settings.log_json)
    follow_parent()
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
