"""Attacks on a server, with oracles that do not depend on the machine's speed (`tests/campaigns/siege`)."""

from tests.campaigns.siege.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())
