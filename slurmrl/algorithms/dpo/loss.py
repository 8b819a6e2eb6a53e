"""The losses of DPO as pure functions of log-probabilities. P pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slurmrl.algorithms.dpo.schema import DPO
from slurmrl.algorithms.pairs import PairValues


def pair_losses(logratios: PairValues, dpo: DPO) -> Tensor:
    """[P] from log(p / p_ref) of the answers. With h the chosen answer's minus the rejected one's:

    - sigmoid: -(1 - e) log s(beta h) - e log s(-beta h) with the label smoothing e (Rafailov et al.
      2023, eq. 7; with e, the conservative DPO of Mitchell 2023);
    - ipo: (h - 1 / (2 beta))^2 (Azar et al. 2023, eq. 17);
    - hinge: max(0, 1 - beta h) (Zhao et al. 2023, on log-ratios as in Liu et al. 2023).
    """
    h = logratios.chosen - logratios.rejected
    if dpo.loss == "ipo":
        return (h - 1.0 / (2.0 * dpo.beta)).square()
    if dpo.loss == "hinge":
        return torch.relu(1.0 - dpo.beta * h)
    smoothing = dpo.label_smoothing
    likely, flipped = -logsigmoid(dpo.beta * h), -logsigmoid(-dpo.beta * h)
    return (1.0 - smoothing) * likely + smoothing * flipped
