"""The interface of kvpress 0.5.5: its press classes and its pipeline, over kvkeep's policies.

    from kvkeep.compat.kvpress import SnapKVPress

    with SnapKVPress(compression_ratio=0.5)(model):
        model.generate(**inputs)

A press decides on the policy and the budget of a `kvkeep.BoundedCache`, which takes the place of the cache that a
prompt is read into. See ``docs/reference/kvpress.md`` for what each press becomes, and what differs.
"""

from collections.abc import Callable
from functools import partial
from typing import NoReturn

from kvkeep.compat.kvpress.pipeline import KVPressTextGenerationPipeline
from kvkeep.compat.kvpress.presses import (
    AdaKVPress,
    BasePress,
    BlockPress,
    ComposedPress,
    DecodingPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KeyRerotationPress,
    KnormPress,
    LeverageScorePress,
    ObservedAttentionPress,
    PerLayerCompressionPress,
    PyramidKVPress,
    RandomPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvkeep.errors import UnsupportedOperationError

__all__ = [
    "AdaKVPress",
    "BasePress",
    "BlockPress",
    "ComposedPress",
    "DecodingPress",
    "ExpectedAttentionPress",
    "KVPressTextGenerationPipeline",
    "KeyDiffPress",
    "KeyRerotationPress",
    "KnormPress",
    "LeverageScorePress",
    "ObservedAttentionPress",
    "PerLayerCompressionPress",
    "PyramidKVPress",
    "RandomPress",
    "ScorerPress",
    "SnapKVPress",
    "StreamingLLMPress",
    "TOVAPress",
]

WITHOUT_EQUAL = {
    "CAMPress": "merges evicted values into kept ones, and kvkeep stores what the model computed",
    "CURPress": "rates by sizes of keys and values; LeverageScorePress is near to it",
    "CapPress": "rates keys by the values that they add, a rule that kvkeep does not have",
    "ChunkKVPress": "keeps whole chunks of tokens; SnapKVPress with a wide kernel_size keeps neighbours together",
    "ChunkPress": "cuts each chunk of a prompt on its own; BlockPress lets chunks compete",
    "CompactorPress": "mixes leverage with attention that is not causal; LeverageScorePress is its first half",
    "CompressionRatioDecodingPress": "lets the cache grow with the answer; DecodingPress has a fixed size",
    "CriticalAdaKVPress": "rescales another press' scores; the policies defensivekv and restkv weigh values themselves",
    "CriticalKVPress": "rescales another press' scores; the policies defensivekv and restkv weigh values themselves",
    "DMSPress": "evicts below a threshold, so that the memory is not known before",
    "DuoAttentionPress": "needs measured heads: `kvkeep calibrate` makes the file for head_budget='profile:FILE'",
    "EntropyGatedChunkKVPress": "keeps whole chunks of tokens, as many as their entropy asks for",
    "ExpectedAttentionStatsPress": "needs statistics of the hub; ExpectedAttentionPress takes those of the prompt",
    "FastKVzipPress": "needs trained gates; the policy reread needs none",
    "FinchPress": "needs a delimiter token before the question; SnapKVPress rates by a prompt's end without one",
    "KVComposePress": "reads the text a second time; the policy reread works that out from the first one",
    "KVgradPress": "needs gradients; kvkeep runs models without",
    "KVzapPress": "needs trained models of the scores; the policy reread needs none",
    "KVzipPress": "reads the text a second time; the policy reread works that out from the first one",
    "LUKVPress": "needs curves of the hub for each model; `kvkeep calibrate` measures budgets of heads",
    "LagKVPress": "rates tokens by the spread of the partition after them, a rule that kvkeep does not have",
    "MergingPress": "merges evicted values into kept ones, and kvkeep stores what the model computed",
    "NonCausalAttnPress": "rates by attention to later tokens; the policy reread does so, too",
    "PrefillDecodingPress": "has one rule for prompts and another for answers; a policy of kvkeep decides on both",
    "QFilterPress": "needs filters of the hub for each model; ExpectedAttentionPress takes the prompt's queries",
    "RestoreKVPress": "needs trained adapters; the policy reread needs none",
    "SimLayerKVPress": "cuts some layers only; `kvkeep calibrate` measures which heads can do with less",
    "ThinKPress": "drops channels of keys; kv_bits makes keys smaller",
}
"""Press without an equal → why, and what is near to it."""


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return what stands for a press without an equal: a function that raises the reason when it is called.

    Raises:
        AttributeError: kvpress has no such name.
    """
    if name in WITHOUT_EQUAL:
        return partial(_refuse, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _refuse(press: str, *args: object, **kwargs: object) -> NoReturn:
    """Raise the error for a press that kvkeep cannot do.

    Raises:
        UnsupportedOperationError: always.
    """
    raise UnsupportedOperationError(f"{press} has no equal in kvkeep: it {WITHOUT_EQUAL[press]}.")
