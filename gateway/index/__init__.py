"""Who holds which blocks: the engines' device caches and the shared pool.

Owns what the gateway believes about residency, and how it came to believe it:
`device.py` is the index of device blocks, `subscriber.py` feeds it from the
engines' KV events, `pool.py` asks the Mooncake master (with `boundary.py`, the
search for a run's end, and `breaker.py`, the guard before the master). Nothing
here knows of prompts, fleets or policies.
"""
