"""Groups of settings, each with what it means: parts of those of an api or a worker (`shared/process/settings.py`).

`kv.py` of KV in memory and from other workers, `ssd.py` of KV on disk, `speculation.py` of drafts, `responses.py` of
what is kept between requests, `images.py` of images in prompts, `group.py` of ranks that hold one model together,
`webhooks.py` of messages to others, `model_aliases.py` of other names for models, `rings.py` of other rings' models,
`rates.py` of requests in a time.
"""
