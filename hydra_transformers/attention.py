"""The engine's paged attention as an attention function of transformers.

transformers makes every mask through a registered function and passes its result to the attention functions unread.
Here that result is the rule itself, `MaskRule`: a function of positions, so windows, chunks and whatever else a model
defines are known exactly. Tokens that attend to all positions before them use the paged kernel; others (windows that
have begun to slide, pictures that attend to themselves) use the same kernel over a gathered context, each with a table
of its positions. The choice depends only on a token's position and its prompt.

The step's data travels as a keyword argument through the model's forward, so lanes and requests cannot mix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hydra_engine.backend.base import AttentionPlan, Ops, PagedCache
from hydra_engine.models.layers.decoder import LanguageInput

NAME = "hydra_paged"
STEP = "hydra_step"  # the keyword argument

MaskFunction = Callable[[Any, Any, Tensor, Tensor], Tensor]  # (batch, head, query, key) positions -> bool


@dataclass(frozen=True)
class MaskRule:
    """A mask as a function: the positions that a token of one request attends to, by the model's own code. It takes the
    place of a tensor; any computation with it raises ValueError."""

    allowed: MaskFunction

    @property
    def is_causal(self) -> bool:
        """True if a token attends to all positions up to its own."""
        plain: object = causal_mask_function
        return self.allowed is plain

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _no_tensor()

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        raise _no_tensor()

    def _refuse(self, *_: object) -> Any:
        raise _no_tensor()

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __invert__ = _refuse


def _no_tensor() -> ValueError:
    return ValueError("it computes with its attention mask, and the engine's attention has a rule in the mask's place")


class Selection(NamedTuple):
    """Tokens of one request with the positions that each attends to."""

    tokens: Tensor  # [n] int64, rows of the step
    slots: Tensor  # [context] int64, of the request's positions from the first that is seen
    table: Tensor  # [n, most] int32, indices into `slots`; entries beyond a token's count are arbitrary
    counts: Tensor  # [n] int32
    plan: AttentionPlan  # over the gathered context, a block per position and a row per token


@dataclass(eq=False)
class Step:
    """The data of one forward pass that layers need besides their own arguments. `sees_itself`: rows of one picture
    attend to each other."""

    ops: Ops
    cache: PagedCache
    batch: LanguageInput
    sees_itself: bool
    layers: list[int] = field(default_factory=list)  # that have written, in order
    _selections: dict[tuple[MaskRule, bool], list[Selection]] = field(default_factory=dict)

    def selections(self, rule: MaskRule, *, all_tokens: bool) -> list[Selection]:
        """Returns the tokens that the causal kernel cannot serve, or all; computed once per rule."""
        key = (rule, all_tokens)
        if key not in self._selections:
            self._selections[key] = self._select(rule, all_tokens)
        return self._selections[key]

    def _select(self, rule: MaskRule, all_tokens: bool) -> list[Selection]:
        if rule.is_causal and not all_tokens and not (self.sees_itself and self.batch.image_rows is not None):
            return []
        plan, ends, device = self.batch.attention, self._picture_ends(), self.batch.slots.device
        bounds, selections = plan.cu_q.tolist(), []
        for row, num_context in enumerate(plan.num_context.tolist()):
            begin, end = bounds[row], bounds[row + 1]
            if begin == end:
                continue
            start = num_context - (end - begin)
            queries = torch.arange(start, num_context, device=device)[:, None]
            keys = torch.arange(num_context, device=device)[None, :]
            seen_until = queries if ends is None else torch.maximum(queries, ends[begin:end, None] - begin + start)
            before = torch.as_tensor(rule.allowed(0, 0, queries, keys)).expand(end - begin, num_context)
            sees = (before & (keys <= queries)) | ((keys > queries) & (keys <= seen_until))
            selected = torch.ones_like(sees[:, 0]) if all_tokens else (sees != (keys <= queries)).any(1)
            if selected.any():
                selections.append(self._selection(row, begin + selected.nonzero()[:, 0], sees[selected]))
        return selections

    def _selection(self, row: int, tokens: Tensor, sees: Tensor) -> Selection:
        """Builds the selection of tokens with the mask `sees`, [n, context]."""
        counts = sees.sum(1, dtype=torch.int32)
        low = int(sees.any(0).nonzero()[0])
        # Stable, so that the positions of each token come in order; masked ones come last.
        table = (~sees[:, low:]).to(torch.int8).argsort(dim=1, stable=True)[:, : int(counts.max())]
        size = self.cache.block_size
        positions = torch.arange(low, sees.shape[1], device=sees.device)
        blocks = self.batch.attention.block_tables[row].to(positions).index_select(0, positions // size)
        cu_q = torch.arange(len(tokens) + 1, dtype=torch.int32)
        table = table.to(torch.int32).contiguous()
        plan = self.ops.plan_attention(cu_q, counts.cpu(), table.cpu())
        return Selection(tokens, blocks * size + positions % size, table, counts, plan)

    def _picture_ends(self) -> Tensor | None:
        """Last row of each row's picture, [T] int64, -1 for text. Adjacent pictures count as one, as in transformers;
        pictures of different requests never do."""
        rows = self.batch.image_rows
        if not self.sees_itself or rows is None:
            return None
        ends = torch.full_like(self.batch.slots, -1)
        for first, last in _runs(sorted(rows.tolist()), self.batch.attention.cu_q.tolist()):
            ends[first : last + 1] = last
        return ends


def _runs(rows: Sequence[int], bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (first, last) of every run of adjacent rows; a bound begins a new run."""
    starts = set(bounds)
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1 and row not in starts:
            runs[-1] = (runs[-1][0], row)
        else:
            runs.append((row, row))
    return runs


