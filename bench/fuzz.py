"""Thousands of malformed requests against a served model (`tests/campaigns/fuzz.py`)."""

from tests.campaigns.fuzz import main

if __name__ == "__main__":
    main()
