"""The lines of an output: how a completion is written, and recognised by a later run.

An output line begins with the completion, and the completion with the number and the fingerprint of its input line; a
line in OpenAI's format has both in its ``id``. So the first bytes show that a job wrote the line, even if the machine
stopped before the rest was written.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvkeep import result_files
from kvkeep.engine.request import Result
from kvkeep.errors import InputError
from kvkeep.jobs import batch
from kvkeep.jobs.lines import COMPLETION, Line
from kvkeep.openai.responses import Show, answer

_BEGINNING = f'{{"{COMPLETION}": {{"line": %d, "digest": "%s", '
_WRITTEN_HERE = re.compile(
    rb'\{"completion": \{"line": \d+, "digest": "[0-9a-f]{32}", |\{"id": "batch_req_\d+_[0-9a-f]{32}", '
)


def record(line: Line, results: Sequence[Result], made_by: Mapping[str, Any], show: Show) -> dict[str, Any]:
    """A line of the output.

    Args:
        line: the line of the input.
        results: the results of its requests.
        made_by: the settings of the job.
        show: returns the text of a token, for log-probabilities in OpenAI's format.
    """
    if line.asked is not None:
        name, model = f"{line.number}-{line.digest}", str(made_by.get("model", "kvkeep"))
        body = answer(line.asked, results, name=name, created=int(time.time()), model=model, show=show)
        found = batch.line(line.number, line.digest, line.custom_id, body)
        return {**found, "kvkeep": result_files.finite([_kept(one) for one in results]), "made_by": made_by}
    own = {"options": line.options} if line.options else {}
    origin = {"line": line.number, "digest": line.digest, "made_by": made_by, **own}
    return {COMPLETION: result_files.finite({**origin, **_completion(results[0])}), **line.fields}


def as_line(fields: Mapping[str, Any]) -> bytes:
    """A line of strict JSON in UTF-8. Text that UTF-8 cannot hold, such as half of a character, is escaped."""
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(fields, allow_nan=False).encode() + b"\n"


def origin_of(raw: bytes, name: str) -> tuple[int, str, dict[str, Any]]:
    """The number, the fingerprint and the settings of an earlier run's line."""
    try:
        fields = json.loads(raw)
        if (found := batch.origin(fields)) is not None:
            return (*found, {"format": 1, **fields["made_by"]})
        completion = fields[COMPLETION]
        made_by = {"format": 1, **completion["made_by"]}  # the first version did not name itself
        return int(completion["line"]), str(completion["digest"]), made_by
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(
            f"{name} holds a line that is no completion, so this job cannot go on there. Give another output file."
        ) from error


def is_ours(torn: bytes, digests: Mapping[int, str], batch_lines: Collection[int]) -> bool:
    """Whether a line that was cut short was written by this job.

    Args:
        torn: the line.
        digests: line number → fingerprint, of the input's lines.
        batch_lines: the numbers of lines in OpenAI's format.
    """
    kinds = ((batch.BEGINNING if number in batch_lines else _BEGINNING, number) for number in digests)
    beginnings = ((kind % (number, digests[number])).encode() for kind, number in kinds)
    return bool(_WRITTEN_HERE.match(torn)) or any(beginning.startswith(torn) for beginning in beginnings)


def _completion(result: Result) -> dict[str, Any]:
    found = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.token_ids),
        "queued_s": result.queued_s,
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
        **_kept(result),
    }
    if result.logprobs:
        found["logprobs"] = [dataclasses.asdict(entry) for entry in result.logprobs]
    return found


def _kept(result: Result) -> dict[str, Any]:
    """What a request kept: its budget, and the share of attention that evicted tokens carried."""
    found = {"budget": result.budget, "lost_mass": dataclasses.asdict(result.lost_mass)}
    return found if result.guarded is None else {**found, "guarded": result.guarded}
