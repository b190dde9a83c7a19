"""Every training method, by the name a config uses."""

from upweight.methods.base import Method
from upweight.methods.distill import Distill
from upweight.methods.dpo import DPO
from upweight.methods.ebft import EBFT
from upweight.methods.gdpo import GDPO
from upweight.methods.grpo import GRPO
from upweight.methods.ipo import IPO
from upweight.methods.kto import KTO
from upweight.methods.orm import ORM
from upweight.methods.orpo import ORPO
from upweight.methods.prm import PRM
from upweight.methods.rloo import RLOO
from upweight.methods.sft import SFT
from upweight.methods.simpo import SimPO

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (SFT, DPO, IPO, KTO, ORPO, SimPO, GRPO, GDPO, RLOO, EBFT, Distill, ORM, PRM)
}


def feature_matcher(method: Method) -> EBFT | None:
    """The method with EBFT's settings where its rewards come from features, else None."""
    return method if isinstance(method, EBFT) else None
