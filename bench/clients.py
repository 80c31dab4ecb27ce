"""Clients that others wrote, against a running server (`tests/campaigns/clients`)."""

from tests.campaigns.clients.__main__ import main

if __name__ == "__main__":
    main()