def mask_rule(*, mask_function: MaskFunction, **_: object) -> MaskRule:
    """Returns the rule that transformers passes on in place of a mask."""
    return MaskRule(mask_function)


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Writes keys and values to the step's slots, then returns attention, [1, T, Hq, D]. `softcap` bounds the scores;
    `s_aux` [Hq] are sinks: scores of a key whose value is zero."""
    step = kwargs.get(STEP)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(step, Step) or type(layer) is not int:
        raise ValueError(f"{type(module).__name__} does not hand its arguments on to its attention function")
    if not isinstance(attention_mask, MaskRule):
        raise ValueError(f"{type(module).__name__} makes a mask of its own")
    ops, cache = step.ops, step.cache
    q, k, v = (x[0].transpose(0, 1).to(cache.data.dtype).contiguous() for x in (query, key, value))  # [T, H, D]
    ops.write_cache(cache, layer, (k, v), step.batch.slots)
    step.layers.append(layer)
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if softcap is None and s_aux is None:
        out = ops.attention_paged(q, cache, layer, step.batch.attention, scale)
        for selection in step.selections(attention_mask, all_tokens=False):
            context = _gathered(ops, cache, layer, selection.slots)
            out[selection.tokens] = ops.attention_paged(
                q.index_select(0, selection.tokens), context, 0, selection.plan, scale
            )
    else:
        out = torch.empty_like(q)
        for selection in step.selections(attention_mask, all_tokens=True):
            context = _gathered(ops, cache, layer, selection.slots)
            out[selection.tokens] = _with_bounded_scores(q, context, selection, scale, softcap, s_aux)
    return out[None].to(query.dtype), None


def _gathered(ops: Ops, cache: PagedCache, layer: int, slots: Tensor) -> PagedCache:
    """Copies slots to a cache of one layer with a block per position, [context, 1, 2, 1, Hkv, D]."""
    pair = torch.stack([ops.gather_cache(cache, layer, index, slots) for index in (0, 1)], dim=1)
    return PagedCache(pair[:, None, :, None])


def _with_bounded_scores(
    q: Tensor, context: PagedCache, selection: Selection, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Computes [n, Hq, D] in float32, token by token, so that a result depends only on the positions attended to."""
    keys, values = (context.data[:, 0, index, 0].float() for index in (0, 1))  # [context, Hkv, D]
    num_heads, num_kv_heads, dim = q.shape[1], keys.shape[1], q.shape[2]
    out = q.new_empty((len(selection.tokens), num_heads, dim))
    for index, (token, count) in enumerate(zip(selection.tokens.tolist(), selection.counts.tolist(), strict=True)):
        rows = selection.table[index, :count].to(torch.int64)
        seen, mixed = keys.index_select(0, rows), values.index_select(0, rows)
        query = q[token].float().view(num_kv_heads, num_heads // num_kv_heads, dim)
        scores = torch.matmul(query, seen.permute(1, 2, 0)).view(num_heads, count) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().view(num_heads, 1)), dim=1)
        weights = torch.softmax(scores, dim=1)[:, :count].reshape(num_kv_heads, -1, count)
        out[index] = torch.matmul(weights, mixed.transpose(0, 1)).view(num_heads, dim)
    return out


def register() -> None:
    """Registers the attention and mask functions as NAME; idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_rule)
