"""What choose-dense prints of its measurements, and the content of --json."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.tools.choose_dense.plan import count_dense, with_dense
from s2_megatron.tools.choose_dense.search import DenseSet, Ranked, Sets

SHOWN = 10  # candidates
LEAST_LOSS = 1e-3  # of the dense loss: of less no share is told


class Sink(NamedTuple):
    """What a sink is worth. other: the plan without its sink, or, where it has none, with one. tokens: of the sink.
    loss, plan_loss: of the other plan and of the plan, no more heads dense. is_own: the plan has it."""

    other: ResolvedSparsity
    tokens: int
    loss: float
    plan_loss: float
    is_own: bool

    @property
    def losses(self) -> tuple[float, float]:
        """Without the sink, and with it."""
        return (self.loss, self.plan_loss) if self.is_own else (self.plan_loss, self.loss)

    def name(self, config: str) -> str:
        """Of the other plan."""
        return f"{config} without its sink" if self.is_own else f"{config} with sink_tokens: {self.tokens}"


def ranking(ranked: list[Ranked], without: float, dense: float) -> Table:
    """The best candidates. without: the plan's loss."""
    table = Table(
        title=f"What one more dense unit gains: the best {min(SHOWN, len(ranked))} of {len(ranked)}",
        title_justify="left",
    )
    for name in ("", "layer", "KV heads", "loss", "gain", "of the plan's gap"):
        table.add_column(name, justify="right")
    for place, (unit, loss) in enumerate(ranked[:SHOWN], 1):
        gain, gap = without - loss, without - dense
        heads = ", ".join(map(str, unit.heads))
        share = f"{gain / gap:.0%}" if gap > 0 else "-"
        table.add_row(str(place), str(unit.layer), heads, f"{loss:.4f}", f"{gain:+.4f}", share)
    return table


def sink_sentence(sink: Sink, dense: float, chosen: DenseSet | None, config: str) -> str:
    """What of the switch's loss is the sink's. dense: the loss of the dense model."""
    without, beside = (loss / dense - 1 for loss in sink.losses)
    heads = f", with {chosen.size} more dense {chosen.gap:+.2%}" if sink.is_own and chosen and chosen.size else ""
    share = f": the sink gives back {(without - beside) / without:.0%}" if without > LEAST_LOSS else ""
    if sink.is_own:
        return f"without its sink {config} is {without:+.2%} from dense, with it {beside:+.2%}{heads}{share}"
    return f"{config} is {without:+.2%} from dense, with sink_tokens: {sink.tokens} it would be {beside:+.2%}{share}"


def sets_table(
    sparsity: ResolvedSparsity, sets: Sets, chosen: DenseSet | None, sink: Sink | None, about: str, config: str
) -> Table:
    """The dense model, the plan without its sink or with one, the plan, and every set that was measured."""
    table = Table(title="The best units dense together", title_justify="left", caption=about, caption_justify="left")
    for at, name in enumerate(("plan", "dense KV heads", "pairs", "loss", "of dense")):
        table.add_column(name, justify="right" if at else "left")
    heads = len(sparsity.layers) * sparsity.num_kv_heads
    table.add_row("the checkpoint, dense", f"{heads} of {heads}", "100.0%", f"{sets.dense:.4f}", "-")
    if sink is not None:
        density, gap = f"{sink.other.density():.1%}", f"{sink.loss / sets.dense - 1:+.2%}"
        table.add_row(sink.name(config), f"{count_dense(sink.other)} of {heads}", density, f"{sink.loss:.4f}", gap)
    for size, found in sorted(sets.measured.items()):
        plan = with_dense(sparsity, sets.units[:size])
        name = f"{config} + the best {size}" if size else config
        table.add_row(
            f"{name}, chosen" if found is chosen else name,
            f"{count_dense(plan)} of {heads}",
            f"{plan.density():.1%}",
            f"{found.loss:.4f}",
            f"{found.gap:+.2%}",
        )
    return table


def facts(
    args, checkpoint: Path, beside, sets: Sets, ranked: list[Ranked], chosen: DenseSet | None, sink: Sink | None
) -> dict:
    """The content of --json but its "result", the plan of the YAML. beside: the plan that was measured under. Gaps
    are shares of the dense loss, "gap_by_sequence" adds up to the plan's; "chosen" is the size of the set, None
    without one; "sink" is None where the plan has none and shows the first token all the same.
    """
    return {
        "checkpoint": f"{checkpoint.parent.name}/{checkpoint.name}",
        "config": args.s2_config.name,
        "beside": args.beside and args.beside.name,
        "by": args.by,
        "sequences": args.sequences,
        "seq_length": beside.seq_length,
        "loss_from_position": args.loss_from_position,
        "dense_loss": sets.dense,
        "sink": None
        if sink is None
        else {"tokens": sink.tokens, "in_plan": sink.is_own}
        | dict(zip(("loss_without", "loss_with"), sink.losses, strict=True)),
        "candidates": [{"layer": unit.layer, "kv_heads": list(unit.heads), "loss": loss} for unit, loss in ranked],
        "sets": [
            {
                "size": size,
                "dense_kv_heads": count_dense(with_dense(beside, sets.units[:size])),
                "density": with_dense(beside, sets.units[:size]).density(),
                "loss": found.loss,
                "gap": found.gap,
            }
            for size, found in sorted(sets.measured.items())
        ],
        "chosen": None if chosen is None else chosen.size,
    }
