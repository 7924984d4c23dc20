"""The parameters of sampling, the cache, models and servers: name, type, range, default and meaning, each once.

The library's dataclasses, the command line, the server's schema and settings, and the options of a batch file's line
read them here.
Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

MODEL, MEMORY, SAMPLING = "Model", "KV memory", "Sampling"
SERVER, LIMITS = "Server", "Limits"
"""Groups of parameters, as the pages of help name them."""

MAX_TOKENS = 2**31 - 1
"""The largest position: positions are counted in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Describes a parameter.

    Attributes:
        name: its name in Python; the command line writes ``-`` for ``_``.
        kind: the type of its value. A whole number is a ``float``, too.
        help: what it does, in one line.
        group: see `MODEL`.
        default: the library's default. Commands and servers may have another one.
        least, most: the range of a number.
        excludes_least: whether the least value itself is outside.
        metavar: stands for the value on the pages of help.
        words: values that a shell proposes.
        takes_flag: whether true and false, for a rule of kvkeep's own and for none, may stand for the value.
        rare: whether few people need it, so that a page of help shows it on demand only.
    """

    name: str
    kind: type
    help: str
    group: str
    default: Any = None
    least: int | float | None = None
    most: int | float | None = None
    excludes_least: bool = False
    metavar: str | None = None
    words: tuple[str, ...] = ()
    takes_flag: bool = False
    rare: bool = False

    @property
    def json_types(self) -> tuple[type, ...]:
        """Return the types that the parameter's value may have in JSON. The last one names it in messages."""
        if self.takes_flag:
            return (bool, int, float) if self.kind is float else (bool, self.kind)
        return (int, float) if self.kind is float else (self.kind,)

    def allows(self, number: int | float) -> bool:
        """Return whether a number is in the range."""
        if self.least is not None and (number < self.least or (self.excludes_least and number == self.least)):
            return False
        return self.most is None or number <= self.most


