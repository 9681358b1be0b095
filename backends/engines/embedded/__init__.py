"""The embedded engine: SGLang's HTTP API over a transformers model, for machines without SGLang.

One request through it::

    server.py      POST /generate; request.py turns the body into a Request
    vision.py      its pictures, expanded: held by digest, embedded once per request
    loop.py        posts it to the generation thread
    scheduler.py   waiting -> running: a row of the cache, reusing the longest stored prefix
    model.py       prefill and decode: the model's own forward over cache rows
    cache.py       its keys and values, and prefixes of finished requests
    sampling.py    logits -> token and log-prob
    reply.py       the response, or one cumulative SSE chunk per news; text, stop strings

`__main__.py` is the command line. Importing this package loads nothing; only the engine's process
imports its modules.
"""
