"""A Mooncake client for tests, run by the engines' interpreter: one JSON command a line.

    ["setup", hostname, master, segment_bytes]   ["put", [key, ...], size]   ["exist", [key, ...]]

Each answers with one line of JSON.
"""

import json
import sys

from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
# Mooncake's libraries log to standard output as well; answers are told apart by their mark.
for line in sys.stdin:
    command, *arguments = json.loads(line)
    if command == "setup":
        hostname, master, segment = arguments
        answer = store.setup(hostname, "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", master)
    elif command == "put":
        keys, size = arguments
        answer = [store.put(key, bytes(size)) for key in keys]
    else:
        answer = store.batch_is_exist(arguments[0])
    sys.stdout.write(f"\nANSWER {json.dumps(answer)}\n")
    sys.stdout.flush()
