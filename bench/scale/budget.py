"""Cores that the one frontend would need under each simulated load, by what for: it has one, as it runs on one loop.

Counts of the simulation times seconds of the other parts. Decoding of pictures, which has processes of its own, and
HTTP but for streamed tokens are left out."""

from __future__ import annotations

from typing import Any


def budget(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each simulated deployment; [] where a part is missing."""
    if not {"simulate", "wire", "tokens"} <= parts.keys():
        return []
    return [_row(row, parts) for row in parts["simulate"]["rows"]]


def _row(row: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    calls, sent = row["frontend"]["calls"], row["frontend"]["messages"]
    wire = parts["wire"]
    reads = {one["kind"]: 1e-6 * (one["open_us"] + one["decode_us"]) for one in wire["messages"]}
    pictures = next(one for one in wire["requests"] if one["picture"])
    routing = sum(calls[name]["core"] for name in ("route", "decoder", "encoders") if name in calls)
    per_s = row["rate_per_device"] * row["devices"]
    others = sum(one["per_s"] for kind, one in sent.items() if kind != "Status")
    pings = row["devices"] / wire["ping_period_s"]
    status_s = sent["Status"]["per_s"]
    cores = {
        "streamed tokens": 1e-6 * row["frontend"]["tokens_per_s"] * parts["tokens"]["us_per_token"],
        "routing": routing,
        "requests with pictures": 1e-6 * per_s * (pictures["encode_us"] + pictures["seal_us"]),
        "messages of steps": (others + pings) * reads["Tokens"],
        "statuses": status_s * reads["Status"] + calls["on_status"]["core"],
        "tables and ticks": calls["submit"]["core"] - calls["route"]["core"] + calls["tick"]["core"],
    }
    status_bytes = status_s * sent["Status"]["bytes"]
    return {
        "topology": row["topology"],
        "devices": row["devices"],
        "cores": cores,
        "all": sum(cores.values()),
        "status_per_s": status_s,
        "status_bytes_per_s": status_bytes,
        "messages_per_s": others + status_s,
        "bytes_per_s": status_bytes + sum(o["per_s"] * o["bytes"] for k, o in sent.items() if k != "Status"),
    }
