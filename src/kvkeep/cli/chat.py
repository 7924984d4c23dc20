"""``kvkeep chat``: its options. The work is in `kvkeep.cli.chat_run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvkeep.cli import shell_completion
from kvkeep.cli.chat_folder import complete_names
from kvkeep.cli.generate import GenerationOptions, parse_memory
from kvkeep.cli.options import (
    BUDGET,
    JSON,
    MAX_NEW_TOKENS,
    NO_DEFAULT,
    PIN_SYSTEM,
    POLICY,
    REPETITION_DETECTION,
    check_one_adapter,
    option,
    parse_kept_tokens,
    parse_system,
)
from kvkeep.errors import InputError
from kvkeep.parameters import CHAT_MAX_NEW_TOKENS
from kvkeep.policies import CONVERSATION

_CHAT = "Conversation"


def parse_budget(text: str, option: str) -> int:
    """Return the number of tokens of ``--budget``.

    Raises:
        InputError: the text is a share, which means nothing in a conversation of unknown length, or no number.
    """
    if text.endswith("%"):
        raise InputError(
            f"{option} {text} is a share, and a conversation has no known length; give a number of tokens, e.g. 512."
        )
    return parse_kept_tokens(text, option)


@dataclass(frozen=True, kw_only=True)
class ChatOptions(GenerationOptions):
    """Talk with a model in the terminal, in a fixed amount of memory.

    The conversation is saved after each answer and continued by its name. /help lists what can be typed besides
    messages; Ctrl-C stops an answer, Ctrl-D ends. Without a terminal, each line of standard input is a message.
    """

    session: str | None = option(
        "Continue this conversation, or begin it. Default: a new one, named by date and time.",
        "-s",
        default=None,
        metavar="NAME",
        complete=complete_names,
        group=_CHAT,
    )
    memory: str | None = option(
        "Begin with a text that kvkeep remember has read.",
        default=None,
        read=parse_memory,
        metavar="FILE",
        complete=shell_completion.snapshots,
        group=_CHAT,
    )
    system: str | None = option(
        "A system message at the beginning.", read=parse_system, default=None, metavar="TEXT", group=_CHAT
    )
    sessions: str | None = option(
        "Folder of saved conversations. Default: KVKEEP_SESSIONS, or kvkeep/sessions in your data folder.",
        default=None,
        metavar="DIR",
        group=_CHAT,
        rare=True,
    )
    list_: bool = option("List the saved conversations and stop.", default=False, group=_CHAT)
    policy: str = option(
        POLICY,
        help=f"{POLICY.help} Default: {CONVERSATION}.",
        default="",
        more=NO_DEFAULT,
    )
    budget: int | None = option(BUDGET, help=f"{BUDGET.help} Default: 1024; under full 8192.", read=parse_budget)
    pin_system: bool = option(PIN_SYSTEM)
    max_new_tokens: int = option(MAX_NEW_TOKENS, default=str(CHAT_MAX_NEW_TOKENS.default))
    repetition_detection: bool | Mapping[str, int] = option(REPETITION_DETECTION, default="on", rare=False)
    json: bool = option(JSON, help="With --list: print one JSON object.")

    def checked(self) -> ChatOptions:
        """Return the options with the default policy if none was named, after checks that concern several options.

        Raises:
            InputError: options exclude each other.
        """
        if self.json and not self.list_:
            raise InputError("--json prints the list of conversations: give --list, too.")
        if self.memory is not None and self.system is not None:
            raise InputError("--memory brings its own beginning; give --system to kvkeep remember.")
        check_one_adapter(self.adapter, "a conversation")
        return replace(self, policy=self.policy or CONVERSATION, names_policy=self.policy != "")

    @property
    def run(self) -> str:
        """Return the function that does the work, as ``module:function``."""
        return "kvkeep.cli.chat_list:show" if self.list_ else "kvkeep.cli.chat_run:serve"
