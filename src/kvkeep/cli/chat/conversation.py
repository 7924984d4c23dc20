"""The work of ``kvkeep chat``: the model is loaded, the conversation is found, and messages are answered.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

import shlex

import typer

from kvkeep import budget as budgets
from kvkeep.cli import console
from kvkeep.cli.chat import commands
from kvkeep.cli.chat.lines import Lines
from kvkeep.cli.chat.sessions import Folder, Place
from kvkeep.cli.chat.talk import Talk
from kvkeep.cli.generate.prepare import engine_for, sampling_of
from kvkeep.cli.generate.request import Request
from kvkeep.cli.loading import check_weights, writer_of
from kvkeep.cli.memories import Memory, settled
from kvkeep.engine import Engine
from kvkeep.engine.dispatcher import Uninterrupted
from kvkeep.errors import InputError, KVKeepError
from kvkeep.models import threads
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.document_prompt import check_system
from kvkeep.models.load import Checkpoint, embedded, find, quiet
from kvkeep.planning.plan import DEFAULT_BUDGET
from kvkeep.policies.registry import parse

ROOM = 8192
"""The default budget of a policy that keeps everything."""


def serve(request: Request, folder: Folder, name: str | None) -> None:
    """Hold a conversation until the user ends it.

    Raises:
        KVKeepError: the request, the model or the conversation cannot be used; or a message without a terminal.
        Exit: the user pressed Ctrl-C while nothing could be stopped but the program.
    """
    place = folder.claim(name)
    talk = None
    try:
        with quiet(), threads.restored(), enough_memory(parse_device(request.device)):
            talk = _begin(request, folder, place)
            _hold(talk)
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(console.INTERRUPTED) from interrupt
    finally:
        if talk is None:
            place.leave()
        else:
            _end(talk, request.model)


def _begin(request: Request, folder: Folder, place: Place) -> Talk:
    """Load the model and open the conversation, after checks that need no weights.

    Raises:
        KVKeepError: something cannot be used.
    """
    sampling = sampling_of(request)
    memory = _memory(request, place)
    request = settled(request, memory)
    policy = parse(request.policy)
    budgets.check(1 if request.budget is None else request.budget)
    check_weights(request)
    model = request.model or embedded()
    console.progress(f"loading {model} …")
    checkpoint = find(model, allow_pickle=request.allow_pickle)
    if memory is not None:
        memory.check_model(checkpoint)
    if request.system is not None:
        check_system(checkpoint, request.system)
    budget = request.budget or (DEFAULT_BUDGET if policy.evicts else ROOM)
    engine = _engine(checkpoint, request, budget)
    snapshot = None if memory is None else memory.snapshot
    return Talk(engine, folder, place, sampling=sampling, system=request.system, memory=snapshot)


def _memory(request: Request, place: Place) -> Memory | None:
    """The memory with which the conversation goes on or begins.

    Raises:
        InputError: the conversation has a beginning already, and the request brings another one.
        SnapshotError: a file cannot be used.
    """
    if not place.is_saved:
        return None if request.memory is None else Memory.read(request.memory)
    for flag, given in (("--memory", request.memory), ("--system", request.system)):
        if given is not None:
            raise InputError(
                f"The conversation {place.name} has begun without {flag}, which is for new ones. Leave it out, or "
                "give another name with --session."
            )
    return Memory.read(str(place.file), shown=f"the conversation {place.name}")


def _engine(checkpoint: Checkpoint, request: Request, budget: int) -> Engine:
    engine = engine_for(writer_of(checkpoint, request), request, budget=budget, rows=1)
    if checkpoint.tokenizer.chat_template is None:
        console.note(f"{checkpoint.name} has no chat template, so it continues your messages as text")
    return engine


def _hold(talk: Talk) -> None:
    """Answer messages until their end.

    Raises:
        KVKeepError: a message cannot be answered, and there is no terminal on which to try another one.
    """
    with Lines(talk.said()) as lines:
        if lines.on_terminal:
            console.err().print(console.facts(talk.greeting()))
        while _answer_next(lines, talk):
            pass


def _answer_next(lines: Lines, talk: Talk) -> bool:
    """Read a line and do what it asks for; return whether there may be more.

    Raises:
        KVKeepError: it cannot be done, and there is no terminal on which to try something else.
    """
    try:
        line = lines.read()
        if line is None:
            return False
        if commands.is_command(line):
            commands.run(line, talk)
        elif line.strip():
            talk.answer(line.strip(), stoppable=lines.on_terminal)
    except commands.Quit:
        return False
    except KeyboardInterrupt:
        if not lines.on_terminal:
            raise
        console.note("Ctrl-D or /quit ends the conversation")
    except KVKeepError as error:
        if not lines.on_terminal:
            raise
        console.error(str(error))
    return True


def _end(talk: Talk, model: str | None) -> None:
    """Leave the conversation, and say how to go on with it."""
    try:
        with Uninterrupted():
            talk.save()
    except KVKeepError as error:
        console.error(str(error))
    if talk.place.is_saved:
        words = ["kvkeep", "chat", *([] if model is None else [model]), "--session", talk.place.name]
        console.note("the conversation is saved; to go on:")
        console.err().print(f"    {shlex.join(words)}", soft_wrap=True)  # so that it can be copied
    talk.close()
