"""Engines to compare ours with, each without one of its ideas: `python -m bench.baselines NAME MODEL [options]` serves
MODEL as `hydra-engine serve` does. One instance that serves all stages; slower, but nothing else is worse."""

NAMES = {
    "request-level": "requests are scheduled whole: all their encodes, then their whole prompt, while others wait",
    "one-lane": "one step of either model at a time, in turns",
    "unsliced": "encodes never pause for a language step",
}
