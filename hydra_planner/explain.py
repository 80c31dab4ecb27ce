"""Reasons for devices of their own for encodes: the closed forms of HeteroServe (sections 4 and 5) for one model, one
workload and two kinds of devices.

What a request hands over after its prefill (keys and values) or after its encode (features) is bytes; over a link it is
seconds, which are held against the seconds of the encode. Seconds of both kinds of work give the balance of devices,
and with prices the cost of serving on two tiers instead of one. No queue, no limit and no failure is in it: what a
deployment keeps is for the simulator to say. Does not know schedulers.

The paper's own numbers, by its equations: 576 features and 128 tokens of text are 704 keys and values, so
LLaVA-1.5-7B hands over 78 times the bytes of its features (equation 2, table 3); 1024 and 128 are 9.0 times for
Qwen2.5-VL-7B. Table 3 has 12 there, from 83 MB of keys and values where equation 1 gives 63 MiB; the 64 times that it
has without shared heads, by 4 of 28 heads, are 9 too. Those 128 are "output" in table 2 and "text" in equation 1; here
they are the prompt's, since nothing is generated when a prefill is handed over.

Equation 7 takes an encode to last as long on either tier, `cost_share` need not: products on an RTX 4090 with sums in
float32 run at half of the paper's 330 TFLOP/s. The paper's rho of 0.63 for LLaVA-1.5-7B is measured (table 6), with
53 ms of an RTX 4090 for each encode, where the roofline has 3: with that rho is 0.04, and a second tier saves next to
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_engine.errors import ConfigError
from hydra_engine.models.specs.base import DTYPE_BYTES, ModelSpec
from hydra_planner.hardware.devices import Link
from hydra_planner.simulator.costs import DeviceKind
from hydra_planner.work import RequestSeconds, decode_seconds, prefill_seconds, vision_seconds, works
from hydra_planner.workload.file import WorkloadRequest

# Of the seconds of an encode: a transfer that takes no more than this is small beside it.
SMALL = 0.25


# ---- the law of transfers


def kv_bytes(spec: ModelSpec, context: int, dtype_bytes: int) -> int:
    """Equation 1: keys and values (and states) of one request with that many tokens."""
    language = spec.language
    return language.kv_bytes_per_token(dtype_bytes) * context + language.state_bytes(dtype_bytes)


def feature_bytes(spec: ModelSpec, num_features: int, dtype_bytes: int) -> int:
    """Bytes of the image cache for the features of one request."""
    if spec.vision is None:
        return 0
    return num_features * spec.vision.feature_size * spec.vision.num_planes * dtype_bytes


# ---- balance and cost


def vision_devices(rho: float, num_language: float) -> float:
    """The devices for encodes that keep up with the devices for tokens. `rho`: seconds of vision over seconds of
    language, per request."""
    return rho * num_language


def throughput(num_vision: float, num_language: float, vision_s: float, language_s: float) -> float:
    """Equation 6: requests per second. Seconds are per request; without encodes the devices for tokens decide."""
    of_language = num_language / language_s
    return min(num_vision / vision_s, of_language) if vision_s else of_language


def cost_share(rho: float, gamma: float, one_tier_rho: float | None = None) -> float:
    """Equation 7: the cost of two tiers over that of one tier with the same throughput. `gamma`: price of a device for
    encodes over that of one for tokens. `one_tier_rho`: rho where encodes run on devices for tokens; None: as `rho`."""
    return (rho * gamma + 1) / ((rho if one_tier_rho is None else one_tier_rho) + 1)


def tokens_per_kilodollar(tokens_per_s: float, dollars: float) -> float:
    """Tokens per second for each $1,000 of devices (CER, section 6.1)."""
    return tokens_per_s / (dollars / 1000)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of the same kind of two devices; `unit`: $ to buy one, or $/h."""

    vision: float
    language: float
    unit: str

    @property
    def ratio(self) -> float:
        """Gamma."""
        return self.vision / self.language


def prices_of(vision: DeviceKind, language: DeviceKind) -> Prices | None:
    """Prices to buy or else for an hour; None where no kind of price is known of both."""
    for one, other, unit in ((vision.price, language.price, "$"), (vision.hour_price, language.hour_price, "$/h")):
        if one is not None and other:
            return Prices(one, other, unit)
    return None


# ---- one workload


