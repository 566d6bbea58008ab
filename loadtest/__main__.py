"""`python -m loadtest` is `mooncake-loadtest`."""

from loadtest.cli import main

main()
