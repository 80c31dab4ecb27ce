"""Serving under arrivals: any OpenAI-compatible server under seeded synthetic loads, `python -m bench.serve --help`."""
