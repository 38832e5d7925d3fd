"""The worker (engine and its asyncio side) and the job runner (worker.jobs)."""
