"""KTO with a logistic loss in place of its sigmoid: what is far on the wrong side keeps its full pull."""

import torch
import torch.nn.functional as F


def loss(log_ratio, desirable, kl, beta):
    """Log-ratios to the reference and labels of completions [S] in, one term for each out."""
    gain = torch.where(desirable, log_ratio - kl, kl - log_ratio)
    return -F.logsigmoid(beta * gain)
