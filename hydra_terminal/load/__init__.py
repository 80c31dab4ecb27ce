"""A load generator for OpenAI-compatible servers: seeded requests, two kinds of arrivals, times of every token."""
