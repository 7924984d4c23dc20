"""How the lines of a batch job are read and run, in this process and on workers of Ray.

Prompts become token ids here; after a memory, those that follow its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, TypeAlias, TypeGuard, cast

from kvkeep.batch.input import BadLine, InputLine, after, parse, with_adapter
from kvkeep.batch.output import OutputFile
from kvkeep.batch.survey import TokenCounts
from kvkeep.cache.rotary_probe import position_mode
from kvkeep.cli import console, distributed
from kvkeep.cli.cluster import PROCESS_BYTES, room_for, whole, whole_policy, whole_rule
from kvkeep.cli.generate import BatchOptions, GenerateOptions
from kvkeep.cli.generate_run import SavedMemory, engine_for, sampling_of
from kvkeep.cli.loading import writer_of
from kvkeep.cli.progress import BatchBar
from kvkeep.engine.admission import DEFAULT_ROWS
from kvkeep.engine.detokenizer import TokenTexts
from kvkeep.engine.engine import Engine
from kvkeep.engine.prompt_encoding import ConversationHistory, question_of
from kvkeep.engine.request import Request as Asked
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError, KVKeepError
from kvkeep.models import tokenization
from kvkeep.models.adapters import weights_of_all
from kvkeep.models.chat_templates import reads
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.compile import compile_layers
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import find, quiet
from kvkeep.models.message_tokens import system_spans
from kvkeep.models.prepare import prepare_for_rows, restore_modules, weight_layout
from kvkeep.models.tiny import embedded
from kvkeep.models.tokenization import Writer
from kvkeep.openai.messages import ParameterError
from kvkeep.openai.requests import Prompt
from kvkeep.pins import Spans
from kvkeep.planning.plan import plan
from kvkeep.policies.registry import parse as parse_policy
from kvkeep.policies.registry import spec
from kvkeep.scale.driver import run_pieces
from kvkeep.scale.worker import LINES, Built, EngineFacts
from kvkeep.scale.worker_pool import Item, WeightLayout, WorkerPool, WorkResult

Read: TypeAlias = Callable[[int, bytes], InputLine | BadLine]


def reader(
    checkpoint: Checkpoint, request: GenerateOptions, defaults: SamplingParams, memory: SavedMemory | None
) -> Read:
    """Return a function that takes a line's number and bytes, and returns its requests with the prompts as token ids.

    It returns a `BadLine` for a line that cannot be run. Each prompt follows the memory, if any.

    Raises:
        InputError: the memory is a conversation's.
    """
    past, policy = None if memory is None else _past_of(memory), parse_policy(request.policy)
    mode = position_mode(checkpoint.config, request.positions, own=policy.defaults.positions)
    longest = checkpoint.max_model_len(slot_positions=mode == "slot")
    if longest is not None and past is not None:
        longest -= len(past.ids)

    def encode(prompt: Prompt, *, raw: bool = False, **template: Any) -> Sequence[int]:
        if _are_ids(prompt):
            return _known(checkpoint, prompt)
        raw, special = raw or request.raw, {}
        # the tokenizer's argument, not the template's
        if "add_special_tokens" in template:
            special["add_special_tokens"] = template.pop("add_special_tokens")
        if isinstance(prompt, str):
            asked = Asked(prompt=prompt, raw=raw)
        else:
            asked = Asked(messages=cast(list[dict[str, str]], prompt), **template)
        if past is not None and (more := [*template, *(name for name, wanted in special.items() if wanted)]):
            raise ParameterError(min(more), "changes a chat template, and the line follows a remembered text")
        return _encode(checkpoint, asked, **special) if past is None else _encode_after(checkpoint, asked, past)

    def pinned(prompt: Prompt) -> Spans:
        return system_spans(checkpoint, prompt) if request.pin_system else ()

    def read_by_template(variable: str) -> bool:
        return reads(checkpoint.tokenizer, variable)

    def read(number: int, raw: bytes) -> InputLine | BadLine:
        line = parse(
            number,
            raw,
            encode,
            defaults,
            pinned=pinned,
            raws=request.raw,
            reads=read_by_template,
            max_model_len=longest,
        )
        line = with_adapter(line, request.model or "embedded", tuple(request.adapter))
        return line if memory is None else after(line, memory.snapshot, request.policy)

    return read


def _past_of(memory: SavedMemory) -> ConversationHistory:
    """Return what a memory knows of the text that it was made from: its token ids, and how questions follow.

    Raises:
        InputError: the memory is a conversation's.
    """
    past = ConversationHistory.of(memory.snapshot)
    if past.messages:
        raise InputError(
            f"{memory.file} is the memory of a conversation, and a batch job asks about a text that kvkeep remember "
            "has read. Ask it one question at a time: leave --input out, and give -p QUESTION."
        )
    return past


def _are_ids(prompt: Prompt) -> TypeGuard[list[int]]:
    """Return whether a prompt, which is not empty, is a list of token ids, not a text or messages."""
    return not isinstance(prompt, str) and isinstance(prompt[0], int)


def _encode(checkpoint: Checkpoint, asked: Asked, **special: bool) -> list[int]:
    """Return the token ids of a request's messages, by the chat template, or of its text.

    Args:
        checkpoint: the model.
        asked: the request.
        special: arguments of the tokenizer, such as ``add_special_tokens``.
    """
    if asked.messages is not None:
        how: dict[str, Any] = {**asked.templated, **special}
        chat: list[int] = tokenization.encode_chat(checkpoint, asked.messages, **how)[0].tolist()
        return chat
    found: list[int] = tokenization.encode(checkpoint, str(asked.prompt), raw=asked.raw, **special)[0].tolist()
    return found


def _encode_after(checkpoint: Checkpoint, asked: Asked, past: ConversationHistory) -> list[int]:
    """Return the token ids of a prompt that follows a remembered text.

    The text may have an opening, by which its questions follow; otherwise it was read as it is.
    """
    if past.opening is not None:
        question, more = question_of(asked, past.opening)
        return past.opening.rest(checkpoint, question, past.ids, more)
    messages = asked.messages
    if messages is None and not asked.raw and checkpoint.tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": str(asked.prompt)}]
    if messages is not None:
        chat: list[int] = tokenization.encode_next(checkpoint, (), messages)[0].tolist()
        return chat
    plain: list[int] = tokenization.encode_rest(checkpoint, str(asked.prompt))[0].tolist()
    return plain


def _known(checkpoint: Checkpoint, ids: list[int]) -> list[int]:
    """Return the same token ids, after a check that none lies beyond the model's vocabulary.

    Raises:
        InputError: a token lies beyond it.
    """
    vocabulary: int = checkpoint.config.get_text_config(decoder=True).vocab_size
    if max(ids) >= vocabulary:
        raise InputError(f"The prompt has token {max(ids)}, and the model knows only {vocabulary}.")
    return ids


# The model and the engine of a batch job, in this process or in that of a worker.


def rows_of(batch: BatchOptions, most: int) -> int:
    """Return how many rows an engine is asked to have for at most ``most`` requests: 1 or more.

    What fits into `kv_memory` may be less.
    """
    return max(1, min(most, batch.max_rows or (most if batch.kv_memory else DEFAULT_ROWS)))


def engine_of(
    writer: Writer,
    request: GenerateOptions,
    batch: BatchOptions,
    *,
    most: int,
    budget: int,
    like: WeightLayout | None = None,
) -> Engine:
    """Return the engine of a batch job, with no more rows than requests and its layers prepared for these rows.

    Layers of a model that is split over processes stay as they are.

    Args:
        writer: the model.
        request: the options of the command.
        batch: the options of the job.
        most: the number of requests.
        budget: tokens kept per layer and head.
        like: how another worker of the job has laid out the weights, see `kvkeep.models.prepare.weight_layout`.

    Raises:
        BudgetError: not one row fits.
    """
    options: dict[str, Any] = {"rows": rows_of(batch, most), "kv_memory": batch.kv_memory}
    # nobody waits for the first answers, so full steps count more than early tokens
    engine = engine_for(writer, request, budget=budget, prompts_first=True, **options)
    if distributed.processes() > 1:  # each would choose for itself which layers to pack, and round in another way
        return engine
    prepare_for_rows(writer.model, engine.rows, like)
    if batch.compile:
        restore_modules(writer.model)  # torch compiles plain modules
        console.progress("compiling …")
        console.note(f"{console.count(compile_layers(writer.model), 'layer')} compiled")
    return engine


_ANY_LINE = b'{"prompt": "a"}'
"""Read for its side effects alone, see `EngineRecipe`."""


@contextmanager
def _meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Call a function in another thread while the context lasts, and wait for its end there.

    Its error is dropped: whoever needs the work later raises it.
    """

    def quietly() -> None:
        with suppress(Exception):  # see above
            work()

    thread = threading.Thread(target=quietly, name="kvkeep-meanwhile")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@dataclass(frozen=True, kw_only=True)
