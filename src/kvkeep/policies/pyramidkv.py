"""Keeps SnapKV's tokens, with more slots in the lower layers and fewer in the higher ones.

Source: Cai et al., arXiv:2406.02069; official code Zefan-Cai/KVCache-Factory, `pyramidkv_utils.py`.
Differs: layer budgets add up exactly (official: floors) and do not depend on the prompt's length; see `budget.py`.
  Among equal scores, which max pooling often produces, the newest stay (official: as `topk` happens to order them).
Fails when: the high layers need more than the pyramid leaves them; see also SnapKV.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from kvkeep.policies._prefill import ObservationWindow
from kvkeep.policies.base import Defaults


@final
@dataclass(frozen=True, kw_only=True)
class PyramidKV(ObservationWindow):
    """SnapKV under a pyramid of layer budgets."""

    defaults: ClassVar[Defaults] = Defaults(layer_budget="pyramid")
    bibtex: ClassVar[str] = """@article{cai2024pyramidkv,
  title   = {{PyramidKV}: Dynamic {KV} Cache Compression based on Pyramidal Information Funneling},
  author  = {Zefan Cai and Yichi Zhang and Bofei Gao and Yuliang Liu and Yucheng Li and Tianyu Liu and Keming Lu and
             Wayne Xiong and Yue Dong and Junjie Hu and Wen Xiao},
  journal = {arXiv preprint arXiv:2406.02069},
  year    = {2024},
}"""
