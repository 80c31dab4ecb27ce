"""The frozen configuration tree, from which the command line, the config file and the embedded API are generated.

`instance/compute_stack.py`, where the model is known, replaces "auto" by values in a new object; no object is mutated.
Field metadata: `help`, `flag` (name on the command line, in the environment and in a file, default the field name with
dashes), `aliases` (names of the option in other engines), `choices`, `kind` ("seconds": also takes 40ms, 1.5s or 2m;
"json": an object, as text or written out; "file" and "folder": paths), `secret` (never shown).
"""

from hydra_engine.config.engine import (
    DEFAULT_REQUESTS,
    DEFAULT_TOKENS,
    DEMO_MODEL,
    MAX_PRIORITY,
    SHAPES,
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    MediaConfig,
    SchedulerConfig,
)
from hydra_engine.config.environment import (
    SECRET_VARIABLES,
    environment_admin_key,
    environment_api_key_file,
    environment_api_keys,
    environment_settings,
    state_folder,
)
from hydra_engine.config.hub import find_model
from hydra_engine.config.keywords import EngineOptions, check_start, config_from_options
from hydra_engine.config.server import ServerConfig
from hydra_engine.config.values import MAX_LIMIT_S, parse_seconds

__all__ = [
    "CacheConfig",
    "ClusterConfig",
    "DEFAULT_REQUESTS",
    "DEFAULT_TOKENS",
    "DEMO_MODEL",
    "EngineConfig",
    "EngineOptions",
    "MAX_LIMIT_S",
    "MAX_PRIORITY",
    "MediaConfig",
    "SECRET_VARIABLES",
    "SHAPES",
    "SchedulerConfig",
    "ServerConfig",
    "check_start",
    "config_from_options",
    "environment_admin_key",
    "environment_api_key_file",
    "environment_api_keys",
    "environment_settings",
    "find_model",
    "parse_seconds",
    "state_folder",
]
