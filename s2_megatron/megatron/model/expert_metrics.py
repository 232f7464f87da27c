"""The losses of experts' routers in the log of a HybridModel, some of whose pipeline stages may have no MoE layers."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)
from megatron.core.transformer.transformer_config import TransformerConfig


class StageMetrics(MoEMetricsTracker):
    """Megatron's tracker, in which a stage without MoE layers has what the others have. num_layers: of the model.

    Megatron 0.19.2 adds up one tensor of each stage. That of a stage with MoE layers has an entry for every layer, that
    of another stage as many as there are MoE layers (training_log in training/training.py), so that the sum hangs or
    ends the run; and the latter stage does not add up over the ranks that share a sequence.
    """

    def __init__(self, num_layers: int):
        super().__init__()
        self.num_layers = num_layers

    def ensure_initialized(self, name, num_layers, device=None) -> None:
        if name in self.metrics:
            return
        super().ensure_initialized(name, self.num_layers, device)
        entry = self.metrics[name]
        # As moe/router.py records them.
        if name in ("load_balancing_loss", "seq_load_balancing_loss"):
            entry.reduce_group = parallel_state.get_tensor_and_context_parallel_group()
        elif name == "global_load_balancing_loss":
            entry.reduce_group, entry.needs_dp_avg = _every_rank_of_a_stage(), False
        elif name == "z_loss":
            entry.avg_group = _every_rank_of_a_stage()

    @staticmethod
    def _count_moe_layers(num_layers: int, moe_layer_freq, mtp_num_layers: int | None) -> int:
        """num_layers: the E of the whole pattern. Megatron 0.19.2 adds the depths of multi-token prediction, whose
        layers the pattern has already, and so logs too low a mean."""
        return num_layers


def _every_rank_of_a_stage():
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def log_experts_of_all_stages(config: TransformerConfig) -> None:
    """Makes Megatron log the routers' losses of a HybridModel with StageMetrics."""
    num_layers = config.num_layers + (config.mtp_num_layers or 0)
    tracker = get_moe_metrics_tracker()
    if config.num_moe_experts and getattr(tracker, "num_layers", None) != num_layers:
        set_moe_metrics_tracker(StageMetrics(num_layers))
