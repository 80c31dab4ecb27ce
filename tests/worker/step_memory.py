"""Prints the peak of a CPU lane's memory in a long prefill and what the plan says of it: `DIR QUANTIZATION`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from hydra_engine.backend.select import create_backend
from hydra_engine.config import EngineConfig, SchedulerConfig
from hydra_engine.core.instances import Role
from hydra_engine.core.options import SpecOptions
from hydra_engine.models.build import load_model
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.worker.blank_steps import blank_rows
from hydra_engine.worker.memory.cache_store import allocate_kv_cache, allocate_states
from hydra_engine.worker.memory.plan import plan_memory

NUM_TOKENS, THREADS = 4096, 2


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def main(directory: str, quantization: str) -> None:
    model_dir, role = Path(directory), Role.P | Role.D
    spec = load_spec(model_dir, SpecOptions(quantization=quantization))
    config = EngineConfig(
        model=directory, threads=THREADS, scheduler=SchedulerConfig(token_budget=NUM_TOKENS, max_num_seqs=4)
    )
    backend = create_backend("cpu", torch.float32, threads=THREADS)
    model = load_model(model_dir, spec, backend, role, lambda *_: None)
    plan = plan_memory(spec, role, config, 4, 4 << 30)
    cache = allocate_kv_cache(spec, replace(plan, num_kv_blocks=1), 16, torch.float32)
    states = allocate_states(spec, plan, torch.float32)
    found = []

    def job() -> None:
        for count in (1, NUM_TOKENS):
            on = torch.device("cpu")
            inputs = blank_rows(backend.ops, spec.language, cache, states, [count], [count], on)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
            before = status_bytes("VmRSS")
            model.forward(inputs, cache, None)
            found.append(status_bytes("VmHWM") - before)

    lane = backend.device.lane("language")
    lane.submit(job)
    lane.close()
    print(json.dumps([found[-1], plan.working.language_bytes]))


if __name__ == "__main__":
    main(*sys.argv[1:])
