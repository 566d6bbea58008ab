"""`python -m connector` is `mooncake-connector`."""

from connector.cli import main

main()
