"""The contracts between the processes: message types, Redis keys, errors and settings.

Nothing here imports MLX or FastAPI, so every process can import all of it. Read the types first:

    sequences.py     what waits in the queue and is decoded: one prompt, one completion
    frames.py        token events, and the frames that carry them
    token_events.py  taking token events apart and putting them together
    jobs.py          a job that is submitted and polled
    episodes.py      turns of a conversation, and how they follow one another
    signals.py       what shows how good a turn was, and the reward that it comes to
    night.py         what a night's run has learned from sessions, and proposes
    trajectories.py  what a rollout leaves behind
    replay.py        tokens that are computed again, and by how much they may differ
    replay_report.py verdicts on them
    adapters.py      an adapter version
    splits.py        an adapter's requests over several versions: shares and the verdict
    heads.py         small networks on hidden states
    training.py      what a trainer tells, is asked and answers
    catalogue.py     models that a ring may serve, and the hosts that load them
    ranks.py         the processes that hold one model together
    learners.py      what is asked of a learner of the training service, and its answers
    errors.py        every error, with its HTTP status
    owners.py        whose a thing is
    webhooks.py      receivers of notifications of an end
    seeds.py         seeds that follow from other seeds
    noise.py         the number by which a token is drawn
    wire.py          bytes between two processes that know the ring's secret
    turns.py         whose turn it is, where tenants share what there is

`images/` says what stands for an image in a prompt, and how large that is.

`networks/` says what a network is that is no language model, and what goes in and out of it.

Then `redis/`, which moves these types. `rewards/` and `scoring/` compute rewards, `text/` turns text into token ids and
back, `adapter_files/` reads adapter files, `image_files/` images of clients, `telemetry/` counts and
traces, `process/` is what every process needs to start: settings, logs, its parent.
"""
