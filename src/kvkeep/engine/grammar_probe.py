"""The script of the process that tries grammars for `kvkeep.engine.grammar`, one JSON line after another.

The first line is the tokenizer. A grammar that takes too long or too much memory ends this process and no other. It
imports neither torch nor transformers.
"""

import json
import re
import sys
from collections.abc import Mapping

from llguidance import LLMatcher, LLTokenizer, grammar_from

from kvkeep.models.sandbox_limits import limit_memory, serve

_TOKENIZER_BYTES = 2**31  # far more than the tables of a vocabulary take
_FOUND: list[LLTokenizer] = []  # the tokenizer of the first line; empty before it


def compiled(kind: str, text: str) -> str:
    """Translate a form into a grammar of llguidance.

    Args:
        kind: see `kvkeep.engine.request.Structure`.
        text: the schema, choices, regular expression or grammar.

    Raises:
        ValueError: the grammar cannot be read.
    """
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(text))))
    return grammar_from("grammar", text) if kind == "grammar" else LLMatcher.grammar_from_lark(text)


def _answer(line: str, memory_bytes: int) -> Mapping[str, object]:
    """Answer one line of input, which is JSON. The first line sets up the tokenizer and is answered with ``{}``. Each
    later one is a form, answered with its ``grammar`` or with an ``error``.

    Args:
        line: the line.
        memory_bytes: the memory that the process may take from then on, set once the tokenizer is there.
    """
    try:
        asked = json.loads(line)
        if not _FOUND:
            _FOUND.append(LLTokenizer(asked["tokenizer"], n_vocab=asked["vocabulary"], eos_token=asked["ends"]))
            # not before: the tokenizer itself takes far more memory than a grammar may
            limit_memory(memory_bytes)
            return {}
        grammar = compiled(asked["kind"], asked["text"])
        matcher = LLMatcher(_FOUND[0], grammar, log_level=0)
        # some grammars fail only when the first mask is computed, which must not happen in the engine
        matcher.compute_logit_bias()
        return {"error": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}
    except Exception as error:  # of the parser, whose errors have no common class
        return {"error": str(error) or type(error).__name__}


if __name__ == "__main__":
    serve(lambda line: _answer(line, int(sys.argv[1])), _TOKENIZER_BYTES)
