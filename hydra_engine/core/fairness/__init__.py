"""What clients share, and the rules by which they do: bytes (byte_budget), places and time (turns),
threads (worker_pool)."""