class EngineRecipe:
    """What a worker needs to make the engine of a job; see `kvkeep.scale.worker.Make`.

    Attributes:
        request: the options of the command, with whole paths.
        batch: the options of the job.
        most: the number of requests of a worker.
        budget: tokens kept per layer and head.
        memory: a fingerprint of the memory that every line follows.
    """

    request: GenerateOptions
    batch: BatchOptions
    most: int
    budget: int
    memory: str | None

    def __call__(self, like: WeightLayout | None) -> Built:
        """Load the model, make the engine, and return it with a reader of lines and fingerprints of the weights.

        Args:
            like: how another worker has laid out the weights.

        Raises:
            KVKeepError: the model or the memory cannot be used here, or not one row fits.
        """
        with quiet(), enough_memory(parse_device(self.request.device)):
            memory = None if self.request.memory is None else SavedMemory.read(self.request.memory)
            if memory is not None and memory.digest != self.memory:
                raise InputError(f"{self.request.memory} is another memory on a worker. Give every node the same file.")
            checkpoint = find(self.request.model or embedded(), allow_pickle=self.request.allow_pickle)
            read_line = reader(checkpoint, self.request, sampling_of(self.request), memory)
            with _meanwhile(lambda: read_line(0, _ANY_LINE)):  # starts the process that fills in chat templates
                writer = writer_of(checkpoint, self.request, self.request.adapter)
                weights = weights_of_all(writer.model)  # before layers are packed
            engine = engine_of(writer, self.request, self.batch, most=self.most, budget=self.budget, like=like)
        snapshot = None if memory is None else memory.snapshot
        return Built(
            engine, read_line, TokenTexts(checkpoint.tokenizer), weights, weight_layout(writer.model), snapshot
        )


