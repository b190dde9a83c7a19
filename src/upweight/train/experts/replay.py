"""How the routing of the sampler and of the training forward differ, measured in the rows of a step."""

from upweight.types import Mean, Metrics, Outputs


def replay_metrics(out: Outputs) -> Metrics:
    """Return the shares of tokens and of choices that are routed differently from sampling."""
    if out.router_changes_4 is None:
        return {}
    choices_changed, tokens_changed, choices, tokens = out.router_changes_4.unbind()
    return {
        "router/rerouted_choices": Mean(choices_changed, choices),
        "router/rerouted_tokens": Mean(tokens_changed, tokens),
    }
