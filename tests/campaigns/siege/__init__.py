"""A siege of the server, with oracles that do not depend on how fast the machine is: `python -m bench.siege`.

`cases/` has what is done to it, by group; `oracles.py` what must hold; `server.py` is the server, watched from outside;
`controls/` has a patch for each guard that takes it out, with which the case that it names must fail.
"""
