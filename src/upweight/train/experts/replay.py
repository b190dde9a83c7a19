"""How the routing of the sampler and of the training forward differ, measured in the rows of a step."""

from upweight.types import Batch, Mean, Metrics, Outputs


def replay_metrics(out: Outputs, batch: Batch) -> Metrics:
    """Return the shares of tokens and choices that are routed otherwise than in sampling, and the log-prob gap."""
    if out.router_changes_4 is None:
        return {}
    own, tokens_changed, choices, tokens = out.router_changes_4.unbind()
    metrics = {"router/rerouted_choices": Mean(own, choices), "router/rerouted_tokens": Mean(tokens_changed, tokens)}
    if out.logps_T is not None and batch.routed_logps_T is not None:
        metrics["router/logp_gap"] = Mean.of((out.logps_T - batch.routed_logps_T).abs())
    return metrics
