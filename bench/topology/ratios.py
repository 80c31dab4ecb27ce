"""The ways to share a number of devices out over roles: HydraInfer's three families (section 5.3), E+PD and EPD."""

from __future__ import annotations

EPD = "EPD"
FAMILIES = ("EPD", "EP+D", "ED+P", "E+PD", "E+P+D")


def ratios(devices: int, *, quick: bool = False) -> dict[str, list[str]]:
    """Topologies by family, with ascending numbers of the first role. `quick`: few of each, and at least one."""
    if devices < 3:
        raise ValueError("give at least 3 devices: E+P+D needs one for each stage")
    splits = range(1, devices)
    topologies = {
        EPD: [f"{devices}EPD"],
        "EP+D": [f"{count}EP{devices - count}D" for count in splits],
        "ED+P": [f"{count}ED{devices - count}P" for count in splits],
        "E+PD": [f"{count}E{devices - count}PD" for count in splits],
        "E+P+D": [f"{e}E{p}P{devices - e - p}D" for e in splits for p in range(1, devices - e)],
    }
    return {family: _few(texts) for family, texts in topologies.items()} if quick else topologies


def _few(texts: list[str]) -> list[str]:
    """First, middle and last."""
    return [texts[place] for place in sorted({0, len(texts) // 2, len(texts) - 1})]
