"""The tables of "An Image is Worth 16x16 Words" (arXiv 2010.11929) as data: one TOML file per table. No torch here.

Every row has its `source`, and a `note` where the paper contradicts itself or rounds. A `Reading` is our interpretation
of a detail that the paper leaves open. No other file quotes numbers of the paper.
"""

from vitral.paper.results import (
    Reported,
    ScalingRow,
    TransferRow,
    VtabRow,
    near_duplicates,
    objectnet,
    reported,
    table2,
    table5,
    table6,
    table7,
    table8,
    table9,
)
from vitral.paper.setups import (
    BitFinetuningRow,
    Reading,
    bit_finetuning,
    bit_pretraining,
    masked_training,
    pretraining_sets,
    readings,
    table1,
    table3,
    table4,
    vtab_tasks,
)

__all__ = [
    "BitFinetuningRow", "Reading", "Reported", "ScalingRow", "TransferRow", "VtabRow", "bit_finetuning",
    "bit_pretraining", "masked_training", "near_duplicates", "objectnet", "pretraining_sets", "readings", "reported",
    "table1", "table2", "table3", "table4", "table5", "table6", "table7", "table8", "table9", "vtab_tasks",
]  # fmt: skip
