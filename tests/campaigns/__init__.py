"""Campaigns: programs that run against a whole engine or server for minutes and judge what happens.

Each has a name in bench, for example `python -m bench.kills`; tests run short ones.
"""