MAX_NEW_TOKENS = Parameter(
    name="max_new_tokens",
    kind=int,
    help="Stop after so many new tokens.",
    group=SAMPLING,
    default=256,
    least=1,
    most=MAX_TOKENS,
    metavar="TOKENS",
)
MIN_NEW_TOKENS = Parameter(
    name="min_new_tokens",
    kind=int,
    help="No end token and no stop text ends a text with fewer tokens.",
    group=SAMPLING,
    default=0,
    least=0,
    most=MAX_TOKENS,
    metavar="TOKENS",
)
TEMPERATURE = Parameter(
    name="temperature",
    kind=float,
    help="Above 0, tokens are drawn.",
    group=SAMPLING,
    default=0.0,
    least=0,
    most=1000,
    metavar="NUMBER",
)
TOP_P = Parameter(
    name="top_p",
    kind=float,
    help="Draw among the likeliest that sum up to this.",
    group=SAMPLING,
    least=1e-6,
    most=1,
    metavar="NUMBER",
)
TOP_K = Parameter(
    name="top_k", kind=int, help="Draw among the N likeliest tokens.", group=SAMPLING, least=1, metavar="N"
)
MIN_P = Parameter(
    name="min_p",
    kind=float,
    help="Draw among tokens that are at least this share as likely as the likeliest.",
    group=SAMPLING,
    least=0,
    most=1,
    excludes_least=True,
    metavar="NUMBER",
    rare=True,
)
REPETITION_PENALTY = Parameter(
    name="repetition_penalty",
    kind=float,
    help="Above 1: tokens that were used become less likely.",
    group=SAMPLING,
    default=1.0,
    least=0.01,
    most=100,
    metavar="NUMBER",
    rare=True,
)
PRESENCE_PENALTY = Parameter(
    name="presence_penalty",
    kind=float,
    help="Lowers the logit of every token that was generated before.",
    group=SAMPLING,
    default=0.0,
    least=-2,  # this range, and the next two parameters', are those of OpenAI's API
    most=2,
    metavar="NUMBER",
)
FREQUENCY_PENALTY = Parameter(
    name="frequency_penalty",
    kind=float,
    help="Lowers the logit of a token each time that it was generated before.",
    group=SAMPLING,
    default=0.0,
    least=-2,
    most=2,
    metavar="NUMBER",
)
LOGIT_BIAS = Parameter(
    name="logit_bias",
    kind=dict,
    help="Token id → what is added to its logit.",
    group=SAMPLING,
    default=(),
    least=-100,
    most=100,
)
SEED = Parameter(
    name="seed",
    kind=int,
    help="The same seed draws the same text.",
    group=SAMPLING,
    default=0,
    least=0,
    most=2**63 - 1,  # seeds lie in int64 tensors
    metavar="N",
)
REPETITION_DETECTION = Parameter(
    name="repetition_detection",
    kind=dict,
    help="End a text that repeats itself: on, off, or a rule such as "
    "max_pattern_size=64,min_count=4,min_repeated_tokens=100.",
    group=SAMPLING,
    metavar="RULE",
    words=("on", "off"),
    takes_flag=True,
    rare=True,
)
REPETITION_RULE = {"max_pattern_size": 256, "min_count": 3, "min_repeated_tokens": 200}
"""The rule that ``on`` and ``true`` stand for. Tables of zeros, empty cells and rulers are mostly shorter."""
STOP_TOKEN_IDS = Parameter(
    name="stop_token_ids", kind=list, help="More tokens that end the text.", group=SAMPLING, default=()
)
INCLUDE_STOP_STR_IN_OUTPUT = Parameter(
    name="include_stop_str_in_output",
    kind=bool,
    help="Keep the stop text, or the token that ended the text.",
    group=SAMPLING,
    default=False,
)
SKIP_SPECIAL_TOKENS = Parameter(
    name="skip_special_tokens", kind=bool, help="Leave special tokens out of the text.", group=SAMPLING, default=True
)
ENDING_PARAMETERS = (STOP_TOKEN_IDS, INCLUDE_STOP_STR_IN_OUTPUT, SKIP_SPECIAL_TOKENS)
"""Where a text ends, and which of its tokens are shown: fields of `kvkeep.engine.request.Request`."""
TRUNCATE_PROMPT_TOKENS = Parameter(
    name="truncate_prompt_tokens",
    kind=int,
    help="Keep only so many last tokens of the prompt; -1: as many as the model takes.",
    group=SAMPLING,
    least=-1,
    most=MAX_TOKENS,
)
CHAT_TEMPLATE_KWARGS = Parameter(
    name="chat_template_kwargs",
    kind=dict,
    help='More variables of the chat template, such as {"enable_thinking": false}.',
    group=SAMPLING,
)
ADD_GENERATION_PROMPT = Parameter(
    name="add_generation_prompt",
    kind=bool,
    help="End the prompt with the beginning of an answer.",
    group=SAMPLING,
    default=True,
)
CONTINUE_FINAL_MESSAGE = Parameter(
    name="continue_final_message",
    kind=bool,
    help="Go on with the last message's text in place of a new answer.",
    group=SAMPLING,
    default=False,
)
REASONING_EFFORT = Parameter(
    name="reasoning_effort",
    kind=str,
    help="How long to think, for a chat template that reads it.",
    group=SAMPLING,
)
ADD_SPECIAL_TOKENS = Parameter(
    name="add_special_tokens",
    kind=bool,
    help="Put the tokenizer's own tokens around the prompt. Default: around a completion's, not around a chat's.",
    group=SAMPLING,
)
TEMPLATE_PARAMETERS = (CHAT_TEMPLATE_KWARGS, ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE, REASONING_EFFORT)
"""How a chat template is filled in."""
SAMPLING_PARAMETERS = {
    parameter.name: parameter
    for parameter in (
        MAX_NEW_TOKENS,
        MIN_NEW_TOKENS,
        TEMPERATURE,
        TOP_P,
        TOP_K,
        MIN_P,
        REPETITION_PENALTY,
        PRESENCE_PENALTY,
        FREQUENCY_PENALTY,
        LOGIT_BIAS,
        SEED,
        REPETITION_DETECTION,
    )
}
"""How tokens are chosen, and how many: the fields of `kvkeep.engine.sampling_params.SamplingParams`."""

