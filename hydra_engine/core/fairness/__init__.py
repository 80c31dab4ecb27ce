"""Resources that clients share, and fair rules for them: bytes (byte_budget), slots and time (turns), threads
(worker_pool).
"""
