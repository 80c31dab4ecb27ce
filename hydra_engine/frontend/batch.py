"""Runs one prompt or many to their end: enough at once to keep the lanes busy, results in the order of the prompts.

Does not know threads.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from hydra_engine.core.call import GenerationCall
from hydra_engine.core.outputs import FinishReason, RequestMetrics, Result, Usage
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import HydraError, InvalidRequest
from hydra_engine.frontend.call import check_prompt, is_chat, is_token_ids, make_call, with_prompt
from hydra_engine.frontend.frontend import Frontend
from hydra_engine.frontend.progress import BatchProgress


async def run_batch(
    frontend: Frontend,
    prompts: Any,
    images: Any,
    videos: Any,
    options: dict[str, Any],
    defaults: SamplingParams,
    ended: list[Result | None],
) -> Any:
    """Runs requests to their end for `Engine.generate` and `chat`. `options` are BatchOptions; `ended[i]` is set to the
    result of prompt i as it ends. Returns one Result for a single prompt, else a list."""
    check_prompt(prompts)
    single = isinstance(prompts, str) or is_token_ids(prompts) or is_chat(prompts)
    raises = options.pop("on_error", "raise") == "raise"
    progress = options.pop("progress", None)
    items = [prompts] if single else list(prompts)
    pictures = [images] if single else _one_each(images, len(items), "images")
    films = [videos] if single else _one_each(videos, len(items), "videos")
    prompts = list(zip(items, pictures, films, strict=True))
    results = await _run_all(frontend, make_call(options, defaults), prompts, ended, progress=progress, single=single)
    for result in results if raises else ():
        if result.error is not None:
            if not single:
                result.error.add_note("the other requests have ended")
            raise result.error
    return results[0] if single else results


def _one_each(values: Any, num_items: int, name: str) -> list[Any]:
    """Returns one entry per prompt. Raises InvalidRequest if the numbers differ."""
    if values is None:
        return [None] * num_items
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    if not is_list or len(values) != num_items:
        entries = f"{len(values)} entries" if is_list else "one entry"
        raise InvalidRequest(f"{num_items} prompts but {entries} in {name}; give one entry for each prompt", param=name)
    return list(values)


async def _run_all(
    frontend: Frontend,
    call: GenerationCall,
    prompts: Sequence[tuple[Any, Any, Any]],
    ended: list[Result | None],
    *,
    progress: bool | None,
    single: bool,
) -> list[Result]:
    """Runs `call` for each (prompt, images, videos) of `prompts`. The Result of a failed request has an `error`, whose
    `index` is that of the prompt; its message names it too unless `single`."""
    limits = frontend.config.scheduler
    ended.extend([None] * len(prompts))
    # Enough to keep the lanes busy and preprocessing ahead of them, but never more than the queue admits.
    at_once = max((summary.max_num_seqs for summary in frontend.summaries), default=0) or limits.max_running_requests
    window = asyncio.Semaphore(max(1, min(2 * at_once, limits.max_queue // 2) // call.sampling.n))
    with BatchProgress(len(prompts), progress if len(prompts) > 1 else False, frontend.statuses.total) as bar:

        async def run(index: int, prompt: tuple[Any, Any, Any]) -> Result:
            async with window:
                number, handle = frontend.open_handle()
                try:
                    await frontend.submit(number, handle, with_prompt(call, *prompt))
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

        return list(await asyncio.gather(*(run(index, prompt) for index, prompt in enumerate(prompts))))


def _placed(error: HydraError, index: int | None) -> HydraError:
    """Returns the error with the number of the picture and, for several prompts, of the prompt in its message, from
    1."""
    match = re.fullmatch(r"(image|video)s\[(\d+)\]", error.param or "")
    places = [f"{match[1]} {int(match[2]) + 1}"] if match else []
    places += [f"prompt {index + 1}"] if index is not None else []
    return error.with_message(f"{' of '.join(places)}: {error.message}") if places else error
