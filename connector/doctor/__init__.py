"""Proves that a gateway's configuration and its engines agree, or says in words where not.

`mooncake-connector doctor -c gateway.yaml` sends every engine a chat of a few
blocks that nobody has sent before, and follows it: its token ids, its blocks'
hashes in the KV events, their replay, the keys of its blocks at the Mooncake
master, a hit when it is asked again, and a hit from the pool at another engine.
What differs from the configuration is named, and where the engine's own value
can be found out, so is that.

The blocks that it leaves in caches and pool have a `cache_salt` of their own: no
other request ever meets them, and nothing keeps them from being evicted. The
master is asked only what takes no lease.
"""
