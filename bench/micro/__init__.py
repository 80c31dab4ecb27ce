"""The micro-benchmarks: each stage and operation of a device next to what the same run's ceilings allow."""
