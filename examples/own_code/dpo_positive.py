"""DPO-Positive (arXiv:2402.13228): a penalty where the chosen answer becomes less likely than under the reference."""

import torch.nn.functional as F


def loss(chosen_log_ratio, rejected_log_ratio, beta, penalty: float = 5.0):
    """Log-ratios to the reference of both sides [P] in, one term for each pair out."""
    lost = (-chosen_log_ratio).clamp(min=0)
    return -F.logsigmoid(beta * (chosen_log_ratio - rejected_log_ratio - penalty * lost))