# A batch job on workers of Ray: this process reads the lines, hands them out, and writes the answers.


def pool_of(
    request: GenerateOptions,
    batch: BatchOptions,
    *,
    requests: int,
    longest: int,
    budget: int,
    memory: str | None,
    like: WeightLayout | None = None,
) -> WorkerPool[EngineFacts]:
    """Return the workers of a job, which have not been started yet. The cluster must have been joined.

    Args:
        request: the options of the command.
        batch: the options of the job.
        requests: number of all requests.
        longest: tokens of the longest one.
        budget: tokens kept per layer and head.
        memory: a fingerprint of the memory that every line follows.
        like: how an earlier run of the job laid out the weights.

    Raises:
        InputError: nodes have other versions than this process, or the workers do not fit.
    """
    assert batch.workers is not None
    most = ceil(requests / batch.workers)
    need, device = room_for(
        batch.workers,
        _bytes(request, batch, most, longest, budget),
        device=request.device,
        threads=request.threads,
        address=batch.address,
    )
    places: dict[str, Any] = {"model": whole(request.model), "memory": whole(request.memory)}
    places["adapter"] = {name: str(whole(folder)) for name, folder in request.adapter.items()}
    if request.memory is None:  # otherwise these are the memory's own words, by which a worker knows its settings
        places["policy"] = spec(whole_policy(parse_policy(request.policy)))
        places["head_budget"] = whole_rule(request.head_budget)
    asked = replace(request, **places, device=device)
    recipe = EngineRecipe(request=asked, batch=batch, most=most, budget=budget, memory=memory)
    return WorkerPool(LINES, recipe, batch.workers, need, like=like, tell=console.note)


def _bytes(request: GenerateOptions, batch: BatchOptions, most: int, longest: int, budget: int) -> int:
    """Return the bytes of main memory of a worker, as ``kvkeep plan`` counts; 0 for a model that cannot be planned.

    Args:
        request: the options of the command.
        batch: the options of the job.
        most: the number of requests of the worker.
        longest: tokens of the longest request.
        budget: tokens kept per layer and head.
    """
    names = ("kv_bits", "layer_budget", "head_budget", "prefill_chunk", "positions", "dtype")
    options: dict[str, Any] = {name: getattr(request, name) for name in names}
    with suppress(KVKeepError):
        made = plan(request.model or embedded(), request.policy, budget, context=longest, **options)
        weights, row = made.bounded.weight_bytes, made.bounded.row_bytes
        rows = rows_of(batch, most)
        slots = min(rows * row, batch.kv_memory) if batch.kv_memory else rows * row
        # nobody knows how many bytes weights of fewer bits take
        return PROCESS_BYTES + slots + (weights if request.load_in is None else 0)
    return 0


class RayRunner:
    """The lines of a job on their way through workers.

    Args:
        pool: the workers.
        lines: the lines that are not done yet, while they are read.
        work_of: returns the tokens of a line's requests.
    """

    engine: Engine | None = None

    def __init__(
        self, pool: WorkerPool[EngineFacts], lines: Iterator[Item], work_of: Callable[[int], TokenCounts]
    ) -> None:
        self._pool, self._lines, self._work_of = pool, lines, work_of
        self.size: Mapping[str, int] = {
            "rows": pool.facts.rows,
            "row_bytes": pool.facts.row_bytes,
            "workers": pool.size,
        }

    def run(self, output: OutputFile, bar: BatchBar, stopped: Callable[[], bool]) -> tuple[int, Mapping[int, str]]:
        """Run the lines and write their answers; return the number of new tokens, and the reasons of failed lines by
        number.
        """
        new = 0

        def write(answer: WorkResult) -> None:
            nonlocal new
            output.put(answer.number, answer.digest, answer.whole)
            new += answer.new
            bar.whole(self._work_of(answer.number), answer.new)

        def fail(answer: WorkResult) -> None:
            bar.whole(self._work_of(answer.number), None)

        lines = self._lines
        outcome = run_pieces(
            self._pool, lambda worker: next(lines, None), write, stopped, told=[output.own], on_failure=fail
        )
        return new, outcome.failed
