"""Runs one prompt or many to their end: enough at once to keep the lanes busy, results in the order of the prompts.

Does not know threads.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Sequence
from typing import Any

from hydra_engine.core.call import GenerationCall
from hydra_engine.core.outputs import FinishReason, RequestMetrics, Result, Usage
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import HydraError, InvalidRequest
from hydra_engine.frontend.call import (
    check_no_sampling,
    check_prompt,
    is_chat,
    is_prompt_dict,
    is_token_ids,
    make_call,
    split_sampling,
    with_prompt,
)
from hydra_engine.frontend.frontend import Frontend
from hydra_engine.frontend.progress import BatchProgress


def run_batch(
    frontend: Frontend,
    prompts: Any,
    images: Any,
    videos: Any,
    options: dict[str, Any],
    defaults: SamplingParams,
    ended: list[Result | None],
) -> Coroutine[Any, Any, Result | list[Result]]:
    """Returns what runs requests to their end for `Engine.generate` and `chat`, on the frontend's loop: one Result for
    a single prompt, else a list. Checks arguments and reads open files before it returns. `options` are BatchOptions;
    `ended[i]` is set to the result of prompt i as it ends. Raises InvalidRequest."""
    check_prompt(prompts)
    images, options = split_sampling(images, options)
    single = isinstance(prompts, str) or is_token_ids(prompts) or is_chat(prompts) or is_prompt_dict(prompts)
    on_error = options.pop("on_error", "raise")
    if on_error not in ("raise", "return"):
        raise InvalidRequest(f"on_error must be raise or return, not {on_error!r}", param="on_error")
    progress = options.pop("progress", None)
    items = [prompts] if single else list(prompts)
    pictures = [images] if single else _one_each(images, len(items), "images")
    films = [videos] if single else _one_each(videos, len(items), "videos")
    call = make_call(options, defaults)
    calls = [_made(call, *item) for item in zip(items, pictures, films, strict=True)]
    return _run_all(
        frontend, call.sampling.n, calls, ended, progress=progress, single=single, raises=on_error == "raise"
    )


def _made(call: GenerationCall, prompt: Any, images: Any, videos: Any) -> GenerationCall | HydraError:
    """Returns the error of a wrong prompt, which fails alone, in place of its call."""
    try:
        return with_prompt(call, prompt, images, videos)
    except HydraError as error:
        return error


def _one_each(values: Any, num_items: int, name: str) -> list[Any]:
    """Returns one entry per prompt. Raises InvalidRequest if the numbers differ."""
    if values is None:
        return [None] * num_items
    check_no_sampling(values)
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    if not is_list or len(values) != num_items:
        entries = f"{len(values)} entries" if is_list else "one entry"
        raise InvalidRequest(f"{num_items} prompts but {entries} in {name}; give one entry for each prompt", param=name)
    return list(values)


async def _run_all(
    frontend: Frontend,
    num_answers: int,
    calls: Sequence[GenerationCall | HydraError],
    ended: list[Result | None],
    *,
    progress: bool | None,
    single: bool,
    raises: bool,
) -> Result | list[Result]:
    """Runs all `calls`, with `num_answers` each. The Result of a failed request has an `error`, whose `index` is that
    of the prompt; its message names it too unless `single`. With `raises` the first error is raised after the end."""
    limits = frontend.config.scheduler
    ended.extend([None] * len(calls))
    # Enough to keep the lanes busy and preprocessing ahead of them, but never more than the queue admits.
    at_once = max((summary.max_num_seqs for summary in frontend.summaries), default=0) or limits.max_running_requests
    window = asyncio.Semaphore(max(1, min(2 * at_once, limits.max_queue // 2) // num_answers))
    with BatchProgress(len(calls), progress if len(calls) > 1 else False, frontend.statuses.total) as bar:

        async def run(index: int, call: GenerationCall | HydraError) -> Result:
            async with window:
                number, handle = frontend.open_handle()
                try:
                    if isinstance(call, HydraError):
                        raise call
                    await frontend.submit(number, handle, call)
                    result = await handle
                except HydraError as failure:
                    place = None if single else index
                    error = _placed(failure, place)
                    error.index = place
                    result = Result(handle.id, "", (), FinishReason.ERROR, Usage(0, 0), RequestMetrics(), error=error)
                finally:
                    handle.cancel()
                ended[index] = result
                bar.add(result)
                return result

        results = list(await asyncio.gather(*(run(index, call) for index, call in enumerate(calls))))
    for result in results if raises else ():
        if result.error is not None:
            if not single:
                result.error.add_note("the other requests have ended")
            raise result.error
    return results[0] if single else results


def _placed(error: HydraError, index: int | None) -> HydraError:
    """Returns the error with the number of the picture and, for several prompts, of the prompt in its message, from
    1."""
    match = re.fullmatch(r"(image|video)s\[(\d+)\]", error.param or "")
    places = [f"{match[1]} {int(match[2]) + 1}"] if match else []
    places += [f"prompt {index + 1}"] if index is not None else []
    return error.with_message(f"{' of '.join(places)}: {error.message}") if places else error
