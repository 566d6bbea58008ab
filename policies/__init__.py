"""Routing decisions and the account of what is in flight; standard library only, no I/O.

Importing the package registers every policy in it.
"""

from policies import (
    least_requests,
    pool_aware,
    power_of_two,
    random_choice,
    round_robin,
    session_affinity,
)

__all__ = [
    "least_requests",
    "pool_aware",
    "power_of_two",
    "random_choice",
    "round_robin",
    "session_affinity",
]