POLICY = Parameter(
    name="policy",
    kind=str,
    help="Eviction policy, e.g. h2o:recent=32, see [b]kvkeep policies[/b].",
    group=MEMORY,
    metavar="POLICY",
)
BUDGET = Parameter(
    name="budget",
    kind=int,
    help="Tokens kept per layer and head, e.g. 512, 4K (4096) or 4k (4000).",
    group=MEMORY,
    least=1,
    metavar="TOKENS",
)
KEEP_RATIO = Parameter(
    name="keep_ratio",
    kind=float,
    help="The share of the prompt's tokens that is kept in place of a number of tokens, in (0, 1].",
    group=MEMORY,
    least=0,
    most=1,
    excludes_least=True,
    metavar="RATIO",
)
GUARD = Parameter(
    name="guard",
    kind=float,
    help="Take a quarter or half of the budget where the prompt then loses at most this share of attention, in [0, 1].",
    group=MEMORY,
    least=0,
    most=1,
    metavar="SHARE",
    rare=True,
)
PINS = Parameter(
    name="pins", kind=list, help="Spans of the prompt's positions that are never evicted.", group=MEMORY, default=()
)
KEEP_PROMPT = Parameter(
    name="keep_prompt",
    kind=float,
    help="Keep the prompt: true, or a share of the budget to which it is cut, e.g. 0.5. Default: false.",
    group=MEMORY,
    least=0,
    most=1,
    excludes_least=True,
    takes_flag=True,
    metavar="SHARE",
    words=("true", "0.5"),
)
CONVERSATIONS = Parameter(
    name="conversations",
    kind=str,
    help="Whether chats go on from what they left: auto (where it is as good), continue, fresh.",
    group=MEMORY,
    default="auto",
    metavar="MODE",
    words=("auto", "continue", "fresh"),
)
CONVERSATION_TTL = Parameter(
    name="conversation_ttl",
    kind=float,
    help="Forget conversations that nobody has continued for so long.",
    group=MEMORY,
    default=86400.0,
    least=0,
    most=10**9,  # MOST_SECONDS
    excludes_least=True,
    metavar="SECONDS",
    rare=True,
)
SYSTEM_SHARE = 0.25
"""The part of a budget up to which a system message is pinned unasked."""
PIN_SYSTEM = Parameter(
    name="pin_system",
    kind=str,
    help="Never evict the system message, where it takes at most a quarter of the budget: on or off.",
    group=MEMORY,
    default="on",
    metavar="MODE",
    words=("on", "off"),
    rare=True,
)
PREFILL_CHUNK = Parameter(
    name="prefill_chunk",
    kind=int,
    help="Read prompts in chunks: less memory, but a question at the end is read after evictions.",
    group=MEMORY,
    least=1,
    metavar="TOKENS",
)
LAYER_BUDGET = Parameter(
    name="layer_budget",
    kind=str,
    help="How the budget is spread over layers: uniform, ramp:0.2, pyramid:20, taper:0.5, sliding:0.25 (a "
    "quarter for layers with a sliding window, at most the window), or calibrated:FILE with the persistence.json of "
    "[b]kvkeep analyze[/b]. Default: the policy's own rule.",
    group=MEMORY,
    metavar="RULE",
    words=("uniform", "ramp:0.2", "pyramid:20", "taper:0.5", "sliding:0.25", "calibrated:"),
    rare=True,
)
HEAD_BUDGET = Parameter(
    name="head_budget",
    kind=str,
    help="How the budget is divided among KV heads: uniform, ada:0.2 within each layer, global:0.2 over all "
    "layers, or profile:FILE with the file of [b]kvkeep calibrate[/b]. Default: the policy's own rule.",
    group=MEMORY,
    metavar="RULE",
    words=("uniform", "ada:0.2", "global:0.2", "profile:"),
    rare=True,
)
KV_BITS = Parameter(
    name="kv_bits",
    kind=str,
    help="Bits of keys and values: 8, 4, k8v4 (keys 8, values 4), or 16, the model's dtype. Default: 16.",
    group=MEMORY,
    metavar="BITS",
    words=("8", "4", "k8v4", "16"),
)
POSITIONS = Parameter(
    name="positions",
    kind=str,
    help="true: tokens keep their positions in the text. slot: tokens get their rank in the cache, for streams "
    "longer than the trained length. Default: the policy's own mode.",
    group=MEMORY,
    metavar="MODE",
    words=("true", "slot"),
    rare=True,
)
REQUEST_CACHE_PARAMETERS = (POLICY, BUDGET, GUARD, PINS, KEEP_PROMPT)
"""What a single request may say about its cache."""

