"""The size of one mixed scheduling step (tools/scheduling_step.py). Numbers may fall; raising one is a decision that
its commit explains."""

from __future__ import annotations

import re
from itertools import chain

import pytest

from tools.scheduling_step import BEGIN, END, PAGE, Trace, mixed_step, name_other_instances, num_lines, reading_order

MAX_FUNCTIONS = 60  # that plan_language enters, comprehensions not counted
MAX_FILES = 13
MAX_LINES = 3120
MAX_ON_LANGUAGE_FUNCTIONS = 51
MAX_READING_LINES = 5212  # of a mixed step, a start with cached blocks, a vision step and their results
MAX_FILES_NAMING_OTHER_INSTANCES = 1


@pytest.fixture(scope="module")
def step() -> tuple[Trace, Trace]:
    return mixed_step()


def test_a_mixed_step_enters_no_more_functions_and_files_than_decided(step: tuple[Trace, Trace]) -> None:
    planned, ended = step
    assert len(planned.functions) <= MAX_FUNCTIONS
    assert len(planned.files) <= MAX_FILES and planned.lines <= MAX_LINES
    assert len(ended.functions) <= MAX_ON_LANGUAGE_FUNCTIONS
    assert ("scheduler/scheduler.py", "StageScheduler.plan_language") in planned.functions


def test_no_more_files_of_the_core_mention_other_instances_than_decided() -> None:
    assert len(name_other_instances()) <= MAX_FILES_NAMING_OTHER_INSTANCES, name_other_instances()


def test_the_documented_reading_order_is_what_a_step_runs() -> None:
    order = list(chain(*reading_order().values()))
    assert sum(map(num_lines, order)) <= MAX_READING_LINES
    page = PAGE.read_text(encoding="utf-8")
    documented = page.partition(BEGIN)[2].partition(END)[0]
    listed = re.findall(r"`([a-z_/]+\.py)`", documented)
    assert listed == order, "run `python -m tools.scheduling_step --write`"
