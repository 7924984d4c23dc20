"""Forms of calls: how models of a family are told about tools, call them, and are told the results.

Each family was trained on one form. A chat template that takes ``tools`` tells the model by itself; for other templates
the form has words of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NAME = r"[A-Za-z0-9_-]{1,64}"
"""Names of tools, in OpenAI's words."""


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """How the models of a family call tools: a mark, then calls of a name and a JSON object.

    Attributes:
        name: the form's name.
        mark: begins the calls of an answer, as a text or as a special token.
        needs_mark: whether calls always begin with the mark.
        opens: texts between the mark and the name of the first call; the first one is written, all are read.
        middle: between a call's name and its arguments.
        close: after the arguments.
        next: between two calls; ``None``: an answer has one call.
        last: after the last call.
        short_ids: whether ids of calls have nine letters and digits.
        words: tell the model, where its template does not; ``{tools}`` are definitions as lines of JSON.
        result: a call's result as a message of the user; ``{content}`` is its text.
    """

    name: str
    mark: str
    needs_mark: bool = True
    opens: tuple[str, ...]
    middle: str
    close: str
    next: str | None = None
    last: str = ""
    short_ids: bool = False
    words: str
    result: str

    def text(self, calls: Iterable[tuple[str, str]]) -> str:
        """The text of some calls as the model writes them.

        Args:
            calls: names and arguments, which are JSON.
        """
        shown = [f"{name}{self.middle}{given}{self.close}" for name, given in calls]
        begin = f"{self.mark if self.needs_mark else ''}{self.opens[0]}"
        if self.next is None:
            return "\n".join(begin + one for one in shown)
        return begin + self.next.join(shown) + self.last


HERMES = ToolForm(
    name="hermes",
    mark="<tool_call>",
    opens=('\n{"name": "',),
    middle='", "arguments": ',
    close="}\n</tool_call>",
    next='\n<tool_call>\n{"name": "',
    words="""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>""",
    result="<tool_response>\n{content}\n</tool_response>",
)
"""Of Hermes and Qwen."""

LLAMA3 = ToolForm(
    name="llama3",
    mark="<|python_tag|>",
    needs_mark=False,
    opens=('{"name": "',),
    middle='", "parameters": ',
    close="}",
    words="""You can call these functions, each of which is described in a line of JSON:

{tools}

To call one, answer with a JSON object of its name and a dictionary of its arguments, and with nothing else:
{{"name": <function-name>, "parameters": <args-json-object>}}""",
    result="Result of the function: {content}",
)
"""Of Llama 3.1 to 3.3: one call in an answer."""

MISTRAL = ToolForm(
    name="mistral",
    mark="[TOOL_CALLS]",
    opens=(' [{"name": "', '[{"name": "'),
    middle='", "arguments": ',
    close="}",
    next=', {"name": "',
    last="]",
    short_ids=True,
    words="""[AVAILABLE_TOOLS]
{tools}
[/AVAILABLE_TOOLS]
To call functions, answer: [TOOL_CALLS] [{{"name": <function-name>, "arguments": <args-json-object>}}]""",
    result="[TOOL_RESULTS] {content} [/TOOL_RESULTS]",
)
"""Of Mistral 7B v0.3, Mixtral and Mistral Nemo."""

TOOL_FORMS: Mapping[str, ToolForm] = {one.name: one for one in (HERMES, LLAMA3, MISTRAL)}


@dataclass(frozen=True)
class ToolUse:
    """How one model uses tools.

    Attributes:
        form: the form of its calls.
        by_template: whether its chat template takes tools, calls and results.
        token: the mark's token id, if it is a special token: texts of answers then do not show it.
    """

    form: ToolForm = HERMES
    by_template: bool = False
    token: int | None = None


BY_WORDS = ToolUse()
"""Hermes' form, for a chat template that knows no tools."""