DTYPE = Parameter(
    name="dtype",
    kind=str,
    help="float32, bfloat16, float16, or auto: the checkpoint's dtype.",
    group=MODEL,
    default="auto",
    metavar="NAME",
    words=("auto", "float32", "bfloat16", "float16"),
)
DEVICE = Parameter(
    name="device",
    kind=str,
    help="cpu, cuda, cuda:1, or auto: CUDA if there is one.",
    group=MODEL,
    default="auto",
    metavar="NAME",
    words=("auto", "cpu", "cuda"),
)
LOAD_IN = Parameter(
    name="load_in",
    kind=str,
    help="Quantise the weights: int4 or int8 (on a CPU), fp8 (torchao; on CUDA int8, too), 4bit or 8bit (bitsandbytes, "
    "on CUDA). unpacked: leave no weights of a GGUF file packed.",
    group=MODEL,
    metavar="FORMAT",
    words=("int4", "int8", "fp8", "4bit", "8bit", "unpacked"),
    rare=True,
)
THREADS = Parameter(
    name="threads",
    kind=int,
    help="Threads on a CPU. Default: KVKEEP_THREADS, OMP_NUM_THREADS, or a choice by the model's size and the "
    "machine's load.",
    group=MODEL,
    least=1,
    metavar="N",
    rare=True,
)
GGUF = Parameter(
    name="gguf",
    kind=str,
    help="The GGUF file in the model's folder or repository: its name, or that of its quantisation on the hub.",
    metavar="FILE",
    group=MODEL,
    default=None,
    rare=True,
)
ADAPTER = Parameter(
    name="adapter",
    kind=str,
    help="A LoRA adapter of PEFT and a name for it; may be repeated (extra: adapters).",
    metavar="NAME=FOLDER",
    group=MODEL,
    rare=True,
)
ADAPTER_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What names of adapters look like, as a regular expression."""
ALLOW_PICKLE = Parameter(
    name="allow_pickle",
    kind=bool,
    help="Accept weights that are not safetensors. Only for files that you trust.",
    group=MODEL,
    default=False,
    rare=True,
)


MOST_SECONDS = 10**9
"""The longest time that a parameter may set; about 30 years."""
CHAT_MAX_NEW_TOKENS = replace(
    MAX_NEW_TOKENS, help="New tokens of a chat request that names no number.", default=1024, group=LIMITS
)
MAX_MODEL_LEN = Parameter(
    name="max_model_len",
    kind=int,
    help="Tokens of a prompt and its answer. Default: the trained length; with slot positions no limit.",
    group=LIMITS,
    least=2,
    metavar="TOKENS",
)
MAX_QUEUE = Parameter(
    name="max_queue",
    kind=int,
    help="Requests that may wait for a row.",
    group=LIMITS,
    default=256,
    least=0,
    metavar="N",
    rare=True,
)
QUEUE_TIMEOUT = Parameter(
    name="queue_timeout",
    kind=float,
    help="How long a request may wait for a row.",
    group=LIMITS,
    default=60.0,
    least=0,
    most=MOST_SECONDS,
    excludes_least=True,
    metavar="SECONDS",
    rare=True,
)
REQUEST_TIMEOUT = Parameter(
    name="request_timeout",
    kind=float,
    help="How long a request may run.",
    group=LIMITS,
    default=600.0,
    least=0,
    most=MOST_SECONDS,
    excludes_least=True,
    metavar="SECONDS",
    rare=True,
)
READ_TIMEOUT = Parameter(
    name="read_timeout",
    kind=float,
    help="How long a client may take to send a request, or stop reading its answer.",
    group=LIMITS,
    default=30.0,
    least=0,
    most=MOST_SECONDS,
    excludes_least=True,
    metavar="SECONDS",
    rare=True,
)
GRACE = Parameter(
    name="grace",
    kind=float,
    help="Time for running requests to end after SIGTERM or Ctrl-C.",
    group=LIMITS,
    default=30.0,
    least=0,
    most=MOST_SECONDS,
    excludes_least=True,
    metavar="SECONDS",
    rare=True,
)
MAX_BODY = Parameter(
    name="max_body",
    kind=int,
    help="The largest body of a request.",
    group=LIMITS,
    default=16 * 2**20,
    least=1,
    metavar="SIZE",
    rare=True,
)
KEY_REQUESTS = Parameter(
    name="key_requests",
    kind=int,
    help="Requests that one key may run at once.",
    group=SERVER,
    least=1,
    metavar="N",
    rare=True,
)
KEY_TOKENS = Parameter(
    name="key_tokens",
    kind=int,
    help="Tokens that one key may use per minute.",
    group=SERVER,
    least=1,
    metavar="N",
    rare=True,
)
HOST = Parameter(
    name="host",
    kind=str,
    help="Address to listen on; 0.0.0.0 is all.",
    group=SERVER,
    default="127.0.0.1",
    metavar="NAME",
)
PORT = Parameter(
    name="port",
    kind=int,
    help="Port to listen on; 0 is any free one.",
    group=SERVER,
    default=8000,
    least=0,
    most=65535,
    metavar="N",
)
PAGE = Parameter(name="page", kind=bool, help="Serve a page with a chat at /.", group=SERVER, default=True, rare=True)
SERVER_TIMES = (QUEUE_TIMEOUT, REQUEST_TIMEOUT, READ_TIMEOUT, GRACE)
"""How long a server waits, in seconds."""
SERVER_COUNTS = (MAX_MODEL_LEN, MAX_QUEUE, KEY_REQUESTS, KEY_TOKENS)
"""What a server counts."""
