"""The facts as rich tables."""

from __future__ import annotations

from rich.table import Table

MIB = 2**20


def _table(title: str, *columns: str) -> Table:
    """The first column holds names, the others numbers."""
    table = Table(title=title, title_justify="left")
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at else "left")
    return table


def tokens(count: float) -> str:
    """A number of tokens, rounded, with commas."""
    return f"{count:,.0f}"


def flops(count: float) -> str:
    """A number of FLOPs with its unit."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 1e6:,.2f} MFLOP"


def size(count: float) -> str:
    """Bytes with their unit."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / MIB:,.1f} MiB"


def milliseconds(count: float) -> str:
    """A number of ms without its unit; one decimal below 100."""
    return f"{count:,.0f}" if count >= 100 else f"{count:,.1f}"


def seen_table(facts: dict) -> Table:
    """What the last query of the context sees, and what generation keeps."""
    length = facts["model"]["seq_length"]
    table = _table(
        f"The query at the end of {tokens(length)} tokens",
        *("spec", "window", "beyond it, one head", "beyond it, all heads", "KV cache, tokens a KV head", "of dense"),
        *(["KV cache of a layer"] if any("cache_bytes" in layer for layer in facts["layers"]) else []),
    )
    for layer in facts["layers"]:
        rest = length - layer["window"]
        share = f" ({layer['all_beyond'] / rest:.0%})" if rest else ""
        table.add_row(
            layer["spec"],
            tokens(layer["window"]),
            tokens(layer["head_beyond"]),
            tokens(layer["all_beyond"]) + share,
            tokens(layer["cache_tokens"]),
            f"{layer['cache_share']:.1%}",
            *([size(layer["cache_bytes"])] if "cache_bytes" in layer else []),
        )
    return table


def kinds_table(facts: dict) -> Table:
    """The layers of a HybridModel."""
    table = _table("The layers of the HybridModel", "", "layers", "parameters", "a token sees", "FLOPs a token, linear")
    for kind in facts["kinds"]:
        numbers = (kind["parameters"], kind["active_parameters"])
        counted = ("not counted" if number is None else f"{number:,}" for number in numbers)
        table.add_row(f"{kind['symbol']} {kind['name']}", str(kind["layers"]), *counted, flops(kind["linear_flops"]))
    return table


def flops_table(facts: dict) -> Table:
    """What a token costs on average, forward and backward: the pairs that are attended beside those of dense layers."""
    found = facts["flops_per_token"]
    table = _table("FLOPs a token, forward and backward", "", "attended", "dense", "attended of dense")
    for name, mine, dense in (
        ("attention", found["attention"], found["dense_attention"]),
        ("linear layers", found["linear"], found["linear"]),
        ("model", found["model"], found["dense_model"]),
    ):
        table.add_row(name, flops(mine), flops(dense), f"{mine / dense:.1%}")
    return table


def exchange_table(facts: dict) -> Table:
    """Bytes are those of one sequence."""
    cp = facts["model"]["cp"]
    table = _table(
        f"A layer on {cp} context-parallel ranks: the busiest sends, a sequence",
        *("spec", "exchange", "forward", "backward", "work max / mean", "used"),
    )
    for entry in facts["exchange"]:
        for name, sent in entry["bytes"].items():
            table.add_row(
                entry["spec"],
                name.replace("te:", "Transformer Engine, "),
                size(sent["forward"]),
                size(sent["backward"]),
                f"{sent['balance']:.3f}",
                "yes" if name == entry["used"] else "",
            )
    return table


def time_table(facts: dict) -> Table:
    """The parts of a step in ms, of this run and of the same one with dense layers, and the speed-up."""
    forecast = facts["forecast"]
    mine, dense = forecast["run"], forecast["dense"]
    model = facts["model"]
    table = _table(
        f"Forecast of a step on {model['gpus']} x {forecast['gpu']}, ms",
        *("", "this run", "dense"),
    )
    for name in dict.fromkeys([*mine["parts_ms"], *dense["parts_ms"]]):
        table.add_row(name, *(milliseconds(each["parts_ms"].get(name, 0.0)) for each in (mine, dense)))
    table.add_section()
    table.add_row("step", milliseconds(mine["step_ms"]), milliseconds(dense["step_ms"]))
    table.add_row("tokens/s of all GPUs", *(tokens(each["tokens_per_second"]) for each in (mine, dense)))
    table.add_row(
        "TFLOP/s a GPU, attended pairs", *(f"{each['attended_tflops_per_gpu']:.0f}" for each in (mine, dense))
    )
    table.add_row("times dense", f"{forecast['speed_up']:.2f} x", "1")
    return table


def memory_table(facts: dict) -> Table:
    """The parts of the peak memory in GiB, of this run and of the same one with dense layers."""
    found = facts["memory"]
    mine, dense = found["run"], found["dense"]
    table = _table("Memory of the fullest GPU, GiB allocated", "", "this run", "dense")
    for name in dict.fromkeys([*mine["parts_gib"], *dense["parts_gib"]]):
        table.add_row(name, *(f"{each['parts_gib'].get(name, 0.0):,.2f}" for each in (mine, dense)))
    table.add_section()
    table.add_row("peak", *(_fits(facts, each["total_gib"]) for each in (mine, dense)))
    table.add_row("at", *(each["largest_at"] for each in (mine, dense)))
    return table


def _fits(facts: dict, gib: float) -> str:
    limit = facts["memory"].get("gpu_gib")
    return f"{gib:,.1f}" + (f" (of {limit:,.0f}: does not fit)" if limit and gib > limit else "")


def recompute_table(facts: dict) -> Table:
    """Peak memory, and step time where it is forecast, by --recompute-granularity."""
    steps = facts.get("forecast", {}).get("step_ms_by_recompute", {})
    table = _table("The same run by recomputation", "recompute", "peak GiB", *(["step, ms"] if steps else []))
    for name, gib in facts["memory"]["by_recompute"].items():
        table.add_row(name, _fits(facts, gib), *([milliseconds(steps[name])] if steps else []))
    return table


def notes(facts: dict) -> list[str]:
    """What the tables do not say of themselves, one line each."""
    lines = [f"warning: {text}" for text in facts["warnings"]]
    if "forecast" in facts:
        forecast = facts["forecast"]
        versions = ", ".join(f"{name} {number}" for name, number in forecast["versions"].items())
        lines.append(f"Forecast from measurements on {forecast['gpu']} ({versions}); see docs/inspect.md")
        lines += [f"note: {note}" for note in forecast["run"]["notes"]]
        theirs = [note for note in forecast["dense"]["notes"] if note not in forecast["run"]["notes"]]
        lines += [f"note on dense: {note}" for note in theirs]
    lines += [f"no forecast: {reason}" for reason in facts["no_forecast"]]
    return lines


def tables(facts: dict) -> list[Table]:
    """All that the facts have, in the order in which they are read."""
    found = [seen_table(facts)]
    if "kinds" in facts:
        found.append(kinds_table(facts))
    if "flops_per_token" in facts:
        found.append(flops_table(facts))
        if facts["exchange"]:
            found.append(exchange_table(facts))
    if "forecast" in facts:
        found.append(time_table(facts))
    if "memory" in facts:
        found += [memory_table(facts), recompute_table(facts)]
    return found
