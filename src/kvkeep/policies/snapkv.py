"""Keeps the tokens that a prompt's last tokens attend to, and their neighbours; decides once, at the prompt's end.

Source: Li et al., arXiv:2404.14469; official code FasterDecoding/SnapKV, `snapkv_utils.py`.
Differs: one set per KV head (official: per query head, expanded); by default generated tokens slide (official: grow).
  Among equal scores, which max pooling often produces, the newest stay (official: as `topk` happens to order them).
  `recent`, `decay` and the presets are kvkeep's own: a narrow window needs more recent tokens than its own, and with
  `recent` and decode=score layers with sliding windows get less of a budget.
Fails when: the question comes in a later turn, so that the end of the prompt does not show it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from kvkeep.budget import between
from kvkeep.policies._prefill import ObservationWindow
from kvkeep.policies.base import Defaults, option
from kvkeep.types import Budget


@final
@dataclass(frozen=True, kw_only=True)
class SnapKV(ObservationWindow):
    """Pooled attention of an observation window."""

    recent: int = option(
        0, "newest tokens that stay, in place of the window; at most half of the budget; 0: the window"
    )

    presets: ClassVar[Mapping[str, str]] = {
        "default": "decode=score,window=8,kernel=13,recent=64",
        "late": "window=8,kernel=13,recent=16",
    }
    bibtex: ClassVar[str] = """@inproceedings{li2024snapkv,
  title     = {{SnapKV}: {LLM} Knows What You are Looking for Before Generation},
  author    = {Yuhong Li and Yingbing Huang and Bowen Yang and Bharat Venkitesh and Acyr Locatelli and Hanchen Ye and
               Tianle Cai and Patrick Lewis and Deming Chen},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
}"""

    @property
    def defaults(self) -> Defaults:  # type: ignore[override]  # depends on an option
        """Return that layers with sliding windows, whose tokens expire anyway, get less of a budget if `recent` is set
        and generated tokens compete.
        """
        return Defaults(layer_budget="sliding:0.5") if self.recent and self.decode == "score" else Defaults()

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: 0, and the observation window or `recent`."""
        return 0, between(0, budget // 2, self.recent) if self.recent else self.window

    @property
    def rated_from(self) -> int:  # type: ignore[override]  # depends on options
        """Return the smallest budget from which on a prompt's tokens are rated alike: under a smaller one `protected`
        leaves a part of the observation window out, which is then rated, too.
        """
        return 2 * min(self.recent, self.window)
