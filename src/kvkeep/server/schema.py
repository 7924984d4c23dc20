"""The bodies of requests. Fields that are not named here are ignored, as clients of OpenAI's API expect."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field

from kvkeep.server.described import Messages, Prompts, Tool

Span = Annotated[list[int], Field(min_length=2, max_length=2)]
OWN = ("budget", "policy", "keep_ratio", "pins", "guard", "session_id")
"""Fields of kvkeep in the bodies of OpenAI's API."""


def _within(least: int | float, most: int | float | None = None, description: str | None = None) -> Any:
    """A number that may be left out; its range is described here, and checked where it is used."""
    limits = {"minimum": least} if most is None else {"minimum": least, "maximum": most}
    return Field(None, description=description, json_schema_extra=cast("dict[str, Any]", limits))


class Body(BaseModel):
    """A body."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())
    own: ClassVar[tuple[str, ...]] = OWN


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class Generating(Body):
    """The fields that all bodies have that ask for new tokens."""

    own: ClassVar[tuple[str, ...]] = (*OWN, "structured_outputs")
    model: str | None = None
    max_tokens: int | None = _within(0, description="The most new tokens.")
    min_tokens: int | None = _within(0, description="No end token and no stop text ends a text with fewer tokens.")
    temperature: float | None = _within(0, 1000, "0: the likeliest token. By default 1.")
    top_p: float | None = _within(1e-6, 1)
    top_k: int | None = _within(-1)
    min_p: float | None = _within(0, 1)
    repetition_penalty: float | None = _within(0.01, 100)
    presence_penalty: float | None = _within(-2, 2)
    frequency_penalty: float | None = _within(-2, 2)
    logit_bias: dict[str, float] | None = Field(None, description="Token id → what is added to its logit.")
    n: int | None = _within(1, 128)
    seed: int | None = _within(0, 2**63 - 1, "The same seed draws the same tokens. By default another one each time.")
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = Field(None, description="text, json_object or json_schema.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="vLLM's: one of json, json_object, regex, choice and grammar."
    )
    budget: int | None = _within(1, description="Tokens kept per layer and KV head.")
    keep_ratio: float | None = _within(0, 1, "The budget as a share of the prompt, in (0, 1].")
    policy: str | None = Field(None, description="The eviction policy, such as h2o:recent=32.")
    pins: list[Span] | None = Field(None, description="Spans of the prompt's positions that are never evicted.")
    guard: float | None = _within(0, 1, "The largest share of attention that the prompt's cut may lose.")

    def openai_fields(self) -> dict[str, Any]:
        """The fields that `kvkeep.openai.requests.read` knows."""
        return self.model_dump(exclude_none=True, exclude={"keep_ratio", "pins", "guard", "session_id"})


class ChatBody(Generating):
    """The body of a chat."""

    model_config = ConfigDict(json_schema_extra={"required": ["messages"]})
    messages: Messages = None
    max_completion_tokens: int | None = _within(1)
    logprobs: bool | None = None
    top_logprobs: int | None = _within(0, 20)
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(None, description="none, auto, required, or a function.")
    parallel_tool_calls: bool | None = None
    modalities: list[Any] | None = None
    session_id: str | None = Field(None, description="Continue the conversation of this session with new messages.")


class CompletionBody(Generating):
    """The body of a completion."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})
    prompt: Prompts = Field(None, description="A text, token ids, or a list of either.")
    logprobs: int | None = _within(0, 20)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeBody(Body):
    """A text or a conversation whose tokens are asked for."""

    own: ClassVar[tuple[str, ...]] = ()
    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """Tokens whose text is asked for."""

    own: ClassVar[tuple[str, ...]] = ()
    model: str | None = None
    tokens: list[int]


class SessionBody(Body):
    """A new session."""

    own: ClassVar[tuple[str, ...]] = ("id", "policy", "budget", "pins")
    id: str | None = Field(None, description="Its name: up to 64 letters, digits, - and _. By default a new one.")
    policy: str | None = None
    budget: int | None = None
    pins: list[Span] | None = Field(None, description="Spans of the first turn's positions that are never evicted.")


class ForkBody(Body):
    """A copy of a session."""

    own: ClassVar[tuple[str, ...]] = ("id",)
    id: str | None = Field(None, description="The name of the copy.")


class RewindBody(Body):
    """How far a session goes back."""

    own: ClassVar[tuple[str, ...]] = ("turns",)
    turns: int = Field(1, ge=1, description="Turns that are taken back.")


class PinBody(Body):
    """The body of a request that pins tokens of a session."""

    model_config = ConfigDict(json_schema_extra={"required": ["pins"]})
    own: ClassVar[tuple[str, ...]] = ("pins",)
    pins: list[Span] | None = Field(None, description="Spans of positions that no head may drop from now on.")


class ResponseBody(Body):
    """The body of a response."""

    own: ClassVar[tuple[str, ...]] = ("budget", "policy", "guard", "pins")
    model: str | None = None
    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    seed: int | None = None
    policy: str | None = None
    budget: int | None = None
    pins: list[Span] | None = None
    guard: float | None = None