@dataclass(frozen=True, slots=True)
class LinkTest:
    """Equation 4 for one link, on average of the requests with pictures."""

    link: str
    bytes_per_s: float
    features_s: float
    kv_s: float
    encode_s: float

    @property
    def features_share(self) -> float:
        """Seconds to move the features over the seconds of the encode."""
        return self.features_s / self.encode_s

    @property
    def kv_share(self) -> float:
        return self.kv_s / self.encode_s

    @property
    def verdict(self) -> str:
        if self.kv_share <= SMALL:
            return "features and KV"
        return "features only" if self.features_share <= SMALL else "neither"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Means per request. `kv_bytes`, `feature_bytes`, `ratio` and `links` are of the requests with pictures: None and
    empty where there are none. Two tiers have `num_vision` (rho) devices of the first kind for each of the second; one
    tier has devices of the second alone. `prices` and what follows from them are None where not both are known."""

    vision_device: str
    language_device: str
    num_requests: int
    with_pictures: int
    prompt_tokens: float
    features: float
    output_tokens: float
    kv_bytes: float | None
    feature_bytes: float | None
    ratio: float | None
    links: tuple[LinkTest, ...]
    seconds: RequestSeconds  # vision on the device for encodes, the others on the one for tokens
    one_tier_vision_s: float
    rho: float
    one_tier_rho: float
    prices: Prices | None
    num_vision: float
    requests_per_s: float  # of two tiers, for each device for tokens
    cost_share: float | None
    kilodollar_tokens: float | None  # tokens per second for each $1,000, of two tiers
    one_tier_kilodollar_tokens: float | None


def explain(
    spec: ModelSpec,
    rows: Sequence[WorkloadRequest],
    vision: DeviceKind,
    language: DeviceKind,
    links: Sequence[Link],
) -> Explanation:
    """`vision` encodes, `language` does everything else; `links` lie between them (`hardware/devices.py`). Raises
    ConfigError for a workload without requests, or with pictures that the model cannot take."""
    if not rows:
        raise ConfigError("the workload has no requests to explain", param="workload")
    asked = tuple(works(spec, rows))
    dtype_bytes = DTYPE_BYTES[language.costs.dtype]
    pictured = [work for work in asked if work.features]
    moved_kv = _mean([kv_bytes(spec, work.prompt, dtype_bytes) for work in pictured]) if pictured else None
    moved = _mean([feature_bytes(spec, work.features, dtype_bytes) for work in pictured]) if pictured else None
    seconds = RequestSeconds(
        _mean([vision_seconds(vision.costs.surface, work) for work in asked]),
        _mean([prefill_seconds(language.costs.surface, work) for work in asked]),
        _mean([decode_seconds(language.costs.surface, work) for work in asked]),
    )
    own_vision_s = _mean([vision_seconds(language.costs.surface, work) for work in asked])
    rho, own_rho = seconds.vision / seconds.language, own_vision_s / seconds.language
    prices = prices_of(vision, language)
    num_vision = vision_devices(rho, 1.0)
    rate = throughput(num_vision, 1.0, seconds.vision, seconds.language)
    output = _mean([work.output for work in asked])
    two_tiers, one_tier = _kilodollar_tokens(rate * output, num_vision, own_rho, vision, language)
    encodes = [vision_seconds(vision.costs.surface, work) for work in pictured if work.encoded]
    return Explanation(
        vision_device=vision.name,
        language_device=language.name,
        num_requests=len(asked),
        with_pictures=len(pictured),
        prompt_tokens=_mean([work.prompt for work in asked]),
        features=_mean([work.features for work in asked]),
        output_tokens=output,
        kv_bytes=moved_kv,
        feature_bytes=moved,
        ratio=moved_kv / moved if moved_kv is not None and moved else None,
        links=tuple(_link_test(link, moved_kv, moved, _mean(encodes)) for link in links) if moved_kv and moved else (),
        seconds=seconds,
        one_tier_vision_s=own_vision_s,
        rho=rho,
        one_tier_rho=own_rho,
        prices=prices,
        num_vision=num_vision,
        requests_per_s=rate,
        cost_share=None if prices is None else cost_share(rho, prices.ratio, own_rho),
        kilodollar_tokens=two_tiers,
        one_tier_kilodollar_tokens=one_tier,
    )


def _link_test(link: Link, kv: float, features: float, encode_s: float) -> LinkTest:
    return LinkTest(link.name, link.bytes_per_s, features / link.bytes_per_s, kv / link.bytes_per_s, encode_s)


def _kilodollar_tokens(
    tokens_per_s: float, num_vision: float, one_tier_rho: float, vision: DeviceKind, language: DeviceKind
) -> tuple[float | None, float | None]:
    """Tokens per second for each $1,000 of two tiers and of one, per language device; None without prices to buy."""
    if not language.price:
        return None, None
    one_tier = tokens_per_kilodollar(tokens_per_s, (1 + one_tier_rho) * language.price)
    if vision.price is None:
        return None, one_tier
    return tokens_per_kilodollar(tokens_per_s, language.price + num_vision * vision.price), one_tier


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- in words


def lines(told: Explanation) -> list[str]:
    return [*_requests(told), *_transfers(told), *_balance(told), *_costs(told)]


def _requests(told: Explanation) -> list[str]:
    return [
        f"{told.num_requests} requests, {told.with_pictures} with pictures. On average a prompt has "
        f"{told.prompt_tokens:.0f} tokens, {told.features:.0f} of them features, and an answer "
        f"{told.output_tokens:.0f}.",
    ]


def _transfers(told: Explanation) -> list[str]:
    if told.kv_bytes is None or told.feature_bytes is None or told.ratio is None:
        return ["No request has pictures, so there is nothing to hand over from an encode."]
    found = [
        f"A request with pictures hands over {_size(told.kv_bytes)} of keys and values after its prefill, or "
        f"{_size(told.feature_bytes)} of features after its encode: {told.ratio:.3g} times less.",
    ]
    if not told.links:
        return found
    found.append(f"Against {1e3 * told.links[0].encode_s:.3g} ms of encode on {told.vision_device} that takes:")
    heads = ("link", "GB/s", "features ms", "% of encode", "KV ms", "% of encode", "small enough")
    table = [heads, *(_link_row(test) for test in told.links)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        found.append("  " + "  ".join(cells))
    return found


def _link_row(test: LinkTest) -> tuple[str, ...]:
    times = (1e3 * test.features_s, 100 * test.features_share, 1e3 * test.kv_s, 100 * test.kv_share)
    return (test.link, f"{test.bytes_per_s / 1e9:.3g}", *(f"{time:.3g}" for time in times), test.verdict)


def _balance(told: Explanation) -> list[str]:
    seconds, language = told.seconds, told.language_device
    tokens = f"{1e3 * seconds.prefill:.3g} ms of prefill and {1e3 * seconds.decode:.3g} ms of decode"
    if not told.with_pictures:
        return [f"A request keeps {language} busy for {tokens}: {told.requests_per_s:.3g} requests per second on each."]
    found = [
        f"A request keeps {told.vision_device} busy for {1e3 * seconds.vision:.3g} ms, and {language} for {tokens}: "
        f"rho = {told.rho:.3g}.",
        f"For each {language}, {told.num_vision:.3g} {told.vision_device} keep up: n_C = rho n_D, and "
        f"{told.requests_per_s:.3g} requests per second.",
    ]
    if told.vision_device != language:
        found.append(
            f"On {language} alone the encodes would take {1e3 * told.one_tier_vision_s:.3g} ms, rho = "
            f"{told.one_tier_rho:.3g}."
        )
    return found


def _costs(told: Explanation) -> list[str]:
    one_tier = told.one_tier_kilodollar_tokens
    if not told.with_pictures:
        return [] if one_tier is None else [f"For each $1,000: {one_tier:.3g} tokens per second."]
    if told.vision_device == told.language_device:
        return ["Both tiers are the same device, so there is no cost to compare."]
    if told.prices is None or told.cost_share is None:
        return [
            f"The prices of both devices are not known, so nothing is said about cost; give those of "
            f"{told.vision_device} and {told.language_device} with --price."
        ]
    saving, prices, language = 1 - told.cost_share, told.prices, told.language_device
    found = [
        f"At gamma = {prices.ratio:.3g} ({told.vision_device} at {prices.vision:.6g} {prices.unit}, {language} at "
        f"{prices.language:.6g} {prices.unit}) two tiers cost {told.cost_share:.1%} of {language} alone with the same "
        f"throughput: {abs(saving):.1%} {'less' if saving >= 0 else 'more'}.",
    ]
    if told.kilodollar_tokens is not None and one_tier is not None:
        found.append(
            f"For each $1,000: {told.kilodollar_tokens:.3g} tokens per second on two tiers, {one_tier:.3g} on one."
        )
    return found


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.3g} MiB"
